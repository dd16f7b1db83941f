"""Rollouts ahead of training: on each rank, a thread generates while the optimizer steps (--max_staleness K).

The version of weights is the number of rollouts that they were trained on. In lock step, version r generates rollout r.
Here version r - K or a later one generates it. The thread is one rollout ahead, and more only while training has to wait.
So samples are no older than the engine's speed makes necessary.

The main thread hands out prompts and weights, and it does all communication. The thread only generates, and it scores with
functions of texts, or calls environments.

What it has generated is also on disk until it is trained. A resumed run trains on it (`resumed_rollouts.py`).

With `Pace.partial`, new weights interrupt the thread's responses. They go on from their tokens under the new weights. Then
a sample says which version generated which tokens. Each token has the log-prob of its own version.
"""

import contextlib
import copy
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Optional

import torch
import torch.distributed as dist

from trainer.datasets.batches.global_batches import contiguous_slice
from trainer.distributed.collectives import gather_objects
from trainer.distributed.node_copy import node_copy
from trainer.errors import Interrupted, UserError
from trainer.rollout.engines.sampling import Completion, Sampling, sample_seed
from trainer.rollout.generation import continue_prompts, numbered
from trainer.rollout.placement import share
from trainer.rollout.resumed_rollouts import AheadFiles, ResumedRollouts
from trainer.rollout.samples import Sample
from trainer.rollout.timeline import span, timed


@dataclass(frozen=True)
class Pace:
    """How far the thread may be ahead, and how much it generates at a time."""

    max_staleness: int
    total_steps: int  # no rollout is generated that the run does not need
    steps_of: Callable[[int], int]  # the optimizer steps of a rollout, from its number of samples
    batch_size: int  # responses of a rank, between two looks at the newest weights
    partial: bool = False  # look after each token
    num_episodes: Optional[int] = None  # nothing is generated after so many passes over the prompts; None: no limit


@dataclass
class RolloutPart:
    """The samples of a rollout that one rank's thread has generated."""

    samples: list[Sample] = field(default_factory=list)
    checksums: dict[int, str] = field(default_factory=dict)  # of the engine's weights, by version
    facts: dict[str, float] = field(default_factory=lambda: {"time_generate": 0.0, "time_reward": 0.0})
    problem: Optional[BaseException] = None


