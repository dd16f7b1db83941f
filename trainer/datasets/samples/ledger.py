"""The ledger of a dataset: counts of what happened to its rows, printed at the start and stored with the run."""

from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset

from trainer.datasets.shapes.notes import NOTE, summary_of_notes
from trainer.metrics import counted, in_words


@dataclass
class Ledger:
    """Counts by name, and the sentence that shows them. Token counts cover only the samples that are kept.

    Every kind of data has num_rows, num_samples and num_tokens. The other names belong to one kind.
    """

    counts: dict[str, int]  # as stored in metrics.jsonl and certificate.json
    sentence: str  # for in_words
    lines: list[str] = field(default_factory=list)  # how rows were read, and what of them is not used
    # names of --ignore_columns that rows have; None: not known, as with rows of prepare_data
    left_out: set[str] | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> int:
        return self.counts[name]

    def summary(self) -> str:
        return in_words(self.sentence, **self.counts)

    def report(self, name: str) -> str:
        """The summary of the set `name`, then how its rows were read."""
        return "\n".join([f"{name}: {self.summary()}", *self.lines])


def ledger_of(samples: Dataset, flag: str, counts: dict[str, int], sentence: str) -> Ledger:
    """The ledger with what the notes of tokenized rows say. `flag` names the rows."""
    notes = (note for batch in samples.select_columns([NOTE]).iter(10_000) for note in batch[NOTE])
    lines, left_out = summary_of_notes(notes)
    return Ledger(counts, sentence, lines + control_note(samples, flag), left_out)


def control_note(samples: Dataset, flag: str) -> list[str]:
    """The line about rows whose texts hold control tokens: their count, and the first of them as `flag` row N."""
    rows = samples.with_format("numpy").select_columns(["row", "control_tokens"])[:]
    found = rows["row"][rows["control_tokens"]]
    return note_of_controls(len(found), [f"{flag} row {number + 1}" for number in found[:3]])


def note_of_controls(count: int, places: list[str]) -> list[str]:
    """The line about `count` rows with control tokens; `places` are the first ones."""
    first = ", ".join(places) + ", ..." * (count > len(places))
    told = f"{counted(count, 'row holds', 'rows hold')} control tokens, read as plain text (--read_control_tokens keeps them): {first}"
    return [told] if count else []


def keep(samples: Dataset, kept: np.ndarray) -> Dataset:
    """The samples where `kept` (samples,) is true. A set that is kept whole stays as it is, without indices."""
    return samples if kept.all() else samples.select(np.flatnonzero(kept))
