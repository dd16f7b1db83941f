"""Start and end of every command: an error gives one line and exit code 2, and no rank stays behind."""

import atexit
import contextlib
import ctypes
import errno
import json
import logging
import os
import re
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from itertools import pairwise

from trainer.errors import Interrupted, NothingLeft, UserError, plain

PR_SET_PDEATHSIG = 1  # linux/prctl.h
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: a signal came; the same command with --load_checkpoint resumes
STOPPED = "stopped by {}; no step was running, so no checkpoint was saved"
# other ranks wait this long, so that rank 0 reports first; torchrun ends them when rank 0 exits
OTHER_RANKS_WAIT_SECONDS = 10
# a rank that only lost its connection waits this long, so that the rank that knows the cause reports first
LOST_PEER_WAIT_SECONDS = 20
# the disk is full, broken, gone or closed to this user: nothing that a traceback explains
DISK_FAULTS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE, errno.EACCES, errno.EPERM, errno.ENODEV,
}  # fmt: skip
# torchrun waits up to 30 s for its other ranks before it ends
LAST_WORD_SECONDS = 60
BYTES_OF_TABLE = 1500  # torchrun's table and traceback are longer; its warnings are shorter
LOOK_SECONDS, QUIET_TICKS = 0.05, 3  # of 10 ms: torchrun works for so long without a word when its table is complete
MEMORY_FLAGS = (
    "a smaller --micro_train_batch_size or --max_len, --gradient_checkpointing, --adam_offload, --zero_stage 3, "
    "more ranks"
)


class PlainStream:
    """A stream that shows control characters of texts, which could drive the terminal. Bars may move as they do."""

    BARS = re.compile(r"(\r|\x1b\[A)")  # of tqdm

    def __init__(self, stream):
        # for who checks texts itself, and moves the cursor; the command `trainer` wraps once more than its doors
        self.unchecked = getattr(stream, "unchecked", stream)

    def write(self, text: str) -> int:
        shown = self.BARS.split(text)
        self.unchecked.write("".join(part if number % 2 else plain(part) for number, part in enumerate(shown)))
        return len(text)

    def __getattr__(self, name: str):
        return getattr(self.unchecked, name)


