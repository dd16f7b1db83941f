"""Decide which samples form each global batch, and how a rank cuts its part into micro-batches.

Everything here is a pure function of the data, the seed and the sizes. Every rank computes the whole plan without
communication, and all layouts agree about every batch.
"""

import hashlib
from binascii import unhexlify
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Optional

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from trainer.datasets.batches.bin_packing import planned
from trainer.datasets.batches.packing import IGNORE
from trainer.datasets.batches.sequence_split import split_micro_batch


@dataclass
class GlobalBatch:
    """The data of one optimizer step: facts of the whole global batch, and the micro-batches of this rank."""

    epoch: int
    index: int  # within the epoch
    sample_ids: list[int]  # of the whole global batch, in order
    num_tokens: int  # all tokens of the global batch, without padding
    num_targets: int  # the number of terms in the loss's mean: loss tokens, or pairs
    batch_hash: str
    micro_batches: list[dict]


def epoch_order(num_samples: int, seed: int, epoch: int | str, shuffle: bool) -> np.ndarray:
    """The order of the samples in an epoch, (num_samples,). It depends only on the seed and the epoch."""
    if not shuffle:
        return np.arange(num_samples, dtype=np.int32)
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randperm(num_samples, generator=generator, dtype=torch.int32).numpy()


def column_of(dataset, name: str) -> np.ndarray:
    """A column as an array (rows,): numbers as int32, hex digests as bytes. `dataset` may be any list of samples.

    Of a Dataset, Arrow converts whole chunks, one after the other. One object per row would take 30 us and 100 bytes.
    """
    kind = pa.string() if name == "digest" else pa.int64()
    chunks = dataset.data.column(name).chunks if hasattr(dataset, "data") else [pa.array(dataset[name], kind)]
    if name == "digest":  # all of one length
        joined = bytearray()
        for chunk in chunks:
            joined += unhexlify(pc.binary_join(pa.ListArray.from_arrays([0, len(chunk)], chunk), "")[0].as_buffer())
        values = np.frombuffer(joined, dtype=f"V{len(joined) // (sum(map(len, chunks)) or 1) or 1}")
    else:
        arrays = [chunk.to_numpy(zero_copy_only=False) for chunk in chunks]  # of numbers: views of the file
        values = np.concatenate(arrays, dtype=np.int32, casting="unsafe")
    rows = getattr(dataset, "_indices", None)  # the rows that are left after `select`
    return values if rows is None else values[rows.column(0).to_numpy()]


def hash_digests(digests: np.ndarray) -> str:
    """The hash of digests as one hex text. At most 2**20 of them are text at a time."""
    found = hashlib.blake2b(digest_size=8)
    for start in range(0, len(digests), 1 << 20):
        found.update(digests[start : start + (1 << 20)].tobytes().hex().encode())
    return found.hexdigest()


def contiguous_slice(items: list[int], part: int, num_parts: int) -> list[int]:
    """Return part `part` of `num_parts` contiguous parts of nearly equal size: 5 items in 2 parts are 3 and 2."""
    size, rest = divmod(len(items), num_parts)
    start = part * size + min(part, rest)
    return items[start : start + size + (part < rest)]


def balanced_rows(falling: list[int], rank: int, num_ranks: int, num_rows: int) -> list[list[int]]:
    """A rank's micro-batches of `num_rows` samples each, from samples in `falling` order of length.

    The n-th micro-batches of all ranks come from the same stretch of samples. So they have similar lengths, no rank
    waits for another, and there is little padding. Every second stretch is dealt out backwards. With two ranks and one
    row each, lengths 9, 8, 3, 2 give [[9], [2]] on rank 0 and [[8], [3]] on rank 1.
    """
    stretch = num_rows * num_ranks
    return [
        contiguous_slice(falling[start : start + stretch], num_ranks - 1 - rank if number % 2 else rank, num_ranks)
        for number, start in enumerate(range(0, len(falling), stretch))
    ]


