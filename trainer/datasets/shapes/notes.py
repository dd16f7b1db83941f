"""What was recognised in the rows of a set, and what was not used: one note for each row, a few lines for the set."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

NOTE = "note"  # the column of a tokenized row that holds its note
SEPARATOR = "\t"


@dataclass
class Notes:
    """What is known of one row. `facts` are whole sentences."""

    shape: str = ""
    columns: set[str] = field(default_factory=set)  # not used
    keys: set[str] = field(default_factory=set)  # of messages and their parts, not used
    facts: set[str] = field(default_factory=set)

    def as_text(self) -> str:
        """The note as a column has it. Few different notes exist in a set."""
        parts = [self.shape, *(", ".join(sorted(names)) for names in (self.columns, self.keys)), *sorted(self.facts)]
        return SEPARATOR.join(parts)


def lines_of(samples: Any) -> list[str]:
    """The lines for the start of a run, from the notes of tokenized rows."""
    return lines_of_notes(name for batch in samples.select_columns([NOTE]).iter(10_000) for name in batch[NOTE])


def lines_of_notes(notes: Iterable[str]) -> list[str]:
    """The lines for the notes of some rows."""
    shapes: Counter = Counter()
    columns, keys, facts = set(), set(), set()
    for note, count in Counter(notes).items():
        shape, unused, dropped, *sentences = note.split(SEPARATOR) if note else ["", "", ""]
        shapes[shape] += count
        columns |= set(unused.split(", ")) - {""}
        keys |= set(dropped.split(", ")) - {""}
        facts |= set(sentences)
    shapes.pop("", None)
    total = sum(shapes.values())
    lines = [shape if count == total else f"{count} of them: {shape}" for shape, count in shapes.items()]
    if columns:
        lines.append(f"columns not used: {', '.join(sorted(columns))}")
    if keys:
        lines.append(f"keys of messages not used: {', '.join(sorted(keys))}")
    return lines + sorted(facts)
