"""Write a comparison as text tables, as Markdown, and as plain dictionaries for JSON."""

import json
import math
from dataclasses import asdict
from pathlib import Path

from trainer.compare.runs.parity import MIN_STEPS_FOR_BIAS, Comparison, Row
from trainer.errors import UserError
from trainer.metrics import counted


def comparison_text(comparison: Comparison, max_rows: int) -> str:
    """The step table, the largest differences, the bias and the verdict."""
    reference, name, thresholds = comparison.reference, comparison.name, comparison.thresholds
    loss, grad_norm = comparison.worst_loss, comparison.worst_grad_norm
    lines = [
        f"{name} against {reference}, {counted(len(comparison.rows), 'step')}",
        *_step_table(comparison, max_rows),
        "",
    ]
    lines.append(_largest("loss", abs(loss.rel_loss), f"at step {loss.step}", thresholds.loss))
    if grad_norm:
        rel, where = abs(grad_norm.rel_grad_norm), f"at step {grad_norm.step}"
        lines.append(_largest("grad norm", rel, where, thresholds.grad_norm))
    else:
        lines.append("grad norm: not in both logs")
    for kind, worst in (("gradient", comparison.worst_gradient), ("weight", comparison.worst_weight)):
        if worst:
            lines.append(_largest(kind, worst["rel"], f"in {worst['name']}", thresholds.dump))
    for tensor, size in comparison.noise.items():
        lines.append(f"noise, not judged: the gradient of {tensor}, {size:.1e} of the norm of all gradients")
    lines += [f"bias: {bias_text(comparison)}", f"batch_hash: {_batch_text(comparison)}", verdict_text(comparison)]
    return "\n".join(lines)


def verdict_text(comparison: Comparison) -> str:
    return (
        f"PASS {comparison.name}" if comparison.passed else f"FAIL {comparison.name}: {'; '.join(comparison.failures)}"
    )


def bias_text(comparison: Comparison) -> str:
    mean = f"mean signed relative difference of the loss {comparison.mean_signed_rel_loss:+.3e}"
    if comparison.biased is None:
        return f"{mean}, not tested (needs {MIN_STEPS_FOR_BIAS} steps with finite differences)"
    return f"{mean}, " + ("BIASED (over 3 standard errors)" if comparison.biased else "not biased")


def _largest(kind: str, rel: float, where: str, threshold: float | None) -> str:
    allowed = "not judged" if threshold is None else f"threshold {threshold:g}"
    return f"largest relative difference of {kind}: {rel:.3e} {where} ({allowed})"


def _batch_text(comparison: Comparison) -> str:
    return {True: "the same at every step", False: "DIFFERENT DATA", None: "not in both logs"}[
        comparison.batch_hash_equal
    ]


