"""`--streaming`: token samples from rows that are read while the run trains, and the loader of their global batches.

Every rank reads and tokenizes the same rows in the same order. So ranks need no communication, and all layouts see the
same global batches. Rows are shuffled one block at a time. The position is the start of the block and the number of
rows taken from it. So a resumed run reads one block again and has the same buffer.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from trainer.datasets.batches.global_batches import GlobalBatch, GlobalBatchLoader, epoch_order
from trainer.datasets.files.image_files import COLUMN
from trainer.datasets.files.stream_rows import LINE, BrokenRow, parsed
from trainer.datasets.library import one_line
from trainer.datasets.samples.bounds import Bounds, check_sample
from trainer.datasets.samples.ledger import Ledger, note_of_controls
from trainer.datasets.samples.prepared import PREPARED
from trainer.datasets.samples.sft_samples import SENTENCE, options_of, tokenize_row
from trainer.datasets.samples.stops import check_stops
from trainer.datasets.shapes.notes import NOTE, summary_of_notes
from trainer.errors import UserError

CONTROL = "{num_control_tokens:row holds|rows hold} control tokens, read as plain text"
PEEKED = 100  # rows that are tokenized before the run, for the first sample and the average length


def empty_counts() -> dict[str, int]:
    """Counts of the rows that were read so far, in all epochs, with the names of `sft_samples.with_loss`."""
    names = "rows truncated excluded samples tokens loss_tokens stop_trained control_tokens"
    return {f"num_{name}": 0 for name in names.split()}


def count(counts: dict[str, int], row: dict[str, Any]) -> None:
    """Add a tokenized row to the counts."""
    counts["num_rows"] += 1
    counts["num_truncated"] += row["truncated"]
    counts["num_control_tokens"] += row["control_tokens"]
    if not row["num_loss_tokens"]:
        counts["num_excluded"] += 1
        return
    counts["num_samples"] += 1
    for name in ("num_tokens", "num_loss_tokens"):
        counts[name] += row[name]
    counts["num_stop_trained"] += row["stop_trained"]


class _KnownColumns(dict):
    """A row: a column that other rows have is None here."""

    def __missing__(self, _name: str) -> None:
        return None


class SampleStream:
    """The token rows of an IterableDataset, shuffled in blocks of `buffer` rows. `options` go to `options_of`.

    `places(numbers)` are the files and rows of the rows of these numbers.
    """

    def __init__(
        self,
        rows,
        tokenizer,
        *,
        flag: str,
        digest: str,
        buffer: int,
        seed: int,
        shuffle: bool,
        allow_no_stop: bool = False,
        places: Callable[[list[int]], list[str]],
        **options,
    ):
        self.rows, self.flag, self.digest, self.places = rows, flag, digest, places
        self.tokenizer = copy.deepcopy(tokenizer)  # a thread uses it while a checkpoint saves the other one
        self.buffer, self.seed, self.shuffle = buffer, seed, shuffle
        self.bounds: Bounds | None = None  # of the model that takes the samples
        self.column_names = list(self._first_row())
        for column, cure in ((COLUMN, "rows of text"), (PREPARED, "the folder of prepare_data")):
            if column in self.column_names:
                raise UserError("--streaming", f"with a column {column}", f"{cure}, or a run without --streaming")
        self.features = None if LINE in (rows.features or {}) else rows.features
        self.options = options_of(self, tokenizer, flag, **options)
        self.ledger, self._first, notes = Ledger(empty_counts(), f"streamed, so far {SENTENCE}; {CONTROL}"), None, []
        all_cut, controls = True, []
        for row in islice(self.read(start_of_epoch(0)), PEEKED):
            count(self.ledger.counts, row)
            notes.append(row[NOTE])
            controls += [row["row"]] * row["control_tokens"]
            all_cut = all_cut and bool(row["truncated"] or not row["num_loss_tokens"])
            self._first = self._first or (row if row["num_loss_tokens"] else None)
        first = [f"{flag} {place}" for place in places(sorted(controls)[:3])]
        lines, self.ledger.left_out = summary_of_notes(notes)
        lines += note_of_controls(len(controls), first)
        lines += check_stops(self.ledger.counts, all_cut, flag, allow_no_stop)
        self.ledger.lines = [f"first rows: {line}" for line in lines]
        if not self._first:
            raise UserError(flag, f"the first rows give no sample ({self.ledger.summary()})", "rows with answers")

    def __getitem__(self, number: int) -> dict[str, Any]:
        """The first sample in the order of the run; the others are only known when they are read."""
        assert number == 0
        return self._first

    def read(self, at: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the token rows from the position `at` to the end of the epoch. Keeps `at` up to date.

        Raises UserError for rows that cannot be read or used, with their block.
        """
        self.rows.load_state_dict(at["source"])
        for block in self._blocks(at):
            order = epoch_order(len(block), self.seed, f"{at['epoch']}/{at['first_row']}", self.shuffle)
            for index in order[at["taken"] :].tolist():
                at["taken"] += 1
                yield self._tokens(block[index], at["first_row"] + index)
            at |= {"source": self.rows.state_dict(), "first_row": at["first_row"] + len(block), "taken": 0}

    def _first_row(self) -> dict[str, Any]:
        self.rows.load_state_dict(None)
        for block in self._blocks(start_of_epoch(0), size=1):
            if block:
                return block[0]
        raise UserError(self.flag, "no rows")

    def _blocks(self, at: dict[str, Any], size: int | None = None) -> Iterator[list[dict]]:
        blocks = self.rows.iter(batch_size=size or self.buffer)
        while True:
            try:
                block = next(blocks, None)
                rows = None if block is None else parsed(block)
            except BrokenRow as error:
                number, found = error.args
                raise UserError(self._place(at["first_row"] + number), f"cannot be read: {found}") from None
            except Exception as error:  # of any type: broken JSON, bytes that are no text, a store that is gone
                where = f"{self.flag} rows from {at['first_row'] + 1}"
                raise UserError(where, f"cannot be read: {one_line(error)}") from None
            if rows is None:
                return
            yield rows

    def _tokens(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        row = _KnownColumns(row)
        try:
            sample = tokenize_row(row, index, tokenizer=self.tokenizer, options=self.options, flag=self.flag)
            if self.bounds:
                check_sample(sample, self.flag, self.bounds)
        except UserError as error:
            where = error.where.replace(f"{self.flag} row {index + 1}", self._place(index), 1)
            raise UserError(where, error.found, error.allowed, error.instead) from None
        return sample

    def _place(self, number: int) -> str:
        """The flag, file and row of a row of the stream. The files are read again up to it."""
        return f"{self.flag} {' '.join(self.places([number])) or f'row {number + 1}'}"


def start_of_epoch(epoch: int) -> dict[str, Any]:
    """The position before the first row. `source` is the position of the IterableDataset at the start of the block."""
    return {"epoch": epoch, "next_index": 0, "source": None, "first_row": 0, "taken": 0}


class _Samples(list):
    """The samples of one global batch, as the loader reads a dataset: by number or by column."""

    column_names = ()

    def __getitem__(self, key):
        return [sample[key] for sample in self] if isinstance(key, str) else super().__getitem__(key)


class StreamedBatches:
    """Yields the GlobalBatches of this rank, like GlobalBatchLoader. A thread makes the next one meanwhile.

    `build(samples)` makes this rank's GlobalBatchLoader over the samples of one global batch. So a batch is cut in the
    same way as with a cached set.
    """

    def __init__(self, stream: SampleStream, build: Callable[[Any], GlobalBatchLoader], batch_size: int):
        self.stream, self.build, self.batch_size = stream, build, batch_size
        self._position = {**start_of_epoch(0), "ledger": empty_counts()}

    def fingerprint(self) -> dict:
        stream = self.stream
        facts = {"train_batch_size": self.batch_size, "seed": stream.seed, "shuffle": stream.shuffle}
        return {**facts, "data": stream.digest, "streaming_buffer": stream.buffer}

    def state_dict(self) -> dict:
        """The position after the last batch, as JSON values."""
        return self._position

    def load_state_dict(self, state: dict) -> None:
        self._position = state

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Yield the rest of the current epoch. Afterwards, the loader is at the start of the next epoch."""
        at = copy.deepcopy(self._position)
        rows = self.stream.read(at)
        with ThreadPoolExecutor(1) as worker:
            coming = worker.submit(self._next_batch, rows, at)
            while found := coming.result():
                batch, place, position = found
                coming = worker.submit(self._next_batch, rows, at)
                self._position = position
                self.stream.ledger.counts.update(position["ledger"])
                batch.micro_batches = [place(micro_batch) for micro_batch in batch.micro_batches]
                yield batch
        if not at["ledger"]["num_samples"]:
            raise UserError(self.stream.flag, "no sample is left", "rows with answers that fit into --max_len")
        self._position = {**start_of_epoch(at["epoch"] + 1), "ledger": at["ledger"]}

    def _next_batch(self, rows: Iterator[dict], at: dict) -> tuple[GlobalBatch, Callable, dict] | None:
        """Return (batch, how to move its micro-batches, the position after it); None at the end of the epoch."""
        samples, counts = _Samples(), dict(at["ledger"])
        while len(samples) < self.batch_size and (row := next(rows, None)):
            count(counts, row)
            if row["num_loss_tokens"]:
                samples.append(row)
        at["ledger"] = counts
        if not samples:
            return None
        loader = self.build(samples)
        batch = loader.global_batch(list(range(len(samples))), at["next_index"])
        batch = dataclasses.replace(batch, epoch=at["epoch"], sample_ids=samples["row"])
        at["next_index"] += 1
        return batch, loader.place, copy.deepcopy(at)