class GlobalBatchLoader:
    """Yields the `GlobalBatch`es of this rank, epoch after epoch. Its position can be saved and restored.

    `dataset` has the columns num_tokens, num_loss_tokens and digest, and the columns that `collate` reads.
    `collate(samples)` makes a micro-batch in one of `num_workers` threads, while earlier batches are used. An empty
    list gives a micro-batch without targets, which adds nothing to the loss. `place` then moves the micro-batch to its
    device. `batch_size` is samples of a global batch, `micro_batch_size` of a micro-batch. `max_tokens` (rows x longest) or
    `packed_capacity`, in tokens of a micro-batch, takes its place. With `with_previous`, each sample has the sample before it
    in the global batch as `previous`; the first sample has the last one.
    """

    def __init__(
        self,
        dataset,
        collate: Callable[[list[dict]], dict],
        *,
        batch_size: int,
        micro_batch_size: Optional[int] = None,
        max_tokens: Optional[int] = None,
        packed_capacity: Optional[int] = None,
        seed: int = 0,
        shuffle: bool = False,
        dp_rank: int = 0,
        dp_size: int = 1,
        with_previous: bool = False,
        num_workers: int = 1,
        place: Callable[[dict], dict] = lambda micro_batch: micro_batch,
    ):
        self.dataset, self.collate, self.place = dataset, collate, place
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.dp_rank, self.dp_size, self.with_previous = dp_rank, dp_size, with_previous
        self.micro_batch_size = micro_batch_size
        self._cut_sizes = {"max_tokens": max_tokens, "packed_capacity": packed_capacity}
        self._num_tokens, self._num_targets = column_of(dataset, "num_tokens"), column_of(dataset, "num_loss_tokens")
        self._digests, self._data_hash = column_of(dataset, "digest"), ""
        self.sizes_to_plan: Optional[np.ndarray] = None  # (samples,), used instead of the numbers of tokens
        self.epoch, self.next_index, self.num_workers = 0, 0, num_workers

    def __len__(self) -> int:
        """The number of global batches in one epoch. The last one may be short."""
        return -(-len(self.dataset) // self.batch_size)

    def fingerprint(self) -> dict:
        """The facts that must not change: only with them does a saved position mean the same samples."""
        self._data_hash = self._data_hash or hash_digests(self._digests)
        facts = {"train_batch_size": self.batch_size, "seed": self.seed, "shuffle": self.shuffle}
        return {**facts, "data": self._data_hash}

    def state_dict(self) -> dict:
        """The position after the last batch, as JSON values."""
        return {"epoch": self.epoch, "next_index": self.next_index}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.next_index = state["epoch"], state["next_index"]

    def __iter__(self):
        """Yield the rest of the current epoch. Afterwards, the loader is at the start of the next epoch."""
        order = epoch_order(len(self.dataset), self.seed, self.epoch, self.shuffle)
        ahead = {}  # batches by index: the next ones are made while this one is used
        with ThreadPoolExecutor(self.num_workers) as workers:
            while self.next_index < len(self):
                index = self.next_index
                for i in range(index, min(index + 1 + self.num_workers, len(self))):
                    ids = order[i * self.batch_size : (i + 1) * self.batch_size].tolist()
                    ahead[i] = ahead.get(i) or workers.submit(self.global_batch, ids, i)
                self.next_index += 1
                batch = ahead.pop(index).result()
                batch.micro_batches = [self.place(micro_batch) for micro_batch in batch.micro_batches]
                yield batch
        self.epoch, self.next_index = self.epoch + 1, 0

    def plan(self, sample_ids: list[int], ranks: Sequence[int]) -> list[list[list[int]]]:
        """For each of `ranks`, the sample ids of its micro-batches. Empty ones are added, so all ranks have equally many."""
        sizes = (self._num_tokens if self.sizes_to_plan is None else self.sizes_to_plan)[sample_ids]
        if not (self._cut_sizes["max_tokens"] or self._cut_sizes["packed_capacity"]):
            falling = np.argsort(-sizes, kind="stable").tolist()
            plan = [balanced_rows(falling, rank, self.dp_size, self.micro_batch_size) for rank in ranks]
        else:
            plan = planned(sizes, ranks, self.dp_size, **self._cut_sizes)
        return [[[sample_ids[place] for place in places] for places in of_rank] for of_rank in plan]

    def _samples(self, ids: list[int], previous: dict[int, int]) -> list[dict]:
        if not self.with_previous:
            return [self.dataset[i] for i in ids]
        return [{**self.dataset[i], "previous": self.dataset[previous[i]]} for i in ids]

    def global_batch(self, sample_ids: list[int], index: int) -> GlobalBatch:
        [mine] = self.plan(sample_ids, [self.dp_rank])
        previous = dict(zip(sample_ids, sample_ids[-1:] + sample_ids[:-1]))
        return GlobalBatch(
            epoch=self.epoch,
            index=index,
            sample_ids=sample_ids,
            num_tokens=int(self._num_tokens[sample_ids].sum(dtype=np.int64)),
            num_targets=int(self._num_targets[sample_ids].sum(dtype=np.int64)),
            batch_hash=hash_digests(self._digests[sample_ids]),
            micro_batches=[self.collate(self._samples(ids, previous)) for ids in mine],
        )


def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to `device` without waiting for it. A copy from unpinned memory would wait for a GPU."""
    pinned = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)


def to_device(batch: dict, device: torch.device) -> dict:
    """Move a micro-batch, and any micro-batch within it, to `device`. cu_seqlens_host is not moved.

    `kept` (targets,), the indices of targets in the flattened rows, is computed here: on a GPU, that would be a wait.
    """
    if "labels" in batch:
        batch = {**batch, "kept": (batch["labels"] != IGNORE).flatten().nonzero().squeeze(1)}

    def moved(name: str, value):
        if isinstance(value, dict):
            return to_device(value, device)
        is_moved = isinstance(value, torch.Tensor) and name != "cu_seqlens_host"
        return copied(value, device) if is_moved else value

    return {name: moved(name, value) for name, value in batch.items()}


def setup_dataloader(
    strategy, dataset, collate: Callable[[list[dict]], dict], *, shuffle: bool = True, **options
) -> GlobalBatchLoader:
    """Make the loader of this rank. Each sequence is split over sp. Both strategies have this function as a method.

    `options` go to GlobalBatchLoader: batch sizes, `with_previous` and `num_workers`.
    """

    def prepared(samples: list[dict]) -> dict:
        batch = collate(samples)
        if strategy.sizes.sp > 1:
            batch = split_micro_batch(batch, strategy.meshes.root.get_local_rank("sp"), strategy.sizes.sp)
        return batch

    return GlobalBatchLoader(
        dataset,
        prepared,
        seed=strategy.seed,
        shuffle=shuffle,
        dp_rank=strategy.meshes.dp.get_local_rank(),
        dp_size=strategy.sizes.dp,
        place=lambda batch: to_device(batch, strategy.device),
        **options,
    )
