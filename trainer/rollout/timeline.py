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
        thread = int(threading.current_thread() is not threading.main_thread())
        duration = (time.perf_counter_ns() - begin) / 1000
        _spans.append({"name": name, "ph": "X", "ts": started / 1000, "dur": duration, "tid": thread})


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
        self._path, self._named = os.path.join(output_dir, FILE), False

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
            events += [{**one, "pid": rank} for one in ([] if self._named else _names(rank)) + spans]
        self._named = True
        if dist.get_rank() == 0:
            append_events(self._path, events)


def _names(rank: int) -> list[dict]:
    """Events that give the names of a rank and of its threads."""
    threads = [{"name": "thread_name", "ph": "M", "tid": n, "args": {"name": name}} for n, name in enumerate(THREADS)]
    return [{"name": "process_name", "ph": "M", "args": {"name": f"rank {rank}"}}, *threads]


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
