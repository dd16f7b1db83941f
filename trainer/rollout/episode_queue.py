"""One queue of episodes for servers of any number: rollouts ahead whose groups of samples go to whoever is free.

Each rank's thread drives its own servers. It takes the next groups from a counter that all ranks share, in the store of the
run. So a fast server generates more than a slow one, and a rank without a server generates nothing. Groups of one prompt stay
together. The seeds belong to the samples, so it does not matter who takes them.

A rank that loses its last server gives its groups back, and others take them. It tries its servers again, less and less often.
Once no rank has had one for `--limits engine_wait_s`, the run ends.
"""

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterable
from typing import Optional

import torch.distributed as dist

from trainer.distributed.collectives import broadcast_object
from trainer.limits import limit
from trainer.rollout.asynchronous import RolloutPart, RolloutsAhead
from trainer.rollout.engines.on_vllm.vllm_server import FIRST_PAUSE, LONGEST_PAUSE, LostServer
from trainer.rollout.generation import numbered

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


class QueuedRollouts(RolloutsAhead):
    """`RolloutsAhead` for servers. Collective to make."""

    def __init__(self, engine, *arguments, num_servers: int, **options):
        super().__init__(engine, *arguments, **options)
        prefix = broadcast_object(f"episodes {secrets.token_hex(8)}")  # another run of this process has another queue
        store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self.groups, self._wake = SharedGroups(store), threading.Event()
        self._asked: dict[int, list[tuple[int, dict]]] = {}  # the requests of rollouts that are not trained
        self._parts: dict[int, RolloutPart] = {}
        self._num_drivers = min(num_servers, dist.get_world_size())  # ranks with servers
        self._generates, engine.own_only = bool(engine.own), True
        self._lost_at: Optional[float] = None  # since when this rank has no server
        self._try_at, self._pause, self._is_counted = 0.0, FIRST_PAUSE, False

    @contextlib.contextmanager
    def paused(self):
        """Inside, every thread is paused. So each rank may use the servers of all."""
        with super().paused():
            self.engine.own_only = False
            try:
                yield
            finally:
                self.engine.own_only = True

    # --- the main thread

    def _request(self) -> None:
        requests = numbered(self._prompts.take(self._prompts.batch_size), self._group_size)
        self._parts[self._next] = RolloutPart()
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

    # --- the thread

    def _run(self) -> None:
        with self._stream():
            while not self._stopped:
                taken = None
                if self._generates and time.monotonic() >= self._try_at:
                    sizes = {rollout: len(found) // self._group_size for rollout, found in list(self._asked.items())}
                    taken = self.groups.take(sizes, max(1, self.engine.concurrency // self._group_size))
                if taken is None:
                    self._wake.wait(LOOK_SECONDS)
                    self._wake.clear()
                    continue
                rollout, groups = taken
                try:
                    self._make_groups(rollout, groups)
                except LostServer as error:
                    self.groups.give_back(rollout, groups)
                    self._note_lost(rollout, error)
                except BaseException as error:  # the main thread raises it
                    self._fail(rollout, error)

    def _make_groups(self, rollout: int, groups: list[int]) -> None:
        size, requests, part = self._group_size, self._asked[rollout], self._parts[rollout]
        samples = self._make_batch(part, rollout, [one for n in groups for one in requests[n * size : (n + 1) * size]])
        if self._lost_at is not None:
            self.groups.note_lost(-int(self._is_counted))
            self._lost_at, self._try_at, self._pause, self._is_counted = None, 0.0, FIRST_PAUSE, False
        if self._stopped and self.pace.partial:
            return  # they are incomplete
        self._score(part, samples)
        part.samples += samples
        if self.files:
            self.files.write(rollout, samples, self._links, f"-{groups[0]}")
        self.groups.note_made(rollout, len(groups))

    def _fail(self, rollout: int, error: BaseException) -> None:
        if part := self._parts.get(rollout):  # else the run ends already
            part.problem = error
            self.groups.note_failed(rollout)

    def _note_lost(self, rollout: int, error: LostServer) -> None:
        """Wait before the next try, which sends the weights again. End the run if nobody has had a server for long."""
        now, self._held = time.monotonic(), None
        self._lost_at = now if self._lost_at is None else self._lost_at
        self._try_at, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        if now - self._lost_at >= limit("engine_wait_s") and not self._is_counted:
            self._is_counted = True
            self.groups.note_lost(1)
        if self.groups.note_lost() >= self._num_drivers:
            self._fail(min(self._asked, default=rollout), error)
