"""Tokenize a dataset part by part into a folder: the work of `prepare_data`."""

import os
from typing import Any

from datasets import Dataset, concatenate_datasets

from trainer.datasets.samples.bounds import Bounds, check_bounds
from trainer.datasets.samples.ledger import Ledger
from trainer.datasets.samples.prepared import is_prepared, write_prepared
from trainer.datasets.samples.sets import Sets, tokens_of
from trainer.datasets.samples.sft_samples import tokenize_rows, with_loss
from trainer.errors import UserError
from trainer.metrics import counted

FLAG = "--dataset"


def prepare_rows(
    rows: Dataset | Sets,
    tokenizer: Any,
    target: str,
    options: dict[str, Any],
    *,
    bounds: Bounds,
    rows_per_part: int,
    num_proc: int,
    allow_no_stop: bool = False,
) -> Ledger:
    """Tokenize `rows` for `tokenize_sft`, write them to the new folder `target`, and return the ledger.

    `options` are the values of `prepared.OPTIONS`. Each part stays in the cache until the folder is complete. So a new
    start goes on after the last finished part. Raises UserError for bad rows, for rows beyond the `bounds` of the model, for
    a template that ends no answer, unless `allow_no_stop`, and for a folder that cannot be written.
    """
    if is_prepared(rows):
        raise UserError(FLAG, "rows that are tokenized already", "texts")
    parts = []

    def in_parts(rows: Dataset, tokenizer: Any, *, flag: str, **options: Any) -> Dataset:
        own = []
        for first in range(0, len(rows), rows_per_part):
            end = min(first + rows_per_part, len(rows))
            part = rows.select(range(first, end))
            own.append(tokenize_rows(part, tokenizer, flag=flag, first_row=first, num_proc=num_proc, **options))
            print(f"{end} of {counted(len(rows), 'row')}" + f" of {flag}" * (flag != FLAG), flush=True)
        parts.extend(own)
        return concatenate_datasets(own)

    samples = tokens_of(rows, in_parts, tokenizer, flag=FLAG, **options)
    kept, ledger = with_loss(samples, FLAG, options["max_len"], allow_no_stop)
    ledger.lines += check_bounds(kept, tokenizer, FLAG, bounds)
    own = {"sets": dict(zip(rows.names, rows.options))} if isinstance(rows, Sets) else {}
    named = options | {"train_on": options["train_on"] or "last"}  # a run that names the default takes the folder, too
    write_prepared(samples, tokenizer, named | own, ledger.counts, target, num_proc)
    for name in {file["filename"] for part in parts for file in part.cache_files}:
        os.remove(name)
    return ledger
