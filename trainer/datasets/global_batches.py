"""Which samples form which global batch, and how a rank cuts its part into micro-batches.

Everything here is a pure function of the data, the seed and the sizes: every rank computes the whole plan by itself and
no two layouts can disagree about a batch.
"""

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch

from trainer.datasets.packing import best_fit_bins


@dataclass
class GlobalBatch:
    """One optimizer step: facts of the whole global batch, and the micro-batches of this rank."""

    epoch: int
    index: int  # within the epoch
    sample_ids: list[int]  # of the whole global batch, in order
    num_tokens: int  # all tokens of the global batch, without padding
    num_targets: int  # what the loss is a mean over: loss tokens, or pairs
    batch_hash: str
    micro_batches: list[dict]


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The permutation of an epoch, from the seed and the epoch alone."""
    if not shuffle:
        return list(range(num_samples))
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randperm(num_samples, generator=generator).tolist()


def contiguous_slice(items: list[int], part: int, num_parts: int) -> list[int]:
    """Part `part` of `num_parts` near-equal contiguous parts: 5 items in 2 parts are 3 and 2."""
    size, rest = divmod(len(items), num_parts)
    start = part * size + min(part, rest)
    return items[start : start + size + (part < rest)]


def balanced_parts(items: list[int], lengths, num_parts: int) -> list[list[int]]:
    """`items` in parts of nearly equal tokens, each in order: the longest first, each to the part with the fewest so far
    (Graham 1969, Bounds on multiprocessing timing anomalies: within 4/3 of the best).

    Lengths 9, 5, 4, 4 in 2 parts: [9] and [5, 4] have 9 and 9 before the last 4 goes to the first.
    """
    loads = [(0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for position in sorted(range(len(items)), key=lambda i: (-int(lengths[items[i]]), i)):
        load, part = heapq.heappop(loads)
        parts[part].append(position)
        heapq.heappush(loads, (load + int(lengths[items[position]]), part))
    return [[items[position] for position in sorted(part)] for part in parts]


def cut_micro_batches(
    items: list[int], lengths, *, micro_batch_size: int, max_tokens: Optional[int], packed_capacity: Optional[int]
) -> list[list[int]]:
    """Cut one rank's samples into micro-batches.

    Packed (`packed_capacity` tokens each): best-fit bins. By tokens: samples of like length together, as long as
    rows * longest row stays within `max_tokens` (a longer sample stands alone). Otherwise `micro_batch_size` samples
    each, in order.
    """
    if packed_capacity:
        bins = best_fit_bins([int(lengths[item]) for item in items], packed_capacity)
        return [[items[position] for position in bin] for bin in bins]
    if not max_tokens:
        return [items[start : start + micro_batch_size] for start in range(0, len(items), micro_batch_size)]
    micro_batches: list[list[int]] = []
    for item in sorted(items, key=lambda item: -int(lengths[item])):
        # sorted by falling length: the first row of a micro-batch is its longest
        if micro_batches and (len(micro_batches[-1]) + 1) * int(lengths[micro_batches[-1][0]]) <= max_tokens:
            micro_batches[-1].append(item)
        else:
            micro_batches.append([item])
    return micro_batches


class GlobalBatchLoader:
    """Yields the `GlobalBatch`es of this rank, epoch after epoch, from a position that can be saved and restored.

    `dataset` has the columns num_tokens, num_loss_tokens and digest beside what `collate` reads. `collate(samples)` makes a
    micro-batch of a list of samples; of an empty list, one that has no target and adds nothing to the loss. With
    `with_previous`, each sample holds, as `previous`, the sample before it in the global batch, and the first the last.
    """

    def __init__(
        self,
        dataset,
        collate: Callable[[list[dict]], dict],
        *,
        batch_size: int,
        micro_batch_size: int,
        max_tokens: Optional[int] = None,
        packed_capacity: Optional[int] = None,
        seed: int = 0,
        shuffle: bool = False,
        dp_rank: int = 0,
        dp_size: int = 1,
        with_previous: bool = False,
    ):
        self.dataset, self.collate = dataset, collate
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.dp_rank, self.dp_size, self.with_previous = dp_rank, dp_size, with_previous
        self._cut_sizes = {
            "micro_batch_size": micro_batch_size, "max_tokens": max_tokens, "packed_capacity": packed_capacity,
        }  # fmt: skip
        self._num_tokens = np.asarray(dataset["num_tokens"])
        self._num_targets = np.asarray(dataset["num_loss_tokens"])
        self._digests = list(dataset["digest"])
        self.epoch, self.next_index = 0, 0

    def __len__(self) -> int:
        """Global batches in one epoch; the last may be short."""
        return -(-len(self.dataset) // self.batch_size)

    def fingerprint(self) -> dict:
        """What must stay the same for a position in the data to mean the same samples."""
        data = hashlib.blake2b("".join(self._digests).encode(), digest_size=8).hexdigest()
        return {"train_batch_size": self.batch_size, "seed": self.seed, "shuffle": self.shuffle, "data": data}

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "next_index": self.next_index}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.next_index = state["epoch"], state["next_index"]

    def __iter__(self):
        """The rest of the current epoch; afterwards the loader stands at the start of the next."""
        order = epoch_order(len(self.dataset), self.seed, self.epoch, self.shuffle)
        while self.next_index < len(self):
            index = self.next_index
            self.next_index += 1
            yield self._global_batch(order[index * self.batch_size : (index + 1) * self.batch_size], index)
        self.epoch, self.next_index = self.epoch + 1, 0

    def plan(self, sample_ids: list[int]) -> list[list[list[int]]]:
        """Sample ids by rank and micro-batch; ranks with fewer micro-batches are filled up with empty ones.

        Where micro-batches are measured in tokens, ranks get about as many tokens each; else contiguous samples.
        """
        if self._cut_sizes["max_tokens"] or self._cut_sizes["packed_capacity"]:
            parts = balanced_parts(sample_ids, self._num_tokens, self.dp_size)
        else:
            parts = [contiguous_slice(sample_ids, rank, self.dp_size) for rank in range(self.dp_size)]
        plan = [cut_micro_batches(part, self._num_tokens, **self._cut_sizes) for part in parts]
        most = max(map(len, plan))
        return [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in plan]

    def _samples(self, ids: list[int], previous: dict[int, int]) -> list[dict]:
        if not self.with_previous:
            return [self.dataset[i] for i in ids]
        return [{**self.dataset[i], "previous": self.dataset[previous[i]]} for i in ids]

    def _global_batch(self, sample_ids: list[int], index: int) -> GlobalBatch:
        mine = self.plan(sample_ids)[self.dp_rank]
        previous = dict(zip(sample_ids, sample_ids[-1:] + sample_ids[:-1]))
        digest = hashlib.blake2b("".join(self._digests[i] for i in sample_ids).encode(), digest_size=8).hexdigest()
        return GlobalBatch(
            epoch=self.epoch,
            index=index,
            sample_ids=sample_ids,
            num_tokens=int(self._num_tokens[sample_ids].sum()),
            num_targets=int(self._num_targets[sample_ids].sum()),
            batch_hash=digest,
            micro_batches=[self.collate(self._samples(ids, previous)) for ids in mine],
        )


def to_device(batch: dict, device: torch.device) -> dict:
    """The tensors of a micro-batch, and of a micro-batch within it, on `device`; cu_seqlens_host stays where it is."""

    def moved(name: str, value):
        if isinstance(value, dict):
            return to_device(value, device)
        if not isinstance(value, torch.Tensor) or name == "cu_seqlens_host":
            return value
        pinned = device.type == "cuda" and value.device.type == "cpu"  # without it, the copy would be waited for
        return (value.pin_memory() if pinned else value).to(device, non_blocking=True)

    return {name: moved(name, value) for name, value in batch.items()}


def setup_dataloader(
    strategy,
    dataset,
    collate: Callable[[list[dict]], dict],
    *,
    batch_size: int,
    micro_batch_size: int,
    max_tokens: Optional[int] = None,
    packed_capacity: Optional[int] = None,
    shuffle: bool = True,
    with_previous: bool = False,
) -> GlobalBatchLoader:
    """The loader of this rank, each sequence split over sp. A method of both strategies."""

    def prepared(samples: list[dict]) -> dict:
        batch = collate(samples)
        if strategy.sizes.sp > 1:
            from trainer.datasets.sequence_split import split_micro_batch

            batch = split_micro_batch(batch, strategy.meshes.root.get_local_rank("sp"), strategy.sizes.sp)
        return to_device(batch, strategy.device)

    return GlobalBatchLoader(
        dataset,
        prepared,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        max_tokens=max_tokens,
        packed_capacity=packed_capacity,
        seed=strategy.seed,
        shuffle=shuffle,
        dp_rank=strategy.meshes.dp.get_local_rank(),
        dp_size=strategy.sizes.dp,
        with_previous=with_previous,
    )
