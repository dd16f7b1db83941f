"""One queue of episodes for servers of any number: rollouts ahead whose groups of samples go to whoever is free.

Each rank drives its own servers, with one thread for each request in flight: a slot. A slot whose sample has ended takes the
next one at once. Groups come from a counter that all ranks share, in the store of the run. So a fast server generates more
than a slow one, and a rank without a server generates nothing. Samples of one prompt stay on one rank. The seeds belong to
the samples, so it does not matter who takes them.

New weights must wait until no slot of the rank generates. So slots go on with older weights while --max_staleness allows it
for the next sample. Then they wait for the longest response. With `Pace.partial`, new weights interrupt all slots at once.

A rank that loses its last server gives its groups back, and others take them. It tries its servers again, less and less often.
Once no rank has had one for `--limits engine_wait_s`, the run ends.
"""

import contextlib
import json
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Optional

import torch.distributed as dist

from trainer.distributed.collectives import broadcast_object
from trainer.limits import limit
from trainer.rollout.asynchronous import Resuming, RolloutPart, RolloutsAhead, without_repeats
from trainer.rollout.engines.servers import FIRST_PAUSE, LONGEST_PAUSE, LostServer
from trainer.rollout.generation import numbered
from trainer.rollout.samples import Sample
from trainer.rollout.timeline import timed

LOOK_SECONDS = 0.02  # between two looks at whether there is something new


class SharedGroups:
    """Groups of requests, by (rollout, number). Every rank sees the same ones, and each is taken once, or given back."""

    def __init__(self, store):
        self._store, self._empty = store, set()  # rollouts without further groups
        self._num_seen, self._returned = 0, {}  # places in the list of those given back, and what is there

    def take(self, sizes: dict[int, int], count: int) -> Optional[tuple[int, list[int]]]:
        """(rollout, at most `count` of its groups), from the oldest rollout that has some. `sizes` has numbers of groups."""
        for place in range(self._num_seen, self._store.add("returned", 0)):
            self._returned[place] = json.loads(self._store.get(f"returned {place}"))
            self._num_seen = place + 1
        for place, (rollout, groups) in list(self._returned.items()):
            if rollout in sizes:
                del self._returned[place]
                if self._store.add(f"taken {place}", 1) == 1:
                    return rollout, groups
        for rollout in sorted(sizes.keys() - self._empty):
            first = self._store.add(f"next {rollout}", count) - count
            if first < sizes[rollout]:
                return rollout, [*range(first, min(first + count, sizes[rollout]))]
            self._empty.add(rollout)
        return None

    def give_back(self, rollout: int, groups: Iterable[int]) -> None:
        place = self._store.add("places", 1) - 1
        self._store.set(f"returned {place}", json.dumps([rollout, list(groups)]))
        self._store.add("returned", 1)

    def note_made(self, rollout: int, count: int) -> None:
        self._store.add(f"made {rollout}", count)

    def is_made(self, rollout: int, size: int) -> bool:
        """Whether all groups of a rollout have samples, or one of them never will."""
        return self._store.add(f"made {rollout}", 0) >= size or self._store.add(f"failed {rollout}", 0) > 0

    def note_failed(self, rollout: int) -> None:
        self._store.add(f"failed {rollout}", 1)

    def note_lost(self, change: int = 0) -> int:
        """Add to the number of ranks that have been without a server for long. Returns it."""
        return self._store.add("lost", change)


@dataclass
class Groups:
    """Groups of a rollout that this rank has taken."""

    rollout: int
    numbers: list[int]
    part: RolloutPart
    oldest: int  # the version of weights that they need, or a later one
    left: int  # samples that have not ended
    samples: list[Sample] = field(default_factory=list)
    dropped: bool = False  # given back, or incomplete


