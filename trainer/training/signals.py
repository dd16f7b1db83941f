"""SIGTERM, SIGINT and SIGUSR1 (Slurm's warning before preemption) ask a run to stop after its step."""

import signal
from typing import Optional

from trainer.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """While entered, the first of the signals is noted; the next one ends the process at once, as without this."""

    def __init__(self):
        self.received: Optional[int] = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, _type, error, _traceback) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received and isinstance(error, RuntimeError):
            # torchrun ends the ranks that a dead one leaves behind by SIGTERM, and they cannot finish their step
            name, reason = signal.Signals(self.received).name, str(error).splitlines()[0]
            raise Interrupted(f"stopped by {name} before the step was done ({reason})") from None

    def _note(self, number: int, _frame) -> None:
        self.received = number
        for other in SIGNALS:  # the kernel then ends the process even where Python would not get to a handler
            signal.signal(other, signal.SIG_DFL)
