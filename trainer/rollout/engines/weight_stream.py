"""Tensors from a trainer's rank to the workers of a rollout server, by broadcasts of gloo, many tensors in one message.

The sender and the workers make a process group of their own, next to the other groups of their processes. It lasts for one
update. The names of tensors go over its store, so receivers need to know nothing before the first message.

A receiver may keep what it got. Then the next update may bring the changed values of a tensor only.
A step of training moves few weights far enough to change their bf16 value. A changed value costs its own bytes and two for its
position. So positions are numbers inside a block of 65536 values, and each block has a count.
"""

import contextlib
import datetime
import json
import math
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist

from trainer.rollout.engines.checksum import INTEGERS

LIMIT = datetime.timedelta(minutes=5)  # for the workers to come, and for a message
MESSAGE_BYTES = 2**26  # a larger tensor has a message of its own
BLOCK = 2**16  # values; positions inside it are int16 numbers
ALIGNMENT = 8  # bytes; views of other dtypes must begin at a multiple of their size
WHOLE = -1  # the count of a tensor that is sent whole


@dataclass(frozen=True)
class Update:
    """A tensor to send, on the CPU. `changed` has the sorted positions of its changed values. None: it is sent whole."""

    name: str
    value: torch.Tensor
    changed: Optional[torch.Tensor] = None


