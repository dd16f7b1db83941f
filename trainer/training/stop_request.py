"""Signals that ask a run to stop: the first is only noted, so that a step or a save is whole."""

import os
import signal
from typing import Optional

from trainer.entry import of_this_process
from trainer.errors import Interrupted, UserError

# SIGUSR1 is Slurm's warning before preemption
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ENDING = "{}: the run is over and writes its model; another signal ends it at once"


class StopRequest:
    """Inside, the first signal is only noted. The next signal ends the process at once, as it does outside."""

    def __init__(self, said: str = ""):
        """`said` is what rank 0 prints at the first signal."""
        self.received: Optional[int] = None
        self._said, self._before = said, {}

    def __enter__(self) -> "StopRequest":
        note = of_this_process(self._note)
        self._before = {number: signal.signal(number, note) for number in SIGNALS}
        return self

    def __exit__(self, _type, error, _traceback) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        quiet = (RuntimeError, UserError) if int(os.environ.get("RANK", 0)) else RuntimeError
        if self.received and isinstance(error, quiet):
            # when one rank dies, torchrun ends the others with SIGTERM; rank 0 prints an error that all ranks have
            name, reason = signal.Signals(self.received).name, str(error).splitlines()[0]
            raise Interrupted(f"stopped by {name} before the step was done ({reason})") from None

    def _note(self, number: int, _frame) -> None:
        self.received = number
        for other in SIGNALS:  # the kernel then ends the process, even if Python cannot run a handler
            signal.signal(other, signal.SIG_DFL)
        if self._said and int(os.environ.get("RANK", 0)) == 0:
            os.write(2, f"{self._said.format(signal.Signals(number).name)}\n".encode())
