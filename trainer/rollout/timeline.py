"""--timeline: what each rank does when, as a Chrome trace that shows idle time. chrome://tracing and Perfetto read it.

A rank notes spans at any time. `Timeline.write` gathers the spans of all ranks, and rank 0 appends them to `timeline.json`.
The file is complete JSON after every write. Times are by the clock of each rank's machine.
"""

import contextlib
import json
import os
import threading
import time

import torch.distributed as dist

from trainer.distributed.collectives import gather_objects

FILE = "timeline.json"
END = b"\n]\n"
THREADS = ["training", "rollouts ahead"]
SLOT = "slot "  # the name of a thread that generates one sample after the other, before its number
_spans: list[dict] = []
_recording = threading.Event()


@contextlib.contextmanager
def span(name: str):
    """Note the time inside, if a run has a timeline."""
    if not _recording.is_set():
        yield
        return
    started, begin = time.time_ns(), time.perf_counter_ns()
    try:
        yield
    finally:
        thread = _lane(threading.current_thread())
        duration = (time.perf_counter_ns() - begin) / 1000
        _spans.append({"name": name, "ph": "X", "ts": started / 1000, "dur": duration, "tid": thread})


def _lane(thread: threading.Thread) -> int:
    """The place in THREADS, or the next ones for slots."""
    if thread.name.startswith(SLOT):
        return len(THREADS) + int(thread.name.removeprefix(SLOT))
    return int(thread is not threading.main_thread())


@contextlib.contextmanager
def timed(facts: dict, name: str):
    """A span that adds its seconds to `facts["time_<name>"]`."""
    started = time.perf_counter()
    with span(name):
        yield
    facts[f"time_{name}"] = facts.get(f"time_{name}", 0.0) + time.perf_counter() - started


class Timeline:
    """The spans of all ranks. As a context manager, it starts and ends recording."""

    def __init__(self, output_dir: str):
        self._path = os.path.join(output_dir, FILE)
        self._lanes: dict[int, int] = {}  # how many lanes of a rank have names

    def __enter__(self) -> "Timeline":
        _recording.set()
        return self

    def __exit__(self, *_error) -> None:
        _recording.clear()
        _spans.clear()

    def write(self) -> None:
        """Append what the ranks have noted since the last call (all-gather of objects over the world)."""
        mine = [_spans.pop(0) for _ in range(len(_spans))]  # the other thread may add some meanwhile
        events = []
        for rank, spans in enumerate(gather_objects(mine)):
            known = self._lanes.get(rank, 0)
            self._lanes[rank] = max(known, len(THREADS), *(1 + one["tid"] for one in spans))
            names = _names(rank, range(known, self._lanes[rank]))
            events += [{**one, "pid": rank} for one in names + spans]
        if dist.get_rank() == 0:
            append_events(self._path, events)


def _names(rank: int, lanes: range) -> list[dict]:
    """Events that give the names of a rank and of these lanes."""
    names = [(n, THREADS[n] if n < len(THREADS) else f"{SLOT}{n - len(THREADS)}") for n in lanes]
    found = [{"name": "thread_name", "ph": "M", "tid": n, "args": {"name": name}} for n, name in names]
    return [{"name": "process_name", "ph": "M", "args": {"name": f"rank {rank}"}}][: not lanes.start] + found


def append_events(path: str, events: list[dict]) -> None:
    """Add events, one a line, to the list in a file. A line that a kill has torn is left out."""
    text = ",\n".join(map(json.dumps, events))
    with open(path, "r+b" if os.path.exists(path) else "w+b") as file:
        file.seek(-min(len(END), file.seek(0, os.SEEK_END)), os.SEEK_END)
        if file.read() == END:
            size = file.tell() - len(END)
        else:
            file.seek(0)
            size = file.read().rfind(b"},\n") + 1
        file.truncate(size)
        file.seek(size)
        file.write((b",\n" if size else b"[\n") + text.encode() + END)