class RolloutsAhead:
    """The thread of this rank, and what the main thread needs of it. As a context manager, it stops the thread."""

    def __init__(
        self,
        engine,
        score_mine,
        pace: Pace,
        sampling: Sampling,
        *,
        seed: int,
        group_size: int,
        generate=continue_prompts,
    ):
        """`score_mine(samples)` sets scores without communication. None: the main thread scores whole rollouts.

        `generate` is `continue_prompts`, or `episodes.continue_episodes` with environments.
        """
        self.engine, self.score_mine, self.pace, self._generate = engine, score_mine, pace, generate
        self._sampling, self._seed, self._group_size = sampling, seed, group_size
        self._requests, self._done = queue.SimpleQueue(), queue.SimpleQueue()
        self._prompts = None  # a position of its own in the prompts, ahead of the one that a checkpoint saves
        self._ahead: deque[int] = deque()  # optimizer steps of each batch that is requested and not yet given
        self._next = 0  # the batch of prompts to request next; see `RLState.refills`
        self._lead = 1  # how many rollouts the thread may be ahead now, at most K; the same on every rank
        self._newest: tuple[int, dict[str, torch.Tensor]] = (-1, {})
        self._generates = True  # False: this rank's thread needs no weights
        self._held: Optional[int] = None  # the version in the engine
        self._checksum, self._engine_lock, self._stopped = "", threading.Lock(), False
        self.files: Optional[AheadFiles] = None  # set before the first rollout, like `resumed`
        self.resumed, self._links = ResumedRollouts(), {}  # links by version
        self._thread = threading.Thread(target=self._run, name="rollouts ahead", daemon=True)

    def __enter__(self) -> "RolloutsAhead":
        self._thread.start()
        return self

    def __exit__(self, _type, error, _traceback) -> None:
        """Wait until the thread has ended its batch. After a signal, wait for the threads of all ranks."""
        self._stopped = True
        self._requests.put(None)
        self._thread.join()
        if isinstance(error, Interrupted):  # all ranks have it; torchrun ends rank 0 once another rank is gone
            gather_objects(None)
        if self.files and error is None:
            self.files.forget(before=self._next)

    @contextlib.contextmanager
    def paused(self):
        """Inside, the engine is the caller's, for an evaluation. The thread waits before its next batch."""
        with self._engine_lock:
            self._held = None
            yield

    # --- the main thread

    def update(self, strategy, model, state) -> dict:
        """The weights of `model` become version `state.rollout` (collective). Returns metrics."""
        self._links[state.rollout] = state.link()
        with span("sync"):
            return self._send(strategy, model, state.rollout)

    def next(self, state, step: int, facts: dict) -> list[Sample]:
        """The samples of the next batch of prompts, with tokens on the rank that generated them (collective).

        The batches that may follow are requested from the thread. Adds metrics to `facts`.

        Raises:
            UserError: a reward failed on one rank. All ranks raise the same error.
        """
        batch = state.rollout + state.refills
        if self._prompts is None:
            self._prompts, self._next = copy.copy(state.prompts), batch
        while self._next <= batch or (self._next <= batch + self._lead and self._needs_more(step)):
            if self._next in self.resumed:
                self._prompts.take(self._prompts.batch_size)
                self._count(len(self.resumed[self._next]))
            else:
                self._request()
        if self.files:
            self.files.forget(before=batch)
        samples = self.resumed.pop(batch, None)
        if samples is None:
            samples = self._receive(batch, facts)
        self._check(samples, state)
        return samples

    def note(self, samples: list[Sample]) -> None:
        """The samples of the last batch have their scores. With a curriculum, these decide which prompts come later."""
        self._prompts.note(samples)

    def _needs_more(self, step: int) -> bool:
        num_episodes = self.pace.num_episodes
        if num_episodes is not None and self._prompts.episode >= num_episodes:
            return False
        return step + sum(self._ahead) < self.pace.total_steps

    def _receive(self, rollout: int, facts: dict) -> list[Sample]:
        """Wait for what the threads of all ranks have made of the next rollout (all-gathers of objects over the world)."""
        waits = not self._is_made(rollout)
        with timed(facts, "wait"):
            mine = self._wait_for(rollout)
        if mine.problem is not None and not isinstance(mine.problem, UserError):
            raise mine.problem
        with span("wait"):
            of_ranks = gather_objects((mine.problem, mine.checksums, waits))
        for problem, *_ in of_ranks:
            if problem is not None:
                raise problem
        waiting = any(waits for *_, waits in of_ranks)
        self._lead = min(self._lead + 1, self.pace.max_staleness) if waiting else max(self._lead - 1, 1)
        checksum = newest_checksum([checksums for _, checksums, _ in of_ranks])
        for name, value in mine.facts.items():
            facts[name] = facts.get(name, 0.0) + value if name.startswith("time_") else value
        facts["weights_checksum"] = checksum
        return share(mine.samples)

    def _is_made(self, rollout: int) -> bool:
        return not self._done.empty()

    def _wait_for(self, rollout: int) -> RolloutPart:
        return self._done.get()

    def _send(self, strategy, model, version: int) -> dict:
        """Copy the weights to host memory, where the threads of a machine find them (collective over the world)."""
        started = time.perf_counter()
        tensors = node_copy(strategy.iter_full_params(model, merged_as=self.engine.dtype), self._generates)
        self._newest = version, tensors
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return {"sync_bytes": num_bytes, "time_sync": time.perf_counter() - started}

    def _request(self) -> None:
        prompts = self._prompts.take(self._prompts.batch_size)
        requests = numbered(prompts, self._group_size)
        self._requests.put((self._next, contiguous_slice(requests, dist.get_rank(), dist.get_world_size())))
        self._count(len(requests))

    def _count(self, num_samples: int) -> None:
        """Note that the next rollout is requested, or already there."""
        self._ahead.append(self.pace.steps_of(num_samples))
        self._next += 1

    def _check(self, samples: list[Sample], state) -> None:
        """Move the position in the prompts, and compare the samples with it and with the bound."""
        self._ahead.popleft()
        expected = [prompt["row"] for prompt in state.prompts.take(state.prompts.batch_size)]
        assert [sample.row for sample in samples[:: self._group_size]] == expected
        assert all(0 <= state.rollout - sample.version <= self.pace.max_staleness for sample in samples)

    # --- the thread

    def _run(self) -> None:
        with self._stream():
            while (request := self._requests.get()) is not None and not self._stopped:
                part = RolloutPart()
                try:
                    is_whole = self._make(part, *request)
                    if self.files and is_whole:
                        self.files.write(request[0], part.samples, self._links)
                except BaseException as error:  # the main thread raises it
                    part.problem = error
                self._done.put(part)

    def _stream(self):
        cuda = self.engine.device.type == "cuda"
        return torch.cuda.stream(torch.cuda.Stream(self.engine.device)) if cuda else contextlib.nullcontext()

    def _make(self, part: RolloutPart, rollout: int, requests: list[tuple[int, dict]]) -> bool:
        """Generate and score. Returns whether all samples are complete."""
        for start in range(0, len(requests), self.pace.batch_size):
            if self._stopped:
                return False
            part.samples += self._make_batch(part, rollout, requests[start : start + self.pace.batch_size])
        if self._stopped and self.pace.partial:
            return False
        self._score(part, part.samples)
        return True

    def _make_batch(self, part: RolloutPart, rollout: int, batch: list[tuple[int, dict]]) -> list[Sample]:
        """The samples of these requests, by the newest weights."""
        with self._engine_lock:
            self._load_newest(part)
            engine = Resuming(self, part) if self.pace.partial else self.engine
            with timed(part.facts, "generate"):
                samples = self._generate(engine, batch, self._sampling, self._seed, rollout)
            for sample in samples:
                sample.versions = without_repeats(sample.versions or [[0, self._held]])
        return samples

    def _score(self, part: RolloutPart, samples: list[Sample]) -> None:
        if self.score_mine is not None and samples:
            with timed(part.facts, "reward"):
                self.score_mine(samples)

    def _load_newest(self, part: RolloutPart) -> int:
        version, tensors = self._newest
        if version != self._held:
            started = time.perf_counter()
            self._checksum, _ = self.engine.update_weights(tensors.items())
            seconds = part.facts.get("time_send", 0.0) + time.perf_counter() - started
            part.facts |= {"time_send": seconds, **self.engine.sync_facts}
            self._held = version
        part.checksums[version] = self._checksum
        return version

    @contextlib.contextmanager
    def _newest_weights(self, part: RolloutPart) -> Iterator[int]:
        """Inside, the engine has these weights. Yields their version."""
        yield self._load_newest(part)

    def _interrupts(self) -> bool:
        return self._stopped or self._newest[0] != self._held


