"""Full tensors from a trainer's rank to the workers of a rollout server, by broadcasts of gloo.

The sender and the workers make a process group of their own, next to the other groups of their processes. It lasts for one
update. The names of tensors go over its store, so receivers need to know nothing before the first tensor.
"""

import contextlib
import datetime
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

LIMIT = datetime.timedelta(minutes=5)  # for the workers to come, and for a tensor


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

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], while_waiting: Callable[[], None]) -> None:
        """Broadcast the tensors in the order of the iterable (from rank 0 to all ranks of the stream).

        `while_waiting()` is called until all receivers have come. It raises if they will not.

        Raises:
            ConnectionError: a receiver is gone. The rest of the tensors is still in the iterable.
        """
        while not self._store.check([f"receiver {rank}" for rank in range(1, self._size)]):
            while_waiting()
            time.sleep(0.01)
        with _of_connections():
            group, number = dist.ProcessGroupGloo(self._store, self._rank, self._size, LIMIT), 0
        for number, (name, tensor) in enumerate(tensors, start=1):
            tensor = tensor.detach().cpu().contiguous()
            facts = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            with _of_connections():
                self._store.set(f"tensor {number}", json.dumps(facts))
                group.broadcast([tensor.view(-1).view(torch.uint8)], dist.BroadcastOptions()).wait()
        with _of_connections():
            self._store.set(f"tensor {number + 1}", "null")
            group.barrier().wait()  # the store must live until all have read from it

    def received(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor on the CPU) of each tensor that comes, until the last one."""
        self._store.set(f"receiver {self._rank}", "")
        group, number = dist.ProcessGroupGloo(self._store, self._rank, self._size, LIMIT), 1
        while (facts := json.loads(self._store.get(f"tensor {number}"))) is not None:
            name, dtype, shape = facts
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast([tensor.view(-1).view(torch.uint8)], dist.BroadcastOptions()).wait()
            yield name, tensor
            number += 1
        group.barrier().wait()


@contextlib.contextmanager
def _of_connections() -> Iterator[None]:
    """Errors of gloo inside are about the other end. Errors of the iterable are not, so it runs outside."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error).splitlines()[0]) from None