@dataclass(frozen=True)
class Head:
    """What a receiver must know of a tensor, to read it from a message."""

    name: str
    dtype: str
    shape: list[int]
    count: int  # of changed values, or WHOLE

    def parts(self) -> list[tuple[torch.dtype, int]]:
        """(dtype, number of values) of what the message has of this tensor, in order."""
        dtype, size = getattr(torch, self.dtype), math.prod(self.shape)
        if self.count == WHOLE:
            return [(dtype, size)]
        return [(torch.int32, -(-size // BLOCK)), (torch.int16, self.count), (dtype, self.count)]

    def num_bytes(self) -> int:
        return sum(_aligned(dtype.itemsize * count) for dtype, count in self.parts())


class LastSync:
    """Copies of the tensors of the last sync, in host memory."""

    def __init__(self):
        self._values: dict[str, torch.Tensor] = {}

    def update(self, name: str, value: torch.Tensor) -> Update:
        """The update of a tensor on the CPU, which is then the copy. It is whole if its changes would need as many bytes."""
        last = self._values.get(name)
        if last is None or (last.shape, last.dtype) != (value.shape, value.dtype):
            self._values[name] = value.clone()
            return Update(name, value)
        kind = INTEGERS[value.element_size()]  # bits: -0 is not 0, and nan is nan
        changed = (value.view(-1).view(kind) != last.view(-1).view(kind)).nonzero().view(-1)
        last.copy_(value)
        update = Update(name, value, changed)
        return update if _head(update).num_bytes() < value.nbytes else Update(name, value)


def packed(updates: Iterable[Update], most_bytes: int) -> Iterator[tuple[list[tuple], torch.Tensor]]:
    """(fields of the heads, bytes) of each message, of at most `most_bytes` or of one tensor. The last message is empty.

    Each tensor is copied before the next one is taken.
    """
    heads, message, place = [], torch.empty(0, dtype=torch.uint8), 0
    for update in updates:
        head = _head(update)
        if heads and place + head.num_bytes() > most_bytes:
            yield heads, message[:place]
            heads, place = [], 0
        if not heads:
            message = torch.zeros(max(most_bytes, head.num_bytes()), dtype=torch.uint8)
        heads.append((head.name, head.dtype, head.shape, head.count))
        for values in _values_of(update):
            message[place : place + values.nbytes] = values.view(torch.uint8)
            place += _aligned(values.nbytes)
    if heads:
        yield heads, message[:place]
    yield [], message[:0]


def unpacked(
    heads: Iterable[Head], message: torch.Tensor, kept: Optional[dict[str, torch.Tensor]] = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of each head. `kept` has the tensors before, and then those after. None: nothing is kept."""
    place = 0
    for head in heads:
        values = []
        for dtype, count in head.parts():
            values.append(message[place : place + dtype.itemsize * count].view(dtype))
            place += _aligned(dtype.itemsize * count)
        if head.count == WHOLE:
            [whole] = values
            tensor = whole.view(head.shape)
            if kept is not None:
                tensor = kept[head.name] = tensor.clone()
        else:
            counts, places, changed = values
            blocks = torch.repeat_interleave(torch.arange(len(counts)), counts.long())
            tensor = kept[head.name]
            tensor.view(-1)[blocks * BLOCK + places.long() + BLOCK // 2] = changed
        yield head.name, tensor


def _head(update: Update) -> Head:
    count = WHOLE if update.changed is None else len(update.changed)
    return Head(update.name, str(update.value.dtype).removeprefix("torch."), list(update.value.shape), count)


def _values_of(update: Update) -> list[torch.Tensor]:
    """What a message has of a tensor: see `Head.parts`."""
    flat, changed = update.value.view(-1), update.changed
    if changed is None:
        return [flat]
    counts = torch.bincount(changed // BLOCK, minlength=-(-flat.numel() // BLOCK)).int()
    return [counts, (changed % BLOCK - BLOCK // 2).to(torch.int16), flat[changed]]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class WeightStream:
    """One end of a stream: rank 0 sends, and the others receive."""

    def __init__(self, host: str, port: int, rank: int, size: int, token: str = ""):
        """Port 0 takes a free one on rank 0; see `port`. The group is made at the first tensor.

        Rank 0 listens at the address `host` only, and makes the `token` under which receivers register. It tells them
        over a channel of its own, so a stranger who finds the port is no receiver.
        """
        self._rank, self._size, self.token = rank, size, token or secrets.token_hex(16)
        options = {"timeout": LIMIT, "wait_for_workers": False}
        if rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family, backlog=size + 16)
            options["master_listen_fd"], port = listening.fileno(), listening.getsockname()[1]
            self._listening = listening.detach()  # the store closes it
        self.port = port
        self._store = dist.PrefixStore(self.token, dist.TCPStore(host, port, size, is_master=rank == 0, **options))

    def send(self, tensors: Iterable[Update], while_waiting: Callable[[], None]) -> int:
        """Broadcast the tensors in the order of the iterable (from rank 0 to all ranks of the stream). Returns the bytes.

        `while_waiting()` is called until all receivers have come. It raises if they will not.

        Raises:
            ConnectionError: a receiver is gone. The rest of the tensors is still in the iterable.
        """
        while not self._store.check([f"receiver {rank}" for rank in range(1, self._size)]):
            while_waiting()
            time.sleep(0.01)
        with _of_connections():
            group, sent = dist.ProcessGroupGloo(self._store, self._rank, self._size, LIMIT), 0
        for number, (heads, message) in enumerate(packed(tensors, MESSAGE_BYTES), start=1):
            with _of_connections():
                self._store.set(f"message {number}", json.dumps(heads))
                if heads:  # none: it is the last one
                    group.broadcast([message], dist.BroadcastOptions()).wait()
                    sent += message.nbytes
        with _of_connections():
            group.barrier().wait()  # the store must live until all have read from it
        return sent

    def received(self, kept: Optional[dict[str, torch.Tensor]] = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor on the CPU) of each tensor that comes, until the last one.

        `kept` has the tensors of the update before, and then those of this one. Only with it, changes can come.
        """
        self._store.set(f"receiver {self._rank}", "")
        group, number = dist.ProcessGroupGloo(self._store, self._rank, self._size, LIMIT), 1
        while heads := [Head(*head) for head in json.loads(self._store.get(f"message {number}"))]:
            message = torch.empty(sum(head.num_bytes() for head in heads), dtype=torch.uint8)
            group.broadcast([message], dist.BroadcastOptions()).wait()
            yield from unpacked(heads, message, kept)
            number += 1
        group.barrier().wait()


@contextlib.contextmanager
def _of_connections() -> Iterator[None]:
    """Errors of gloo inside are about the other end. Errors of the iterable are not, so it runs outside."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error).splitlines()[0]) from None
