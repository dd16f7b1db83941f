"""SIGTERM, SIGINT and SIGUSR1 (Slurm's warning before preemption) ask a run to stop after its step."""

import signal
from typing import Optional

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """While entered, the first of the signals is noted; the next one ends the process at once, as without this."""

    def __init__(self):
        self.received: Optional[int] = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame) -> None:
        self.received = number
        for other in SIGNALS:  # the kernel then ends the process even where Python would not get to a handler
            signal.signal(other, signal.SIG_DFL)
