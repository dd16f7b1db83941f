"""Run a function on several ranks, each a fork of this process: what it has imported need not be imported again.

Imports of torch, transformers and DeepSpeed take seconds for each rank. A fork takes milliseconds. This process must
have one thread only, and must not have used CUDA.
"""

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.compare.runs.launch import SECOND_HAND, free_port
from trainer.errors import UserError

GRACE_SECONDS = 10.0  # for the other ranks, once a rank has failed


@dataclass(frozen=True)
class Ending:
    """How a launch ended: done, refused (UserError), raised, died or timed out. `text` is one line that says why."""

    kind: str
    text: str
    seconds: float


# The libraries import these only when a run needs them.
LATE_IMPORTS = (
    "deepspeed.module_inject.auto_ep_config", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3", "peft", "setuptools.dist", "torch._inductor.compile_fx",
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers.modeling_utils",
    "transformers.optimization", "transformers.trainer_pt_utils",
)  # fmt: skip


def import_libraries() -> None:
    """Import what every training command needs, before ranks are forked."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")  # a GPU that is used before a fork fails after it
    # not at the top: these libraries read the variables when they are imported
    import torch
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    for name in LATE_IMPORTS:
        if importlib.util.find_spec(name.partition(".")[0]):  # peft is an extra
            importlib.import_module(name)
    get_checkpoint_conversion_mapping("llama")  # compiles the patterns of every architecture, once
    torch.set_num_threads(1)
    gc.freeze()


def run_ranks(function: Callable[[], None], num_ranks: int, log: Path, timeout: float) -> Ending:
    """Call `function` on every rank, as torchrun would, and wait. No process is left behind.

    All output goes to `log`. A launch that takes longer than `timeout` seconds is killed; the log then holds the
    traceback of each rank.
    """
    started, port = time.monotonic(), free_port()
    faulthandler.cancel_dump_traceback_later()  # in a rank: its fork would wait for this thread, which it lacks
    sys.stdout.flush()
    sys.stderr.flush()
    running: dict[int, int] = {}  # pid -> pipe with the ending of the rank
    leader = 0
    try:
        for rank in range(num_ranks):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _be_rank(function, rank, num_ranks, port, leader, log, writer, timeout)
            os.close(writer)
            running[pid] = reader
            leader = leader or pid
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # the rank does the same: either may be first
                os.setpgid(pid, leader)
        kind, text = _first_hand(_wait(running, started + timeout), timeout)
    finally:
        if leader:  # 0, without a first fork, would be this process and its group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)  # processes that ranks have started; on an early exit also the ranks
        for pid in list(running):
            _reap(running, pid)
    return Ending(kind, text, time.monotonic() - started)


def write_all_to(log: Path) -> None:
    """Append all output of this process to a file, from now on."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (for the whole life of the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _be_rank(function, rank, num_ranks, port, leader, log: Path, writer: int, timeout: float) -> None:
    """The life of one rank. Never returns."""
    ending = ("died", "ended without a message")
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, leader)
        signal.alarm(int(timeout) + 30)  # in case the parent is gone
        write_all_to(log)
        faulthandler.dump_traceback_later(max(1.0, timeout - 2), file=sys.stderr)
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ.update({name: str(value) for name, value in here.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        function()
        ending = ("done", "")
    except UserError as error:
        print(f"error: {error}", flush=True)
        ending = ("refused", str(error))
    except BaseException as error:
        traceback.print_exc()
        ending = ("raised", f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(writer, json.dumps([ending[0], " ".join(ending[1].split())[:1000]]).encode())
        os._exit(0)


def _wait(running: dict[int, int], deadline: float) -> list[tuple[str, str]]:
    """(kind, text) of each rank's ending. Ranks that still run at the deadline are killed."""
    endings = []
    while running:
        late = time.monotonic() > deadline
        for pid in list(running):
            if late:
                os.kill(pid, signal.SIGKILL)
            ended = _reap(running, pid, wait=late)
            if ended:
                endings.append(("timed out", "") if late and ended[0] == "died" else ended)
                if ended[0] != "done":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.01)
    return endings


def _reap(running: dict[int, int], pid: int, wait: bool = True) -> tuple[str, str] | None:
    """How a rank ended. None if it still runs."""
    ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    if not ended:
        return None
    pipe = running.pop(pid)
    text = os.read(pipe, 1 << 16)
    os.close(pipe)
    if text:
        return tuple(json.loads(text))
    code = os.waitstatus_to_exitcode(status)
    return "died", f"a rank ended by {signal.Signals(-code).name}" if code < 0 else f"a rank ended with code {code}"


def _first_hand(endings: list[tuple[str, str]], timeout: float) -> tuple[str, str]:
    """The ending that explains the others: a refusal, an exception of the rank itself, a death, a lost connection."""

    def rank(ending: tuple[str, str]) -> int:
        kind, text = ending
        order = ["refused", "raised", "died", "lost", "timed out", "done"]
        return order.index("lost" if kind == "raised" and SECOND_HAND.search(text) else kind)

    kind, text = min(endings, key=rank)
    return kind, f"no end after {timeout:g} s" if kind == "timed out" else text
