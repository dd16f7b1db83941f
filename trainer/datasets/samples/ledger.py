"""The ledger of a dataset: counts of what happened to its rows, printed at the start and stored with the run."""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset


@dataclass
class Ledger:
    """Counts by name, and the sentence that shows them. Token counts cover only the samples that are kept.

    Every kind of data has num_rows, num_samples and num_tokens. The other names belong to one kind.
    """

    counts: dict[str, int]  # as stored in metrics.jsonl and certificate.json
    sentence: str  # for str.format

    def __getitem__(self, name: str) -> int:
        return self.counts[name]

    def summary(self) -> str:
        return self.sentence.format(**self.counts)


def keep(samples: Dataset, kept: np.ndarray) -> Dataset:
    """The samples where `kept` (samples,) is true. A set that is kept whole stays as it is, without indices."""
    return samples if kept.all() else samples.select(np.flatnonzero(kept))
