"""Which rank has the tokens of a sample, and how they get to the rank that trains them.

Every rank has a list of all samples of a rollout. A sample has its tokens only on the rank that generated it, and later
on the ranks that train it. On all other ranks it has only its score, its sizes and its digest. So what a rank holds and
sends does not grow with the number of ranks, except for these few numbers per sample.
"""

import itertools
import pickle
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.distributed as dist

from trainer.distributed.collectives import gather_objects, make_patient_group
from trainer.models.losses.sequence_sums import counts_here
from trainer.rollout.samples import Sample

# fields of a Sample with values per token
IDS, LOCAL = ("prompt_ids", "response_ids"), ("log_probs", "kept_ids", "turns", "starts", "turn_rewards")
MESSAGE_SAMPLES = 64  # samples that rank 0 gets at a time, to write them


def without_tokens(sample: Sample) -> Sample:
    """The sample as ranks know it that do not have its tokens."""
    empty = {name: [] for name in (*IDS, *LOCAL)}
    held = replace(sample.held, here=False, sizes=sample.size())
    return replace(sample, **empty, experts=None, label=None, columns={}, held=held)


def hold(samples: Iterable[Sample], rank: int) -> None:
    """Note that `rank` has the tokens of these samples."""
    for sample in samples:
        sample.held = replace(sample.held, by=rank)


def share(mine: list[Sample]) -> list[Sample]:
    """All samples, by number, from the ranks that have their tokens (all-gather over the world, without tokens).

    Samples of one prompt have adjacent numbers, so groups come together whichever rank generated their samples.
    """
    hold(mine, dist.get_rank())
    own = {sample.number: sample for sample in mine}
    of_ranks = gather_objects([without_tokens(sample) for sample in mine])
    found = [own.get(sample.number, sample) for part in of_ranks for sample in part]
    return sorted(found, key=lambda sample: sample.number)


