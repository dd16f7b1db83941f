"""Several sets in one run, each tokenized by itself: other columns, other types, and flags of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets

from trainer.datasets.files.mixing import joined, mix, without_types
from trainer.datasets.samples.parts import first_of_rows
from trainer.datasets.shapes.notes import NOTE


@dataclass
class Sets:
    """Sets that become one only as tokens.

    `options` are those of each set, in place of the run's. For `odds` (None: the sets follow each other) and `seed`, see
    `joined`. `flag` names them in errors.
    """

    names: list[str]
    rows: list[Dataset]
    options: list[dict[str, Any]]
    odds: list[float] | None
    seed: int
    flag: str

    @property
    def column_names(self) -> list[str]:
        """The columns of all sets."""
        return list(dict.fromkeys(name for rows in self.rows for name in rows.column_names))

    def select_columns(self, names: list[str]) -> Dataset:
        """These columns of all rows, in the order of `join`. A set without one has None."""
        parts = [rows.select_columns([n for n in names if n in rows.column_names]) for rows in self.rows]
        empty = [Dataset.from_dict({names[0]: [None] * len(rows)}) for rows in self.rows]
        parts = [part if part.column_names else none for part, none in zip(parts, empty)]
        return mix(without_types(parts), self.names, self.flag, self.odds, self.seed)

    def join(self, tokens: list[Dataset]) -> Dataset:
        """The tokenized rows of each set as one dataset, in the order that `joined` gives the rows themselves.

        A row may have given several tokenized rows, which stay together. `row` is the number of the row in this order.
        """
        starts = np.cumsum([0, *map(len, tokens)])
        firsts = [first_of_rows(found) for found in tokens]
        places = [
            Dataset.from_dict({"first": start + first, "size": np.diff(first, append=len(found))})
            for start, found, first in zip(starts, tokens, firsts)
        ]
        order = joined(places, self.odds, self.seed).with_format("numpy")
        first, size = order["first"][:], order["size"][:]
        chosen = np.repeat(first, size) + np.arange(size.sum()) - np.repeat(size.cumsum() - size, size)
        rows = np.zeros(starts[-1], dtype=np.int64)
        rows[chosen] = np.repeat(np.arange(len(size)), size)
        # before the selection: after it, a new column would copy all tokens
        samples = concatenate_datasets(tokens).remove_columns("row").add_column("row", rows)
        return samples if self.odds is None else samples.select(chosen)


def tokens_of(rows: Dataset | Sets, tokenize: Callable[..., Dataset], tokenizer: Any, **options: Any) -> Dataset:
    """`tokenize(rows, tokenizer, **options)`, for each set by itself. The rows of several sets are numbered together."""
    if not isinstance(rows, Sets):
        return tokenize(rows, tokenizer, **options)
    found = [tokenize(own, tokenizer, **options | changed) for own, changed in zip(rows.rows, rows.options)]
    return rows.join([_with_name(own, name) for own, name in zip(found, rows.names)])


def _with_name(samples: Dataset, name: str) -> Dataset:
    """The samples with the name of their set before what was recognised in them."""
    notes = samples.select_columns([NOTE]).with_format("arrow")[:][NOTE]
    named = pc.if_else(pc.equal(notes, ""), notes, pc.binary_join_element_wise(f"{name}: ", notes, ""))
    return samples.remove_columns(NOTE).add_column(NOTE, named, feature=samples.features[NOTE])
