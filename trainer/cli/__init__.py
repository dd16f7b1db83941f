"""The doors: one file per command. A door names the parts of its command and nothing else."""

import os
import sys


def end_by_signal(kind: type, error: BaseException, trace) -> None:
    """An excepthook: Ctrl-C while a rank still imports its command ends it as `run_command` does, without a traceback."""
    if kind is not KeyboardInterrupt:
        return sys.__excepthook__(kind, error, trace)
    # its import may be what the signal broke off
    from trainer.entry import run_command

    def stopped(argv: list[str]) -> None:
        raise error

    run_command(stopped, [])


if "RANK" in os.environ:  # not in torchrun, nor in programs that import a command
    sys.excepthook = end_by_signal
