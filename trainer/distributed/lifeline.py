"""A rank must not outlive the torchrun that started it. It would hold its GPU, and write beside the run's successor."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, even by `kill -9` or for want of memory (Linux only).

    A signal cannot be missed as a thread that looks for the parent could: a hung collective may never give it a turn.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
