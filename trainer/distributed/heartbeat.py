"""--heartbeat_timeout: end a run that hangs. Every rank prints where it hangs."""

import faulthandler
import math
import os
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist

GRACE_SECONDS = 5  # ranks notice it at slightly different times; torchrun ends all when the first one ends


class Heartbeat:
    """A thread that ends this process, with exit code 2, if no `beat` comes for `seconds`."""

    def __init__(self, seconds: float):
        self.seconds, self.last = seconds, time.monotonic()

    def beat(self, *_) -> None:
        self.last = time.monotonic()

    def watch(self) -> None:
        while (left := self.last + self.seconds - time.monotonic()) > 0:
            time.sleep(left)
            if math.isinf(self.seconds):
                return
        found = f"error: --heartbeat_timeout: rank {dist.get_rank()} made no progress for {self.seconds:g} s. It stands here:\n"
        os.write(sys.stderr.fileno(), found.encode() + stacks())  # in one piece: the ranks share this file
        time.sleep(GRACE_SECONDS)
        os._exit(2)


def stacks() -> bytes:
    """The stack of each thread of this process, the last call first."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def watch(model: torch.nn.Module, seconds: float) -> None:
    """Let each forward pass of `model` be a sign of life. Further models count as the same life."""
    if not _started:
        _started.append(Heartbeat(seconds))
        threading.Thread(target=_started[0].watch, daemon=True, name="heartbeat").start()
    model.register_forward_pre_hook(_started[0].beat)


def stop() -> None:
    """No rank waits any more: what follows may take long."""
    for heartbeat in _started:
        heartbeat.seconds = math.inf


_started: list[Heartbeat] = []  # one per process
