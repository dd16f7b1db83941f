"""`trainer COMMAND`: every command under one name. A training command takes its ranks along:

trainer sft --nproc 2 --pretrain MODEL --dataset data.jsonl ...
"""

import contextlib
import importlib
import importlib.metadata
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from trainer.entry import EXIT_INTERRUPTED, STOPPED, end_in_a_line_at_sigterm, ends_as_trainer, leave, run_command
from trainer.errors import Interrupted, UserError
from trainer.flags.names.command_names import command_for
from trainer.flags.names.sources import naming_sources
from trainer.help_texts import example_of
from trainer.planning.versions import certified_line, installed, read_cards
from trainer.runs.start_line import ANNOUNCED, announce, lacks_gpu, num_gpus

TRAINING = {name: f"train_{name}" for name in ("sft", "rm", "dpo", "ppo", "kd")}
RANKED = {**TRAINING, "eval": "evaluate", "serve_train": "serve_train"}  # commands that start ranks
OTHERS = (
    "check", "doctor", "export", "make_demo", "plan", "prepare_data", "report", "serve_engine", "serve_rm", "verify_run",
    "watch",
)  # fmt: skip
# flags of torchrun, for runs on several nodes
NODE_FLAGS = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id")
HELP = ("-h", "--help", "help")
USAGE = f"""{example_of("trainer")}usage: trainer COMMAND [--nproc N] [--flag value ...]

to train:   {", ".join(TRAINING)}
to measure: eval
to serve:   serve_train
besides:    {", ".join(OTHERS)}

--nproc N   ranks on this machine (default: 1), for commands that train, eval and serve_train; gpu or auto: one for
            each GPU, where auto is 1 without a GPU
{", ".join(f"--{name}" for name in NODE_FLAGS)}: as torchrun has them, for several machines

trainer COMMAND --help   an example, and all flags
"""


def run(argv: list[str]) -> None:
    if not argv or argv[0] in HELP:
        argv = [word for word in argv if word not in HELP]
        if not argv:
            print(USAGE, end="")
            return
        argv = [*argv, "--help"]  # trainer help sft
    if argv[0] in ("-V", "--version", "version"):
        print(f"trainer {importlib.metadata.version('trainer')} ({certified_line(installed(), read_cards())[1]})")
        return
    name = RANKED.get(argv[0], argv[0])
    if name not in (*RANKED.values(), *OTHERS):
        words = command_for(argv[0], (*RANKED, *OTHERS))
        instead = f"Write: trainer {words}" if words else ""
        raise UserError(argv[0], "no such command", ", ".join((*RANKED, *OTHERS)), instead)
    door = importlib.import_module(f"trainer.cli.{name}")
    num_ranks, nodes, flags = split(argv[1:]) if name not in OTHERS else (1, {}, argv[1:])
    if num_ranks > 1 or nodes:
        with world_size(num_ranks, nodes):
            checked = naming_sources(door.check)(flags)
            if not nodes:  # a person waits here, and torch is imported next
                args = checked[0] if isinstance(checked, tuple) else checked
                announce(door.COMMAND, args, trains=name in TRAINING.values())
                os.environ[ANNOUNCED] = "1"
        start_ranks(f"trainer.cli.{name}", num_ranks, nodes, flags)
    else:
        sys.argv = [name, *flags]
        door.main()


def split(argv: list[str]) -> tuple[int, dict[str, str], list[str]]:
    """(ranks on this machine, flags for torchrun, flags of the command)."""
    own, flags, rest = {}, [], iter(argv)
    for word in rest:
        name, has_value, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in ("nproc", "nproc_per_node", *NODE_FLAGS):
            own[name.removesuffix("_per_node")] = value if has_value else next(rest, "")
        else:
            flags.append(word)
    return ranks_of(own.pop("nproc", "1")), own, flags


