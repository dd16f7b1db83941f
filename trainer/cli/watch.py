"""`watch RUN`: look at a running job in the terminal: curves, speed, memory, last samples, checkpoints.

The command only reads the files of the run. It can be started and ended at any time, on any machine that sees them.
"""

import argparse
import itertools
import os
import time

from trainer.cli.entry import run_command
from trainer.cli.run_rows import RunRows, describe, last_samples, read_rows
from trainer.errors import UserError

BARS = "▁▂▃▄▅▆▇█"
SHOWN = ("loss", "eval_loss", "grad_norm", "lr", "reward", "eval_reward", "response_length", "approx_kl", "entropy")
SHOWN += ("tokens_per_second", "mfu", "peak_memory_bytes", "step_time")
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


def view(run: RunRows, width: int, now: float):
    """What the screen shows, as a renderable of rich. `now` is the time in seconds since the epoch."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    facts = "   ".join(f"{name} {value}" for name, value in describe(run).items() if name != "versions")
    table = Table(box=None, expand=True, pad_edge=False)
    for name, options in {
        "metric": {},
        "first": {},
        "last": {},
        "lowest": {},
        "highest": {},
        "curve": {"ratio": 1},
    }.items():
        table.add_column(name, justify="left" if name in ("metric", "curve") else "right", no_wrap=True, **options)
    for key in SHOWN:
        values = run.series(key)[1]
        if values:
            cells = [f"{value:.5g}" for value in (values[0], values[-1], min(values), max(values))]
            table.add_row(key, *cells, sparkline(values, max(8, width - 62)))
    parts = [Text(facts), Text(progress(run, now), style="bold"), table]
    for sample in last_samples(run.folder, SHOWN_SAMPLES):
        text = f"{sample.get('prompt', '')} → {sample.get('response', '')}".replace("\n", " ")
        parts.append(Text(f"score {sample.get('score')}: {text}", overflow="ellipsis", no_wrap=True))
    parts.append(Text(f"checkpoints: {', '.join(checkpoints(run.folder)) or 'none'}"))
    return Panel(Group(*parts), title=run.name)


def progress(run: RunRows, now: float) -> str:
    """One line: how far the run is, what is left, and whether it still writes."""
    step, total = max(run.steps, default=0), run.start.get("total_steps")
    times = run.series("step_time")[1][-20:]
    mean = sum(times) / len(times) if times else 0.0
    line = f"step {step}" + (f" of {total}" if total else "")
    if run.events and run.events[-1]["event"] == "end":
        return f"{line}, ended"
    age = now - os.path.getmtime(os.path.join(run.folder, "metrics.jsonl"))
    if total and mean:
        line += f", {_duration((total - step) * mean)} left"
    line += f", last row {_duration(age)} ago"
    return line + (" (does it hang?)" if age > max(QUIET_SECONDS, 5 * mean) else "")


def _duration(seconds: float) -> str:
    seconds = max(0, round(seconds))
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds} s"


def checkpoints(folder: str) -> list[str]:
    """The names of the complete checkpoints, the oldest first."""
    root = os.path.join(folder, "checkpoints")
    names = [name for name in os.listdir(root) if not name.endswith(".tmp")] if os.path.isdir(root) else []
    return sorted(names, key=lambda name: (name.rpartition("_")[2].zfill(12), name))


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m trainer.cli.watch", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the --output_dir of a run")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="print one view and end")
    args = parser.parse_args(argv)
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise UserError("watch", "needs rich, which is not installed", "pip install rich") from None
    if args.interval <= 0:
        raise UserError("--interval", f"{args.interval:g}", "a number above 0")
    console = Console()
    shown = view(read_rows(args.run), console.width, time.time())
    if args.once:
        console.print(shown)
        return
    with Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(args.interval)
                live.update(view(read_rows(args.run), console.width, time.time()), refresh=True)
        except KeyboardInterrupt:
            return


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
