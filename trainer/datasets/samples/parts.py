"""The two parts of a set, for --eval_fraction: rows that are trained, and rows that only evaluate.

A part is taken from tokenized rows. So both parts keep the row numbers of the whole set, and one file in the cache.
"""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from trainer.datasets.batches.global_batches import column_of
from trainer.errors import UserError


@dataclass(frozen=True)
class Part:
    """A part of a set: all rows without a fraction, else those of `evaluation_mask`, or the others."""

    fraction: float | None = None
    seed: int = 0
    limit: int | None = None
    is_evaluation: bool = False

    def of(self, samples: Dataset) -> Dataset:
        """The samples of this part. `samples` are all tokenized rows, with their digests. Raises UserError."""
        if self.fraction is None:
            return samples
        digests = samples.select_columns(["digest"]).with_format("arrow")[:]["digest"].dictionary_encode()
        kinds = np.concatenate([chunk.indices.to_numpy() for chunk in digests.unify_dictionaries().chunks])
        first = first_of_rows(samples)
        sizes = np.diff(first, append=len(kinds))
        together = first[:, None] + np.minimum(np.arange(sizes.max(initial=1)), sizes[:, None] - 1)
        evaluated = evaluation_mask(_connected(kinds[together]), self.fraction, self.seed, self.limit)
        return samples.select(np.flatnonzero(np.repeat(evaluated, sizes) == self.is_evaluation))


WHOLE = Part()


def first_of_rows(samples: Dataset) -> np.ndarray:
    """The place of the first sample of each row of the data, (rows,). Several samples may be of one row."""
    return np.flatnonzero(np.diff(column_of(samples, "row"), prepend=-1))


def _connected(kinds: np.ndarray) -> np.ndarray:
    """One number for each row of `kinds` (rows, samples): rows that share a sample, also by other rows, have the same."""
    label = np.arange(kinds.max(initial=-1) + 1)  # of a kind: the least kind that it is known to be connected with
    while True:
        least = label[kinds].min(axis=1)
        lower = label.copy()
        np.minimum.at(lower, kinds, least[:, None])
        if (lower == label).all():
            return least
        label = lower[lower]


def evaluation_mask(kinds: np.ndarray, fraction: float, seed: int, limit: int | None = None) -> np.ndarray:
    """The rows that only evaluate, (rows,) of bool: `fraction` of them, rounded, and at most `limit`.

    Rows with equal `kinds` (rows,) are in the same part, so there may be fewer than wanted. All else that decides is
    the seed and the numbers. Raises UserError if one of the parts would be empty.
    """
    where, num_rows = f"--eval_fraction {fraction:g}", len(kinds)
    wanted = round(fraction * num_rows)
    if not 0 < wanted < num_rows:
        found = f"{'no row' if not wanted else 'every row'} of {num_rows:,} would evaluate"
        raise UserError(where, found, instead="Take a share that leaves rows in both parts, or --eval_dataset.")
    wanted = min(wanted, limit or wanted)
    _, first, kind, sizes = np.unique(kinds, return_index=True, return_inverse=True, return_counts=True)
    number = np.empty_like(first)  # of a kind, by its first row
    number[np.argsort(first)] = np.arange(len(first))
    sizes_by_number = np.empty_like(sizes)
    sizes_by_number[number] = sizes
    taken = np.zeros(len(sizes), dtype=bool)
    for chosen in np.random.default_rng(seed).permutation(len(sizes)):
        if sizes_by_number[chosen] <= wanted:
            taken[chosen], wanted = True, wanted - sizes_by_number[chosen]
        if not wanted:
            break
    if not taken.any():
        found = f"each row stands there {sizes.min()} times or more, and equal rows stay together"
        raise UserError(where, found, instead="Take a larger share, or --eval_dataset.")
    return taken[number[kind]]
