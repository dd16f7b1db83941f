"""The progress bar of a run. While it is live, everything that this process prints comes in lines above it."""

import contextlib
import sys

from tqdm import tqdm


class LiveBar:
    """A bar of steps, on terminals only. Inside `with`, no printed line sticks to it, also none of a user's function."""

    def __init__(self, total: int, done: int, is_shown: bool):
        self._facts = {"total": total, "initial": done, "disable": None if is_shown else True, "unit": "step"}
        self._inside, self._bar = contextlib.ExitStack(), tqdm(disable=True)

    def __enter__(self) -> "LiveBar":
        self._bar = self._inside.enter_context(tqdm(**self._facts))
        if not self._bar.disable:
            self._inside.enter_context(contextlib.redirect_stdout(_Above(sys.stdout, self._bar)))
            self._inside.enter_context(contextlib.redirect_stderr(_Above(sys.stderr, self._bar)))
            self._inside.callback(lambda: [stream.end_line() for stream in (sys.stdout, sys.stderr)])
        return self

    def __exit__(self, *error) -> None:
        self._inside.__exit__(*error)

    def update(self) -> None:
        self._bar.update()


class _Above:
    """A stream that takes the bar away while it writes. Text without an end of line waits for it."""

    def __init__(self, stream, bar: tqdm):
        self._stream, self._bar, self._waits = stream, bar, ""

    def write(self, text: str) -> int:
        with self._bar.get_lock():  # threads print too
            self._waits += text
            if self._waits.endswith("\n"):
                self._bar.clear(nolock=True)
                self._stream.write(self._waits)
                self._stream.flush()
                self._bar.refresh(nolock=True)
                self._waits = ""
        return len(text)

    def end_line(self) -> None:
        if self._waits:
            self.write("\n")

    def __getattr__(self, name: str):
        return getattr(self._stream, name)
