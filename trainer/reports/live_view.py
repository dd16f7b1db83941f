"""`watch RUN`: look at a running job in the terminal: curves, speed, memory, last samples, checkpoints.

The command only reads the files of the run. Start and end it at any time, on any machine that sees them.
"""

import itertools
import os
import sys
import time

from trainer.errors import UserError
from trainer.flags.names.word_parser import ReadingParser
from trainer.metrics import counted
from trainer.reports.run_rows import RunRows, describe, is_number, last_samples, read_rows

BARS = "▁▂▃▄▅▆▇█"
SHOWN = ("loss", "eval_loss", "grad_norm", "lr", "reward", "eval_reward", "response_length", "approx_kl", "entropy")
SHOWN += ("tokens_per_second", "mfu", "step_time")
GIB = 2**30
SHOWN_SAMPLES = 3
QUIET_SECONDS = 60  # without a new row for so long, and longer than 5 steps, the run may hang


def sparkline(values: list[float], width: int) -> str:
    """A curve of `width` characters. Each shows the mean of its share of the values."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


class LastRow:
    """The age of a run's last row, by a clock that nobody sets. Only the first look needs the time of the file."""

    def __init__(self, folder: str):
        self._path, self._seen, self._since = os.path.join(folder, "metrics.jsonl"), None, 0.0

    def age(self) -> float:
        """Seconds since the file has changed, or 0 without a file."""
        try:
            facts = os.stat(self._path)
        except OSError:
            return 0.0
        if (facts.st_mtime_ns, facts.st_size) != self._seen:
            before = max(0.0, time.time() - facts.st_mtime) if self._seen is None else 0.0
            self._seen, self._since = (facts.st_mtime_ns, facts.st_size), time.monotonic() - before
        return time.monotonic() - self._since


def view(run: RunRows, width: int, age: float):
    """The content of the screen, for rich. `age`: seconds since the last row."""
    # rich is an optional package
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    class Curve:
        """A sparkline as wide as its column."""

        def __init__(self, values: list[float]):
            self.values = values

        def __rich_console__(self, console, options):
            yield Text(sparkline(self.values, options.max_width), no_wrap=True)

        def __rich_measure__(self, console, options):
            from rich.measure import Measurement  # an optional package

            return Measurement(8, options.max_width)

    facts = "   ".join(printable(f"{name} {value}") for name, value in describe(run).items() if name != "versions")
    table = Table(box=None, expand=True, pad_edge=False)
    names = ("first", "last", "lowest", "highest")[: 4 if width >= 80 else 2]
    for name in ("metric", *names):
        table.add_column(name, justify="left" if name == "metric" else "right", no_wrap=True)
    table.add_column("curve", ratio=1)
    for key in SHOWN:
        values = run.series(key)[1]
        if values:
            cells = [f"{value:.4g}" for value in (values[0], values[-1], min(values), max(values))]
            table.add_row(key, *cells[: len(names)], Curve(values))
    state = progress(run, age)
    parts = [Text(facts), Text(state, style="bold red" if "hang" in state else "bold"), table]
    parts.append(Text(memory(run)))
    for sample in last_samples(run.folder, SHOWN_SAMPLES):
        prompt, response = (printable(str(sample.get(name, ""))) for name in ("prompt", "response"))
        parts.append(Text(f"prompt: {prompt}", overflow="ellipsis", no_wrap=True))
        parts.append(
            Text(f"  score {printable(str(sample.get('score')))}: {response}", overflow="ellipsis", no_wrap=True)
        )
    parts.append(Text(f"checkpoints: {printable(', '.join(checkpoints(run.folder))) or 'none'}"))
    return Panel(Group(*parts), title=Text(printable(run.name), style="bold"))


def printable(text: str) -> str:
    """One line without control characters: a model may write some that move the cursor or clear the screen."""
    return "".join(char if char.isprintable() else "·" for char in " ".join(text.split()))


def memory(run: RunRows) -> str:
    """One line: the peak memory of rank 0, or of each rank in the last row that has it (the 8 largest)."""
    own, rows = run.series("peak_memory_bytes")[1], [row for _, row in sorted(run.steps.items())]
    found = (row.get("peak_memory_per_rank") for row in reversed(rows))
    ranks = next((each for each in found if isinstance(each, list) and all(map(is_number, each))), [])
    if not own:
        return "peak memory: not known yet"
    if len(ranks) < 2:
        return f"peak memory: {own[-1] / GIB:.2f} GiB"
    shown = sorted(range(len(ranks)), key=lambda rank: -ranks[rank])[:8]
    words = ", ".join(f"rank {rank} {ranks[rank] / GIB:.2f}" for rank in sorted(shown))
    most = f", the largest 8 of {counted(len(ranks), 'rank')}" if len(ranks) > 8 else ""
    return f"peak memory in GiB: {words}{most}"


def progress(run: RunRows, age: float) -> str:
    """One line: how far the run is, how long it needs, and whether it still writes."""
    step, total = max(run.steps, default=0), run.start.get("total_steps")
    times = run.series("step_time")[1][-20:]
    mean = sum(times) / len(times) if times else 0.0
    line = f"step {step}" + (f" of {total}" if total else "")
    last = run.events[-1] if run.events else {"event": ""}
    if last["event"] == "end":
        return f"{line}, ended"
    if last["event"] == "stop":
        return f"{line}, {printable(str(last.get('reason')))}"
    if total and mean:
        line += f", {_duration((total - step) * mean)} left"
    line += f", last row {_duration(age)} ago"
    return line + (" (does it hang?)" if age > max(QUIET_SECONDS, 5 * mean) else "")


def _duration(seconds: float) -> str:
    seconds = round(min(max(0.0, seconds), 1e12))  # files of others hold any number
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds} s"


def checkpoints(folder: str) -> list[str]:
    """The names of the complete checkpoints, the oldest first."""
    root = os.path.join(folder, "checkpoints")
    names = [name for name in os.listdir(root) if not name.endswith(".tmp")] if os.path.isdir(root) else []
    return sorted(names, key=lambda name: (name.rpartition("_")[2].zfill(12), name))


def run(argv: list[str]) -> None:
    parser = ReadingParser("watch", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the --output_dir of a run")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="print one view and end")
    args = parser.parse_args(argv)
    try:
        # an optional package
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise UserError("watch", "needs rich, which is not installed", "pip install rich") from None
    if args.interval <= 0:
        raise UserError("--interval", f"{args.interval:g}", "a number above 0")
    console, last_row = Console(file=getattr(sys.stdout, "unchecked", None)), LastRow(args.run)
    shown = view(read_rows(args.run), console.width, last_row.age())
    if args.once:
        console.print(shown)
        return
    with Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(args.interval)
                live.update(view(read_rows(args.run), console.width, last_row.age()), refresh=True)
        except KeyboardInterrupt:
            return