@dataclass
class Resuming:
    """The engine of a thread. If new weights interrupt a response, it goes on from its tokens under these weights."""

    ahead: RolloutsAhead
    part: RolloutPart

    def generate(self, prompts, sampling: Sampling, seeds, limits=()) -> list[Completion]:
        """As an engine's, with `versions`. Responses are incomplete if the run ends meanwhile."""
        ahead, found = self.ahead, [Completion([], [], False) for _ in prompts]
        limits = list(limits) or [sampling.max_new_tokens] * len(prompts)
        while going := [i for i, one in enumerate(found) if not one.finished and len(one.token_ids) < limits[i]]:
            texts = [[*prompts[i], *found[i].token_ids] for i in going]
            counts = [len(found[i].token_ids) for i in going]
            rest = [limits[i] - count for i, count in zip(going, counts)]
            with ahead._newest_weights(self.part) as version:
                own = [sample_seed(seeds[i], version, count) if count else seeds[i] for i, count in zip(going, counts)]
                new = ahead.engine.generate(texts, sampling, own, rest, interrupted=ahead._interrupts)
            for i, count, completion in zip(going, counts, new, strict=True):
                one = found[i]
                one.token_ids += completion.token_ids
                one.log_probs += completion.log_probs
                one.kept_ids += completion.kept_ids
                one.versions += [[count, version]] * bool(completion.token_ids)
                one.finished = completion.finished
            if ahead._stopped:
                break
        return found


def without_repeats(spans: list[list[int]]) -> list[list[int]]:
    """[start, version] spans, without those that have the version of the span before them."""
    return [span for n, span in enumerate(spans) if n == 0 or span[1] != spans[n - 1][1]]


def newest_checksum(of_ranks: list[dict[int, str]]) -> str:
    """The checksum of the newest version. Raises RuntimeError if two engines held different weights under one version."""
    pairs = {pair for checksums in of_ranks for pair in checksums.items()}
    _, checksum = max(pairs)
    if len(dict(pairs)) < len(pairs):
        raise RuntimeError(f"rollout engines hold different weights under one version: {sorted(pairs)}")
    return checksum


def staleness_facts(samples: list[Sample], rollout: int) -> dict[str, float]:
    """The mean over samples of their tokens' staleness, the largest staleness, and the share of samples of several versions.

    Nothing for rollouts of lock step.
    """
    if not samples or not samples[0].versions:
        return {}
    found = [rollout - mean_version(sample) for sample in samples]
    oldest = max(rollout - sample.version for sample in samples)
    resumed = sum(len(sample.versions) > 1 for sample in samples) / len(samples)
    return {"staleness": sum(found) / len(found), "staleness_max": oldest, "resumed_fraction": resumed}


def mean_version(sample: Sample) -> float:
    """The mean version of the tokens after the prompt."""
    if len(sample.versions) == 1:
        return sample.version
    size = sample.size().response
    ends = [start for start, _ in sample.versions[1:]] + [size]
    return sum((end - start) * version for (start, version), end in zip(sample.versions, ends)) / size