def _step_table(comparison: Comparison, max_rows: int) -> list[str]:
    heads = ("step", "reference loss", "loss", "rel diff", "reference grad norm", "grad norm", "rel diff")
    widths = [max(len(head), 13) for head in heads]
    lines = ["  ".join(head.rjust(width) for head, width in zip(heads, widths, strict=True))]
    last = None
    for index in _shown(comparison, max_rows):
        if last is not None and index != last + 1:
            lines.append("...".rjust(widths[0]))
        cells = _cells(comparison.rows[index])
        lines.append("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
        last = index
    return lines


def _cells(row: Row) -> list[str]:
    loss = (f"{row.reference_loss:.9g}", f"{row.loss:.9g}", f"{row.rel_loss:+.2e}")
    norms = [(row.reference_grad_norm, ".9g"), (row.grad_norm, ".9g"), (row.rel_grad_norm, "+.2e")]
    return [str(row.step), *loss, *("-" if value is None else f"{value:{form}}" for value, form in norms)]


def _shown(comparison: Comparison, max_rows: int) -> list[int]:
    """Indices of the rows to print: all, or the largest differences and as many first and last rows as fit."""
    rows = comparison.rows
    if len(rows) <= max_rows:
        return list(range(len(rows)))
    shown = {rows.index(row) for row in (comparison.worst_loss, comparison.worst_grad_norm) if row}
    indices = range(len(rows))
    from_both_ends = (index for pair in zip(indices, reversed(indices), strict=True) for index in pair)
    for index in from_both_ends:
        if len(shown) >= max_rows:
            break
        shown.add(index)
    return sorted(shown)


def comparison_dict(comparison: Comparison) -> dict:
    """All results of one comparison, for JSON."""
    rows = [asdict(row) for row in comparison.rows]
    verdict = {"passed": comparison.passed, "failures": comparison.failures}
    return {"name": comparison.name, **measured(comparison), **verdict, "rows": rows}


AS_THEY_ARE = ("mean_signed_rel_loss", "biased", "worst_gradient", "worst_weight", "noise", "batch_hash_equal")
MEASURED = ("steps", "max_rel_loss", "max_rel_loss_step", "max_rel_grad_norm", "max_rel_grad_norm_step", *AS_THEY_ARE)


def measured(comparison: Comparison) -> dict:
    """The numbers of a comparison under the names of MEASURED, without rows and verdict."""
    loss, grad_norm = comparison.worst_loss, comparison.worst_grad_norm
    norms = (abs(grad_norm.rel_grad_norm), grad_norm.step) if grad_norm else (None, None)
    found = (len(comparison.rows), abs(loss.rel_loss), loss.step, *norms)
    return dict(zip(MEASURED, (*found, *(getattr(comparison, name) for name in AS_THEY_ARE)), strict=True))


def write_json(path: str | Path, content: dict) -> None:
    write_text(path, json.dumps(_json_safe(content), indent=2, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(str(path), f"cannot be written: {error.strerror}") from None


MARKERS = ("<!-- parity table: written by compare_backends.py -->", "<!-- end of the parity table -->")


def check_markers(path: str) -> None:
    """Raise UserError unless the file holds the two marker lines of the table, in order."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError("--update_table", f"cannot read {path}", "a text file") from None
    begin, end = (text.find(marker) for marker in MARKERS)
    if not 0 <= begin < end:
        raise UserError("--update_table", f"{path} lacks the markers", " and ".join(MARKERS))


def write_between_markers(path: str, table: str) -> None:
    """Replace the text between the two markers of a file."""
    head, rest = Path(path).read_text(encoding="utf-8").split(MARKERS[0], 1)
    tail = rest.split(MARKERS[1], 1)[1]
    write_text(path, f"{head}{MARKERS[0]}\n\n{table}\n{MARKERS[1]}{tail}")


def _json_safe(value):
    """Turn infinity and nan into strings. JSON has no such numbers, and a string stays visible."""
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def matrix_markdown(report: dict) -> str:
    """The Markdown table of a whole matrix. `report` is the dictionary of report.json."""
    configurations = report["configurations"]
    num_passed = sum(entry["passed"] for entry in configurations)
    run = f"{counted(report['reference']['steps'], 'step')} of `{' '.join(report['train_args'])}`"
    lines = [
        f"**{num_passed} of {len(configurations)} configurations pass** against the plain single-process loop, {run}.",
        "",
        *(_thresholds_line(dtype, thresholds) for dtype, thresholds in report["thresholds"].items()),
        "",
        "| configuration | ranks | loss | step | grad norm | worst gradient | worst weight | same data | s | result |",
        "|---|---:|---:|---:|---:|---:|---:|---|---:|---|",
        *(_markdown_row(entry) for entry in configurations),
    ]
    return "\n".join(lines) + "\n"


def _thresholds_line(dtype: str, thresholds: dict) -> str:
    named = (("loss", "loss"), ("grad_norm", "grad norm"), ("dump", "gradients and weights"))
    parts = [f"{label} {thresholds[key]:g}" for key, label in named if thresholds[key] is not None]
    return f"Largest relative differences; allowed in {dtype}: {', '.join(parts)}."


def _markdown_row(entry: dict) -> str:
    cells = [
        entry["name"],
        str(entry["nproc"]),
        _number(entry["max_rel_loss"]),
        _or_dash(entry["max_rel_loss_step"]),
        _number(entry["max_rel_grad_norm"]),
        _worst(entry["worst_gradient"]),
        _worst(entry["worst_weight"]),
        {True: "yes", False: "**no**", None: "-"}[entry["batch_hash_equal"]],
        f"{entry['seconds']:.0f}",
        "pass" if entry["passed"] else f"**FAIL** {entry['error']}".replace("|", "\\|"),
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _worst(worst: dict | None) -> str:
    return "-" if worst is None else f"{worst['rel']:.1e} `{worst['name']}`"


def configuration_line(entry: dict) -> str:
    """One line for the terminal when a configuration ends."""
    worst = [f"{kind} {entry[f'worst_{kind}']['rel']:.1e}" for kind in ("gradient", "weight") if entry[f"worst_{kind}"]]
    parts = [f"loss {_number(entry['max_rel_loss'])}", f"grad norm {_number(entry['max_rel_grad_norm'])}", *worst]
    head = f"{'PASS' if entry['passed'] else 'FAIL'} {entry['name']} ({entry['seconds']:.0f} s): "
    return head + (", ".join(parts) if entry["passed"] else entry["error"])