class QueuedRollouts(RolloutsAhead):
    """`RolloutsAhead` for servers. Collective to make.

    With `whole_batches`, one thread takes as many samples as the rank has slots, and the next ones once all have ended.
    """

    def __init__(self, engine, *arguments, num_servers: int, whole_batches: bool = False, **options):
        super().__init__(engine, *arguments, **options)
        prefix = broadcast_object(f"episodes {secrets.token_hex(8)}")  # another run of this process has another queue
        store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self.groups, self._wake = SharedGroups(store), threading.Event()
        self._asked: dict[int, list[tuple[int, dict]]] = {}  # the requests of rollouts that are not trained
        self._oldest: dict[int, int] = {}  # the newest version when they were requested, which is never too old
        self._parts: dict[int, RolloutPart] = {}
        self._num_drivers = min(num_servers, dist.get_world_size())  # ranks with servers
        self._generates, engine.own_only = bool(engine.own), True
        self._num_slots, self._at_a_time = (1, engine.concurrency) if whole_batches else (engine.concurrency, 1)
        self._taking, self._open = threading.Lock(), deque[tuple[Groups, list]]()  # requests that no slot has begun
        self._ended = queue.SimpleQueue[Groups]()
        self._gate, self._inside, self._closed = threading.Condition(), 0, False
        self._lost_at: Optional[float] = None  # since when this rank has no server
        self._try_at, self._pause, self._is_counted = 0.0, FIRST_PAUSE, False

    @contextlib.contextmanager
    def paused(self):
        """Inside, no slot of any rank generates. So each rank may use the servers of all."""
        with self._gate:
            self._closed = True
            self._gate.wait_for(lambda: not self._inside)
        self._held, self.engine.own_only = None, False
        try:
            yield
        finally:
            self.engine.own_only = True
            with self._gate:
                self._closed = False
                self._gate.notify_all()

    # --- the main thread

    def _request(self) -> None:
        requests = numbered(self._prompts.take(self._prompts.batch_size), self._group_size)
        self._parts[self._next], self._oldest[self._next] = RolloutPart(), self._newest[0]
        self._asked[self._next] = requests
        self._count(len(requests))
        self._wake.set()

    def _is_made(self, rollout: int) -> bool:
        return self.groups.is_made(rollout, len(self._asked[rollout]) // self._group_size)

    def _wait_for(self, rollout: int) -> RolloutPart:
        while not self._is_made(rollout):
            time.sleep(LOOK_SECONDS)
        del self._asked[rollout]
        return self._parts.pop(rollout)

    # --- the thread, which scores, and those of the slots

    def _run(self) -> None:
        slots = [threading.Thread(target=self._fill, name=f"slot {n}", daemon=True) for n in range(self._num_slots)]
        for slot in slots if self._generates else ():
            slot.start()
        with self._stream():
            while not self._stopped or not self._ended.empty() or any(slot.is_alive() for slot in slots):
                with contextlib.suppress(queue.Empty):
                    groups = self._ended.get(timeout=LOOK_SECONDS)
                    try:
                        self._finish(groups)
                    except BaseException as error:  # the main thread raises it
                        self._fail(groups.rollout, error)

    def _fill(self) -> None:
        """Generate one sample after the other."""
        while (taken := self._take()) is not None:
            groups, requests = taken
            try:
                samples = self._make_samples(groups, requests)
                with self._gate:
                    groups.samples += samples
                    groups.left -= len(requests)
                    is_last = not groups.left
                if is_last:
                    self._ended.put(groups)
            except LostServer as error:
                self._note_lost(groups, error)
            except BaseException as error:  # the main thread raises it
                self._fail(groups.rollout, error)

    def _take(self) -> Optional[tuple[Groups, list]]:
        """The next requests of this rank, once there are some. None: the run ends."""
        with self._taking:
            while not self._stopped:
                while self._open:
                    groups, requests = self._open.popleft()
                    if not groups.dropped:
                        return groups, requests
                taken, size = None, self._group_size
                if time.monotonic() >= self._try_at:
                    sizes = {rollout: len(found) // size for rollout, found in list(self._asked.items())}
                    taken = self.groups.take(sizes, max(1, self._at_a_time // size))
                if taken is None:
                    self._wake.wait(LOOK_SECONDS)
                    self._wake.clear()
                    continue
                rollout, numbers = taken
                requests = [one for n in numbers for one in self._asked[rollout][n * size : (n + 1) * size]]
                groups = Groups(rollout, numbers, self._parts[rollout], self._oldest[rollout], len(requests))
                for start in range(0, len(requests), self._at_a_time):
                    self._open.append((groups, requests[start : start + self._at_a_time]))
        return None

    def _make_samples(self, groups: Groups, requests: list[tuple[int, dict]]) -> list[Sample]:
        asked, facts = (requests, self._sampling, self._seed, groups.rollout), {}
        if self.pace.partial:
            with timed(facts, "generate"):
                samples = self._generate(Resuming(self, groups.part), *asked)
        else:
            with self._weights(groups.part, groups.oldest) as version, timed(facts, "generate"):
                samples = self._generate(self.engine, *asked)
            for sample in samples:
                sample.versions = [[0, version]]
        for sample in samples:
            sample.versions = without_repeats(sample.versions)
        with self._gate:
            groups.part.facts["time_generate"] += facts["time_generate"] / self._num_slots
            if self._lost_at is not None and not groups.dropped:
                self.groups.note_lost(-int(self._is_counted))
                self._lost_at, self._try_at, self._pause, self._is_counted = None, 0.0, FIRST_PAUSE, False
            groups.dropped |= self._stopped and self.pace.partial  # they are incomplete
        return samples

    def _newest_weights(self, part: RolloutPart):
        return self._weights(part, self._newest[0])

    @contextlib.contextmanager
    def _weights(self, part: RolloutPart, oldest: int) -> Iterator[int]:
        """Inside, the engine has one version of the weights, which it yields: `oldest` or a later one."""
        with self._gate:

            def may_begin() -> bool:
                return not self._closed and (not self._inside or (self._held is not None and self._held >= oldest))

            self._gate.wait_for(may_begin)
            if not self._inside:
                self._load_newest(part)
            version = self._held
            part.checksums[version] = self._checksum
            self._inside += 1
        try:
            yield version
        finally:
            with self._gate:
                self._inside -= 1
                self._gate.notify_all()

    def _finish(self, groups: Groups) -> None:
        """Score whole groups, and note that they are made."""
        if groups.dropped:
            return
        samples = sorted(groups.samples, key=lambda sample: sample.number)
        self._score(groups.part, samples)
        groups.part.samples += samples
        if self.files:
            self.files.write(groups.rollout, samples, self._links, f"-{groups.numbers[0]}")
        self.groups.note_made(groups.rollout, len(groups.numbers))

    def _fail(self, rollout: int, error: BaseException) -> None:
        if part := self._parts.get(rollout):  # else the run ends already
            part.problem = error
            self.groups.note_failed(rollout)

    def _note_lost(self, groups: Groups, error: LostServer) -> None:
        """Give groups back. Wait before the next try, which sends the weights again.

        End the run if nobody has had a server for long.
        """
        with self._gate:
            is_first, groups.dropped = not groups.dropped, True
            if is_first:
                self.groups.give_back(groups.rollout, groups.numbers)
            now, self._held = time.monotonic(), None
            self._lost_at = now if self._lost_at is None else self._lost_at
            if now >= self._try_at:  # else another slot has found it out
                self._try_at, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
            if now - self._lost_at >= limit("engine_wait_s") and not self._is_counted:
                self._is_counted = True
                self.groups.note_lost(1)
        if self.groups.note_lost() >= self._num_drivers:
            self._fail(min(self._asked, default=groups.rollout), error)