def run_command(main: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Run `main(argv)` and end the process with the exit code that fits.

    An error is reported once, and in one line if its cause is known.
    """
    # with a core taken by another process, libgomp's default spin made steps take 27 times as long; this costs 5 %
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    sys.stdout, sys.stderr = PlainStream(sys.stdout), PlainStream(sys.stderr)
    try:
        main(sys.argv[1:] if argv is None else argv)
    except NothingLeft as reason:
        if int(os.environ.get("RANK", 0)) == 0:
            print(reason)
    except KeyboardInterrupt:
        if int(os.environ.get("RANK", 0)) == 0:
            print(Interrupted(STOPPED.format("SIGINT")), file=sys.stderr)
        leave(EXIT_INTERRUPTED)
    except Interrupted as reason:
        if int(os.environ.get("RANK", 0)) == 0:
            print(reason, file=sys.stderr)
        leave(EXIT_INTERRUPTED)
    except UserError as error:
        _wait_for_other_ranks(OTHER_RANKS_WAIT_SECONDS)
        _tell(error)
        leave(EXIT_USER_ERROR)
    except Exception as error:
        if _is_out_of_memory(error):
            _tell(f"out of memory: {str(error).splitlines()[0]} (what lowers memory: {MEMORY_FLAGS})")
            leave(EXIT_USER_ERROR)
        if "does not have a deterministic implementation" in str(error):  # torch's words
            _tell(f"--deterministic: {str(error).split(',')[0]} (allowed: --deterministic false)")
            leave(EXIT_USER_ERROR)
        if twice := re.search(r"Duplicate GPU detected\D*rank (\d+) and rank (\d+)", str(error)):  # NCCL's words
            _wait_for_other_ranks(OTHER_RANKS_WAIT_SECONDS)
            _tell(
                f"--nproc: ranks {twice[1]} and {twice[2]} have the same GPU (allowed: one rank per GPU, --device cpu)"
            )
            leave(EXIT_USER_ERROR)
        if isinstance(error, BrokenPipeError) and _is_unread(1):
            _tell(
                "standard output: nothing reads it any more, as after `| head`. Write it to a file, or read all of it."
            )
            leave(EXIT_USER_ERROR)
        if isinstance(error, OSError) and error.errno in DISK_FAULTS:
            _wait_for_other_ranks(OTHER_RANKS_WAIT_SECONDS)
            where = error.filename2 or error.filename or "a file of the run"
            _tell(
                f"{where}: cannot be read or written: {error.strerror}. --load_checkpoint resumes from the last checkpoint."
            )
            leave(EXIT_USER_ERROR)
        if _is_lost_peer(error):
            _wait_for_other_ranks(LOST_PEER_WAIT_SECONDS, rank_0_too=True)
            _tell(f"another rank is gone: {str(error).splitlines()[0]}")
        else:
            _wait_for_other_ranks(OTHER_RANKS_WAIT_SECONDS)
            traceback.print_exc()
        leave(1)
    end_well()


def end_in_a_line_at_sigterm() -> None:
    """Let SIGTERM end this process with a line, where no rank computes. In a collective, Python would not get a turn."""

    def end(_number, _frame) -> None:
        os.write(2, f"{STOPPED.format('SIGTERM')}\n".encode())
        os._exit(EXIT_INTERRUPTED)

    signal.signal(signal.SIGTERM, of_this_process(end))


def of_this_process(handle: Callable[[int, object], None]) -> Callable[[int, object], None]:
    """A handler of signals that a fork does not inherit: in another process, the signal does what it does by default."""
    owner = os.getpid()

    def handle_here(number: int, frame) -> None:
        if os.getpid() == owner:
            handle(number, frame)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    handle_here.of_one_process = True
    return handle_here


def _forget_handlers() -> None:
    """Python runs no handler of a signal that comes just before a long call, so the kernel is to end a fork."""
    for number in signal.valid_signals():
        if hasattr(signal.getsignal(number), "of_one_process"):
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_handlers)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, even by `kill -9` or for want of memory (Linux only).

    A rank that outlives its torchrun would hold its GPU and write beside the run's successor. A thread that looks for
    the parent could miss its death: a hung collective may never give it a turn.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_well() -> None:
    """End the process with exit code 0 after a successful run. Does not return.

    This also skips interpreter shutdown, where a gloo thread that still holds a tensor can abort the process (SIGABRT,
    rare). torchrun would then count the finished run as failed.
    """
    if "torch" in sys.modules:
        import torch.distributed as dist  # most commands end without torch

        if dist.is_initialized():
            dist.destroy_process_group()
    atexit._run_exitfuncs()
    leave(0)


def _wait_for_other_ranks(seconds: float, rank_0_too: bool = False) -> None:
    if int(os.environ.get("RANK", 0)) or rank_0_too:
        time.sleep(seconds)


def _tell(what) -> None:
    """Print the error. Under torchrun, a process of its own prints it once torchrun has said what it says at its end."""
    rank = int(os.environ.get("RANK", 0))
    line = f"error: {plain(str(what))}" + (f" [rank {rank}]" if rank else "")
    sys.stdout.flush()
    if _parent_is_torchrun():
        _note_for_torchrun(line)
        parent = os.getppid()
        if os.fork() == 0:
            _say_after(parent, line)
    else:
        print(line, file=sys.stderr, flush=True)


def is_torchrun(words: list[str]) -> bool:
    """Whether a command line is that of torchrun."""
    return any(word == "torch.distributed.run" or os.path.basename(word) == "torchrun" for word in words[:5])


def ends_as_trainer(words: list[str]) -> bool:
    """Whether a torchrun of this command line starts a command of ours, and has loaded our end; see cli/__main__.py."""
    starts = any(flag in ("-m", "--module") and name.startswith("trainer.cli.") for flag, name in pairwise(words))
    return starts and is_torchrun(words) and "trainer" in entry_points(group="torchrun.handlers").names


def _parent_is_torchrun() -> bool:
    """Whether a torchrun that prints a table at its end started this rank, and will not start it again (Linux only)."""
    here = os.environ
    if here.get("TORCHELASTIC_RESTART_COUNT") != here.get("TORCHELASTIC_MAX_RESTARTS") or not hasattr(os, "pidfd_open"):
        return False
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
            words = os.fsdecode(file.read()).split("\0")
    except OSError:
        return False
    return "TORCHELASTIC_RUN_ID" in here and is_torchrun(words) and not ends_as_trainer(words)


def _written_and_worked(process: int) -> tuple[int, int]:
    """(bytes that a process has written, ticks of a CPU that it has had). A busy machine gives few ticks to a process."""
    with open(f"/proc/{process}/io") as io, open(f"/proc/{process}/stat") as stat:
        written = next(int(line.split()[1]) for line in io if line.startswith("wchar"))
        return written, sum(map(int, stat.read().rpartition(")")[2].split()[11:13]))  # utime and stime


def _note_for_torchrun(line: str) -> None:
    """Give torchrun the line for its table of failures, which reads a JSON file of this form."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": line, "timestamp": int(time.time())}, file)


def _say_after(torchrun: int, line: str) -> None:
    """Print the line after torchrun's table of failures, from a session that no signal to the ranks reaches.

    torchrun needs a moment to end after its table. So the line comes before the prompt of a shell in most cases.
    """
    os.setsid()
    with contextlib.suppress(OSError):
        is_gone, (begin, since) = os.pidfd_open(torchrun), _written_and_worked(torchrun)
        before = begin
        for _ in range(int(LAST_WORD_SECONDS / LOOK_SECONDS)):
            if select.select([is_gone], [], [], LOOK_SECONDS)[0]:
                break
            written, worked = _written_and_worked(torchrun)
            if written > before:
                before, since = written, worked
            elif written - begin > BYTES_OF_TABLE and worked - since >= QUIET_TICKS:
                break
    os.write(2, f"{line}\n".encode())
    os._exit(0)


def leave(code: int) -> None:
    """Exit without interpreter shutdown. Shutdown could wait for a collective that the other ranks never enter."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_out_of_memory(error: Exception) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(error)


def _is_unread(descriptor: int) -> bool:
    """Whether a descriptor is a pipe whose reader is gone."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _is_lost_peer(error: Exception) -> bool:
    """Whether a collective failed because another process is gone. The words are from gloo and NCCL."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def quiet_libraries() -> None:
    """Keep other libraries' progress bars and deprecation notes out of a run's output."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # tqdm reads it when it is imported
    import torch  # not while --help is printed
    from transformers.utils import logging as transformers_logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns on every rank about the missing GPU
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    # a weight sharded over tp and fsdp needs two all-gathers; torch prints a long warning about it
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
