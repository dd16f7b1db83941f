"""`report RUN [RUN ...]`: one HTML file with the curves of one run or of several, to look at and to send.

The file needs no network and no other file. With several runs, each chart holds all of them, and a second chart shows
the difference of each loss from that of the first run.
"""

import argparse
import html
import io
import os

from trainer.cli.entry import run_command
from trainer.cli.parting import gradient_differences, heat_map, parting_rows
from trainer.cli.run_rows import RunRows, describe, last_samples, read_rows
from trainer.errors import UserError

FIRST = ("loss", "eval_loss", "reward", "eval_reward", "grad_norm", "lr", "tokens_per_second", "peak_memory_bytes")
FIRST_OF_RL = ("kl", "approx_kl", "response_length", "truncated_fraction", "entropy", "clip_fraction", "value_loss")
NOT_SHOWN = ("epoch", "tokens", "tokens_seen", "rollout")
SHOWN_SAMPLES = 12
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem; color: #1b1f24; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.charts svg { width: 100%; height: auto; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; } pre { white-space: pre-wrap; margin: 0; }
th, td { border: 1px solid #d0d7de; padding: 0.25rem 0.5rem; text-align: left; vertical-align: top; }
"""


def page(runs: list[RunRows]) -> str:
    """The HTML text of the report."""
    names = [run.name for run in runs]
    parts = [f"<h1>{html.escape(' / '.join(names))}</h1>", _facts_table(runs), "<div class=charts>"]
    shown = FIRST + FIRST_OF_RL * any(run.series("reward")[1] for run in runs)
    parts += [chart(runs, key) for key in _keys(runs, shown) if key in shown]
    if len(runs) > 1:
        parts.insert(3, difference_chart(runs))
    further = [key for key in _keys(runs, shown) if key not in shown]
    parts.append("</div>")
    if further:
        parts += ["<details><summary>All other metrics</summary><div class=charts>"]
        parts += [*(chart(runs, key) for key in further), "</div></details>"]
    if len(runs) > 1:
        differences = gradient_differences(runs)
        parts += [f"<h2>Where they part from {html.escape(names[0])}</h2>", _table(parting_rows(runs, differences))]
        parts += [heat_map(differences, names[0])] if differences else []
        parts += ["<h2>Flags that differ</h2>", _flags_table(runs)]
    parts += [_samples(run) for run in runs]
    head = (
        f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{html.escape(names[0])}</title>"
    )
    return f"<!doctype html><html lang=en><head>{head}<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"


def _keys(runs: list[RunRows], shown: tuple[str, ...]) -> list[str]:
    """Metrics to draw: those of `shown` first, then others that change, by name."""
    found = list(dict.fromkeys(key for run in runs for key in run.keys() if key not in NOT_SHOWN))  # noqa: SIM118
    changing = [key for key in found if len({value for run in runs for value in run.series(key)[1]}) > 1]
    first = [key for key in shown if key in found]
    return first + sorted(key for key in changing if key not in first)


def chart(runs: list[RunRows], key: str) -> str:
    """The curves of one metric as SVG."""
    return _draw(key, [(run.name, *run.series(key)) for run in runs])


def difference_chart(runs: list[RunRows]) -> str:
    """The relative difference of each loss from the first run's, at the steps that both have."""
    curves, reference = [], dict(zip(*runs[0].series("loss"), strict=True))
    for run in runs[1:]:
        pairs = [(step, loss) for step, loss in zip(*run.series("loss"), strict=True) if reference.get(step)]
        steps = [step for step, _ in pairs]
        curves.append((run.name, steps, [abs(loss / reference[step] - 1) for step, loss in pairs]))
    return _draw(f"relative difference of the loss from {runs[0].name}", curves, is_log=True)


def _draw(title: str, curves: list[tuple[str, list[int], list[float]]], is_log: bool = False) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):  # text stays text; the same bytes each time
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for name, steps, values in curves:
            if any(values) or not is_log:  # a logarithmic axis cannot show 0
                axes.plot(steps, values, label=name, linewidth=1.2, marker="." if len(steps) < 40 else None)
        axes.set_title(title, fontsize=10)
        axes.locator_params(axis="x", integer=True)
        if is_log and axes.lines:
            axes.set_yscale("log")
        elif is_log:
            axes.text(0.5, 0.5, "equal at every step", ha="center", transform=axes.transAxes)
        axes.grid(alpha=0.3)
        if len(curves) > 1 and axes.lines:
            axes.legend(fontsize=8)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return f"<figure style='margin:0'>{text.getvalue()[text.getvalue().index('<svg') :]}</figure>"


def _facts_table(runs: list[RunRows]) -> str:
    facts = [describe(run) | _ends(run) for run in runs]
    rows = [["", *(run.name for run in runs)]]
    rows += [[name, *(fact.get(name, "") for fact in facts)] for name in dict.fromkeys(key for f in facts for key in f)]
    return _table(rows)


def _ends(run: RunRows) -> dict[str, str]:
    total = run.start.get("total_steps")
    facts = {"steps": f"{max(run.steps, default=0)}" + (f" of {total}" if total else "")}
    for key in ("loss", "eval_loss", "reward"):
        values = run.series(key)[1]
        if values:
            facts[f"{key}, first and last"] = f"{values[0]:.5g}, {values[-1]:.5g}"
    seconds = sum(run.series("step_time")[1])
    return facts | ({"hours of steps": f"{seconds / 3600:.3g}"} if seconds else {})


def _flags_table(runs: list[RunRows]) -> str:
    configs = [run.start.get("config", {}) for run in runs]
    names = dict.fromkeys(key for config in configs for key in config)
    rows = [[name, *(str(config.get(name)) for config in configs)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return _table([["flag", *(run.name for run in runs)], *rows]) if rows else "<p>None.</p>"


def _samples(run: RunRows) -> str:
    samples = last_samples(run.folder, SHOWN_SAMPLES)
    if not samples:
        return ""
    rows = [["rollout", "score", "prompt", "response"]]
    rows += [[str(sample.get(name, "")) for name in rows[0]] for sample in samples]
    return f"<h2>Last samples of {html.escape(run.name)}</h2>{_table(rows)}"


def _table(rows: list[list[str]]) -> str:
    head, *body = [[f"<pre>{html.escape(cell)}</pre>" for cell in row] for row in rows]
    lines = [
        "".join(f"<th>{cell}</th>" for cell in head),
        *("".join(f"<td>{cell}</td>" for cell in row) for row in body),
    ]
    return "<div class=scroll><table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m trainer.cli.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the --output_dir of a run, or its metrics.jsonl")
    parser.add_argument("--output", metavar="HTML", help="the file to write (default: report.html in the first RUN)")
    args = parser.parse_args(argv)
    runs = [read_rows(folder) for folder in args.runs]
    for number, one in enumerate(runs):
        if not one.steps:
            raise UserError("RUN", f"{one.folder} has no step yet", "a run that has trained")
        if [other.name for other in runs].count(one.name) > 1:
            one.name = f"{one.name} ({number + 1})"
    output = args.output or os.path.join(runs[0].folder, "report.html")
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(page(runs))
    except OSError as error:
        raise UserError("--output", f"{output} cannot be written: {error.strerror}") from None
    print(f"report written to {output}")


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
