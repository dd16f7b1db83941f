"""`report RUN [RUN ...]`: one HTML file with the curves of one run or of several, to look at and to send.

The file needs no network and no other file. With several runs, each chart shows all of them. A second chart shows how
much each loss differs from the first run's.
"""

import html
import io
import os

import matplotlib as mpl
from matplotlib.figure import Figure

from trainer.errors import UserError
from trainer.flags.names.word_parser import ReadingParser
from trainer.metrics import counted
from trainer.reports.run_differences import (
    FLOOR,
    LOSS_LIMITS,
    NORM_LIMIT,
    difference_rows,
    gradient_differences,
    heat_map,
    loss_limit,
    relative_differences,
)
from trainer.reports.run_rows import RunRows, describe, is_number, last_samples, read_rows

FIRST = ("loss", "eval_loss", "reward", "eval_reward", "grad_norm", "lr", "tokens_per_second", "peak_memory_bytes")
FIRST_OF_RL = ("kl", "approx_kl", "response_length", "truncated_fraction", "entropy", "clip_fraction", "value_loss")
NOT_SHOWN = ("epoch", "tokens", "tokens_seen", "rollout")
SHOWN_SAMPLES = 12
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
UNITS = {"peak_memory_bytes": ("peak_memory, GiB", 2**30)}  # how a metric is shown: title, divisor
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 0.75rem; color: #1b1f24; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0.75rem; }
figure { border: 1px solid #d0d7de; border-radius: 6px; margin: 0; padding: 0.4rem; min-width: 0; }
figcaption { font-weight: 600; font-size: 0.95rem; } figure svg { width: 100%; height: auto; }
.legend { position: sticky; top: 0; background: #fff; padding: 0.4rem 0; margin: 0.5rem 0; z-index: 2; }
.legend span { display: inline-block; margin-right: 1rem; } .legend i { display: inline-block; width: 1.1rem; height: 0.25rem;
vertical-align: middle; margin-right: 0.35rem; }
.scroll { overflow-x: auto; margin-bottom: 0.75rem; } .tall { overflow-y: auto; max-height: 34rem; } summary { margin: 1rem 0; cursor: pointer; }
table { border-collapse: collapse; font-size: 0.85rem; } pre { white-space: pre-wrap; margin: 0;
font-family: ui-monospace, monospace; } td pre { min-width: 7ch; max-width: 60ch; overflow-wrap: break-word; }
td[colspan] pre { max-width: calc(100vw - 9rem); }
tr > th:first-child { position: sticky; left: 0; background: #fff; }
th, td { border: 1px solid #d0d7de; padding: 0.25rem 0.5rem; text-align: left; vertical-align: top; }
.heat td { text-align: right; padding: 0.1rem 0.4rem; } .heat th { font-weight: 400; }
.heat th pre { overflow-wrap: anywhere; max-width: min(26rem, 42vw); } .heat tr:first-child th { position: sticky; top: 0; background: #fff; }
"""


def page(runs: list[RunRows]) -> str:
    """The HTML text of the report."""
    names, several = [run.name for run in runs], len(runs) > 1
    parts = [f"<h1>{html.escape(' / '.join(names))}</h1>", _facts_table(runs)]
    differences = gradient_differences(runs) if several else {}
    if several:
        heading = f"<h2>Where they differ from {html.escape(names[0])}</h2>"
        parts += [heading, _table(difference_rows(runs, differences)), _legend(names)]
    shown = FIRST + FIRST_OF_RL * any(run.series("reward")[1] for run in runs)
    charts = [chart(runs, key) for key in _keys(runs, shown) if key in shown]
    charts[1:1] = [difference_chart(runs, key) for key in ("loss", "grad_norm") if several]  # next to the losses
    parts += ["<div class=charts>", *charts, "</div>"]
    further = [key for key in _keys(runs, shown) if key not in shown]
    if further:
        parts += ["<details><summary>All other metrics</summary><div class=charts>"]
        parts += [*(chart(runs, key) for key in further), "</div></details>"]
    if differences:
        parts += [f"<h2>Gradients of step 1, relative difference from {html.escape(names[0])}</h2>"]
        parts += [heat_map(differences)]
    if several:
        parts += ["<h2>Flags that differ</h2>", _flags_table(runs)]
    parts += [_samples(run) for run in runs]
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    head += f"<title>{html.escape(names[0])}</title><link rel=icon href='data:,'>"  # else a browser asks for an icon
    return f"<!doctype html><html lang=en><head>{head}<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"


def _legend(names: list[str]) -> str:
    spans = (
        f"<span><i style='background:{COLOURS[number % len(COLOURS)]}'></i>{html.escape(name)}</span>"
        for number, name in enumerate(names)
    )
    return f"<p class=legend>{''.join(spans)}</p>"


def _keys(runs: list[RunRows], shown: tuple[str, ...]) -> list[str]:
    """Metrics to draw: first those in `shown`, then others that change, by name."""
    found = list(dict.fromkeys(key for run in runs for key in run.keys() if key not in NOT_SHOWN))  # noqa: SIM118
    changing = [key for key in found if len({value for run in runs for value in run.series(key)[1]}) > 1]
    first = [key for key in shown if key in found]
    return first + sorted(key for key in changing if key not in first)


def chart(runs: list[RunRows], key: str) -> str:
    """The curves of one metric as SVG."""
    title, unit = UNITS.get(key, (key, 1))
    curves = [(steps, [value / unit for value in values]) for steps, values in (run.series(key) for run in runs)]
    return _draw(title, curves)


def difference_chart(runs: list[RunRows], key: str) -> str:
    """The relative difference of a metric from the first run's, at common steps. Dashed: the allowed difference."""
    curves = [([], [])]
    for run in runs[1:]:
        found = relative_differences(runs[0], run, key)
        curves.append((list(found), [max(value, FLOOR) for value in found.values()] if any(found.values()) else []))
    limits = {loss_limit(runs[0], run) for run in runs[1:]}
    if key == "grad_norm":  # judged in fp32 only
        limits = {NORM_LIMIT} if LOSS_LIMITS["fp32"] in limits else set()
    return _draw(f"relative difference of {key} from {runs[0].name}", curves, limits)


def _draw(title: str, curves: list[tuple[list[int], list[float]]], limits: set[float] | None = None) -> str:
    """A curve for each run, in the run's colour. `limits` are dashed lines on a logarithmic axis."""
    # text stays text, and the same report has the same bytes
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure = Figure(figsize=(4.8, 2.7), layout="constrained")
        axes = figure.add_subplot()
        for number, (steps, values) in enumerate(curves):
            if values:
                colour, marker = COLOURS[number % len(COLOURS)], "." if len(steps) < 40 else None
                axes.plot(steps, values, color=colour, linewidth=1.3, marker=marker)
        axes.locator_params(axis="x", integer=True)
        if limits is not None and axes.lines:
            axes.set_yscale("log")
            for limit in limits:
                axes.axhline(limit, color="black", linestyle="--", linewidth=0.8)
        elif limits is not None:
            axes.text(0.5, 0.5, "equal at every step", ha="center", transform=axes.transAxes)
        axes.grid(alpha=0.3)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    drawn = text.getvalue()[text.getvalue().index("<svg") :]
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{drawn}</figure>"


def _facts_table(runs: list[RunRows]) -> str:
    facts = [describe(run) | _ends(run) for run in runs]
    rows = [["", *(run.name for run in runs)]]
    rows += [[name, *(fact.get(name, "") for fact in facts)] for name in dict.fromkeys(key for f in facts for key in f)]
    return _table(rows, joined=True)


def _ends(run: RunRows) -> dict[str, str]:
    total = run.start.get("total_steps")
    facts = {"steps": f"{max(run.steps, default=0)}" + (f" of {total}" if total else "")}
    for key in ("loss", "eval_loss", "reward"):
        values = run.series(key)[1]
        if values:
            facts[f"{key}, first and last"] = f"{values[0]:.5g}, {values[-1]:.5g}"
    broken = [step for step, row in sorted(run.steps.items()) if "loss" in row and not is_number(row["loss"])]
    if broken:
        facts["loss that is no number"] = f"from step {broken[0]} on, {counted(len(broken), 'step')}"
    resumes = [str(event.get("step", "?")) for event in run.events if event["event"] == "resume"]
    if resumes:
        facts["resumed after step"] = ", ".join(resumes)
    seconds = sum(run.series("step_time")[1])
    return facts | ({"hours of steps": f"{seconds / 3600:.3g}"} if seconds else {})


def _flags_table(runs: list[RunRows]) -> str:
    configs = [(run.start.get("config") or {}) for run in runs]
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
    return f"<h2>Last samples of {html.escape(run.name)}</h2>{_table(rows, tall=True)}"


def _table(rows: list[list[str]], joined: bool = False, tall: bool = False) -> str:
    """An HTML table. `joined`: a value that all columns share is written once. `tall`: it may scroll in its own box."""
    lines = []
    for number, (first, *rest) in enumerate(rows):
        kind, span = ("th" if number == 0 else "td"), ""
        if joined and number and len(rest) > 1 and len(set(rest)) == 1:
            rest, span = rest[:1], f" colspan={len(rest)}"
        cells = [f"<th><pre>{html.escape(first)}</pre></th>"]
        cells += [f"<{kind}{span}><pre>{html.escape(cell)}</pre></{kind}>" for cell in rest]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class='scroll{' tall' * tall}'><table>{''.join(lines)}</table></div>"


def run(argv: list[str]) -> None:
    parser = ReadingParser("report", description=__doc__)
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