def ranks_of(value: str) -> int:
    """The number of ranks that a value of --nproc means: one for each GPU with gpu, and with auto where there are some."""
    if value == "auto":
        return num_gpus() or 1
    if value == "gpu":
        value = str(num_gpus())
        if value == "0":
            raise UserError("--nproc", f"gpu, but {lacks_gpu() or 'NVML tells of none'}", "a number, auto")
    if not value.isdecimal() or int(value) < 1:
        raise UserError("--nproc", repr(value), "the number of ranks on this machine, gpu, auto")
    return int(value)


@contextlib.contextmanager
def world_size(num_ranks: int, nodes: dict[str, str]) -> Iterator[None]:
    """Inside, WORLD_SIZE is what the ranks will see, unless the number of nodes may change ("1:4")."""
    num_nodes = nodes.get("nnodes", "1")
    os.environ["WORLD_SIZE"] = str(num_ranks * int(num_nodes) if num_nodes.isdecimal() else num_ranks)
    yield
    del os.environ["WORLD_SIZE"]


def start_ranks(module: str, num_ranks: int, nodes: dict[str, str], flags: list[str]) -> None:
    """Start the ranks as torchrun does, pass signals on, and end with the exit code of the rank that failed first."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    logging.disable(logging.CRITICAL)  # of torchrun: each rank that is ended
    end_in_a_line_at_sigterm()  # until torchrun takes it
    # not before the flags are checked: it imports torch
    from torch.distributed import run as torchrun

    where = [f"--{name}={value}" for name, value in nodes.items()] or ["--standalone"]
    try:
        torchrun.run(torchrun.parse_args([*where, f"--nproc_per_node={num_ranks}", "-m", module, *flags]))
    except Exception as error:
        end_as_ranks(error)


def end_as_ranks(error: BaseException) -> NoReturn:
    """End torchrun's own process after what it raised, with the exit code of the ranks.

    A rank prints its own error. So nothing is printed here, unless a rank died without a word.
    """
    # they import torch, which the command `trainer` imports late
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if isinstance(error, SignalException):
        if all(code is None or code < 0 for code in codes_of_ranks(error)):
            raise Interrupted(STOPPED.format(error.sigval.name)) from None
        leave(EXIT_INTERRUPTED)
    if not isinstance(error, ChildFailedError):
        raise error
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    left = [code for code in codes.values() if code > 0]
    if not left:
        # torchrun ends the others by SIGTERM
        rank = min(codes, key=lambda rank: (codes[rank] == -signal.SIGTERM, rank))
        name = signal.Signals(-codes[rank]).name
        if name == "SIGTERM":  # in a step, a rank only notes it
            raise Interrupted(STOPPED.format(name)) from None
        cause = "It is often for want of memory." if name == "SIGKILL" else ""
        raise UserError(f"rank {rank}", f"ended by {name}", instead=cause) from None
    leave(max(left))


def codes_of_ranks(error: BaseException) -> list[int | None]:
    """The exit codes of the ranks that torchrun ended at a signal. Only its agent has them, in a frame of the error."""
    agents = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    started = next((agent._pcontext for agent in agents if getattr(agent, "_pcontext", None)), None)
    return [one.proc.poll() for one in started.subprocess_handlers.values()] if started else []


def torchrun_handler() -> Callable:
    """Let a plain torchrun that starts a command of ours end as `trainer --nproc` does: no table, and the ranks' exit code.

    torchrun loads each entry point of the group "torchrun.handlers" before it starts ranks; setup.py names this one.
    The group is for kinds of rendezvous. No other code but its own runs in torchrun's process.
    """
    if ends_as_trainer(sys.orig_argv):
        logging.disable(logging.CRITICAL)
        sys.excepthook = lambda kind, error, trace: run_command(lambda argv: end_as_ranks(error), [])
    return no_rendezvous


def no_rendezvous(parameters) -> NoReturn:
    raise ValueError("--rdzv_backend trainer: no such kind of rendezvous")


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