def exchange_objects(for_ranks: list) -> list:
    """Send `for_ranks[r]` to rank r. Returns what each rank sent here (all-to-all over the world). None costs nothing."""
    if len(for_ranks) == 1:
        return for_ranks
    group = make_patient_group(dist.group.WORLD)
    parts = [b"" if value is None else pickle.dumps(value) for value in for_ranks]
    sizes = torch.tensor([len(part) for part in parts])
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    received = torch.empty(int(coming.sum()), dtype=torch.uint8)
    sent = torch.frombuffer(bytearray(b"".join(parts)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
    dist.all_to_all_single(received, sent, coming.tolist(), sizes.tolist(), group=group)
    return [pickle.loads(part.numpy().tobytes()) if len(part) else None for part in received.split(coming.tolist())]


def _packed(sample: Sample) -> Sample:
    """The sample for sending: 4 bytes for an id, and 4 for a log-prob that is an fp32 number."""
    log_probs = array("f", sample.log_probs)
    if log_probs.tolist() != sample.log_probs:
        log_probs = array("d", sample.log_probs)
    ids = {name: array("i", getattr(sample, name)) for name in IDS}
    kept_ids = [array("i", ids) for ids in sample.kept_ids]
    return replace(sample, **ids, log_probs=log_probs, kept_ids=kept_ids, columns={})


def _unpacked(sample: Sample) -> Sample:
    lists = {name: getattr(sample, name).tolist() for name in (*IDS, "log_probs")}
    return replace(sample, **lists, kept_ids=[ids.tolist() for ids in sample.kept_ids])


def move(samples: list[Sample], places: list[list[int]]) -> list[Sample]:
    """The same samples, with tokens where they are needed: rank r gets the ones at `places[r]` (all-to-all over the world).

    A sample that every rank has is not sent.
    """
    rank = dist.get_rank()
    wanted = set(places[rank])
    for_ranks = [
        [(n, _packed(samples[n])) for n in of_rank if samples[n].held.by == rank] or None if other != rank else None
        for other, of_rank in enumerate(places)
    ]
    came = {n: _unpacked(sample) for part in exchange_objects(for_ranks) for n, sample in part or ()}
    return [(came.get(n) or sample) if n in wanted else without_tokens(sample) for n, sample in enumerate(samples)]


def trained_by(meshes, loader) -> list[list[int]]:
    """The places of the samples that each rank trains in one epoch of `loader`, in order."""
    size, num = loader.batch_size, len(loader.dataset)
    places: list[list[int]] = [[] for _ in range(loader.dp_size)]
    for start in range(0, num, size):
        plan = loader.plan(list(range(start, min(start + size, num))), range(loader.dp_size))
        for own, micro_batches in zip(places, plan):
            own += itertools.chain.from_iterable(micro_batches)
    dp_ranks = meshes.root.mesh.flatten(0, 1).flatten(1)  # (dp, sp x tp): the global ranks of each slice of a batch
    of_rank = {rank: sorted(own) for own, ranks in zip(places, dp_ranks.tolist()) for rank in ranks}
    return [of_rank[rank] for rank in range(len(of_rank))]


def write_by_rank_0(samples: list[Sample], write: Callable[[list[Sample]], None]) -> None:
    """Call `write` on rank 0 with all samples in order, some at a time. Their holders send them (point to point)."""
    rank, group = dist.get_rank(), None
    for holder, run in itertools.groupby(samples, key=lambda sample: sample.held.by):
        run = list(run)
        for start in range(0, len(run), MESSAGE_SAMPLES):
            part = run[start : start + MESSAGE_SAMPLES]
            if holder not in (None, 0):
                group = group or make_patient_group(dist.group.WORLD)
                if rank == holder:
                    data = torch.frombuffer(bytearray(pickle.dumps([_packed(s) for s in part])), dtype=torch.uint8)
                    dist.send(torch.tensor([len(data)]), 0, group=group)
                    dist.send(data, 0, group=group)
                elif rank == 0:
                    size = torch.zeros(1, dtype=torch.int64)
                    dist.recv(size, holder, group=group)
                    data = torch.empty(int(size), dtype=torch.uint8)
                    dist.recv(data, holder, group=group)
                    part = [_unpacked(sample) for sample in pickle.loads(data.numpy().tobytes())]
            if rank == 0:
                write(part)


class Part:
    """The samples of a rollout that this rank trains. Flat vectors have their generated tokens, sample after sample.

    `places` are the positions of the samples in the rollout, and `lengths` their numbers of generated tokens. `all_lengths`
    are those of the whole rollout, and `width` is the longest. Rows of tokens have this width on every rank, so sums
    over a row are the same on every layout.
    """

    def __init__(self, strategy, samples: list[Sample], sp_group):
        self._strategy, self.sp_group, self.num_samples = strategy, sp_group, len(samples)
        self.places = [place for place, sample in enumerate(samples) if sample.held.here]
        self.samples = [samples[place] for place in self.places]
        self.lengths = [sample.size().generated for sample in self.samples]
        self.all_lengths = [sample.size().generated for sample in samples]
        self.counted = torch.tensor([not sample.failed for sample in samples])  # (samples,)
        self.width, self.num_tokens = max(self.all_lengths), int(torch.tensor(self.all_lengths)[self.counted].sum())

    def share(self, values: torch.Tensor) -> torch.Tensor:
        """(own samples, ...) fp64 to (all samples, ...), on every rank (all-reduce over dp x sp). It is exact, because
        each sample comes from one rank."""
        shared = torch.zeros(self.num_samples, *values.shape[1:], dtype=torch.float64)
        if counts_here(self.sp_group):  # other sp ranks have the same sums
            shared[self.places] = values.double().cpu()
        return self._strategy.all_reduce(shared.to(self._strategy.device)).cpu()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of these fp64 values over dp x sp, on the CPU (all-reduce)."""
        return self._strategy.all_reduce(values.double().to(self._strategy.device)).cpu()
