"""Judge a finished run of another trainer by the plain loop: losses, gradient norms, final weights, tokens, evaluation.

The plain loop has one process, one sample at a time, fp32, AdamW, and the mean over all tokens of a global batch.
"""

import json
import math
from decimal import Decimal
from functools import partial
from pathlib import Path

import torch
from cases import steps_of, trained, weights_of
from methods import CHOICES, plain_method_curve
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trainer.compare.other_trainers.plain_reference import MISTAKES, read_samples
from trainer.compare.runs.plain_loop import load_plain_model, plain_step, token_losses
from trainer.metrics import counted

LOSS_LIMIT, NORM_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-4, 1e-3


def with_line_break(sample: dict) -> dict:
    """The loss of a turn also covers the line break behind its end."""
    mask = sample["loss_mask"]
    return {**sample, "loss_mask": [int(bit or (place and mask[place - 1])) for place, bit in enumerate(mask)]}


def without_last_line_break(sample: dict) -> dict:
    """As with_line_break, but not behind the last turn."""
    longer = with_line_break(sample)["loss_mask"]
    return {**sample, "loss_mask": [*longer[:-1], sample["loss_mask"][-1]]}


# what a trainer may choose, and says in its docs: (name, masks, weights of samples by micro-batch)
CONVENTIONS = (
    ("the line break behind each turn's end has a loss", with_line_break, None),
    ("the line break between turns has a loss", without_last_line_break, None),
)
MEANS = [(mistake.name, None, mistake.weights) for mistake in MISTAKES if mistake.weights]


def plain_curve(inputs: Path, condition: dict, mask=None, weights=None) -> tuple[list[tuple[float, float]], dict, dict]:
    """((loss, gradient norm) of each step, the first weights, the final weights)."""
    model, samples = load_plain_model(str(inputs / "model"), "cpu"), read_samples(str(inputs / "rows_tokens.jsonl"))
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    if condition.get("lora"):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, inputs / "adapter", is_trainable=True)
    samples = [mask(sample) for sample in samples] if mask else samples
    batches = [[samples[row] for row in rows] for rows in steps_of(condition)]
    curve = trained(model, batches, lambda batch: plain_step(model, batch, weights_of(batch, condition, weights)))
    if condition.get("lora"):
        model = model.merge_and_unload()
    return curve, first, {name: p.detach() for name, p in model.named_parameters()}


@torch.no_grad()
def plain_evaluations(model_folder: Path, samples: list[dict], size: int = 4) -> dict[str, float]:
    """The mean loss over all tokens, and what two known mistakes give with batches of `size` rows."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    losses = [token_losses(model, sample) for sample in samples]
    batches = [losses[start : start + size] for start in range(0, len(losses), size)]
    means = [torch.cat(batch).mean().item() for batch in batches]
    return {
        "the mean over all tokens": torch.cat(losses).mean().item(),
        "the mean of batch means, weighted by rows": sum(len(b) * m for b, m in zip(batches, means)) / len(losses),
        "the mean of batch means": sum(means) / len(means),
    }


def read_log(output: Path) -> list[dict]:
    """The rows of the trainer's own log, in the HF Trainer's names."""
    if (output / "log.json").exists():
        return json.loads((output / "log.json").read_text())
    states = sorted(output.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(states[-1].read_text())["log_history"]


def saved_weights(output: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted((output / "model").glob("*.safetensors")):
        found |= load_file(path)
    return found


def rounding(values: list[float]) -> float:
    """Half of the last decimal that the values of a log show: 5e-5 for 3.1416; 0 for full floats."""
    decimals = max(-Decimal(repr(value)).as_tuple().exponent for value in values if math.isfinite(value))
    return 0.5 * 10**-decimals if decimals < 6 else 0.0


def distance(value: float, expected: float, allowed: float) -> float:
    """The relative difference beyond the rounding `allowed`; infinite for a value that is not finite."""
    return max(abs(value - expected) - allowed, 0.0) / abs(expected) if math.isfinite(value) else math.inf


def distances(log: list[dict], curve: list[tuple[float, float]], exact: list | None = None) -> dict[str, float]:
    """Worst relative differences of losses and gradient norms over the steps of a log.

    A log's own rounding is allowed. `exact` is the curve in fp64: the rounding of the plain loop at each step is allowed, too.
    AdamW widens the rounding of gradients near 0, so that the plain loop itself may be beyond the limits after some steps.
    """
    found = {}
    for place, (name, key) in enumerate((("loss", "loss"), ("norm", "grad_norm"))):
        allowed = rounding([row[key] for row in log])
        found[name] = max(
            distance(row[key], plain[place], allowed + abs(plain[place] - right[place]))
            for row, plain, right in zip(log, curve, exact or curve, strict=False)
        )
    return found


def compare(log: list[dict], theirs: dict, curve, first: dict, final: dict, exact: list | None = None) -> dict:
    """Worst relative differences of losses, gradient norms and final weights."""
    moved = math.sqrt(sum((final[name] - first[name]).square().sum().item() for name in final))
    away = math.sqrt(sum((theirs[name].float() - final[name]).square().sum().item() for name in final))
    return {**distances(log, curve, exact), "weights": away / moved}


def is_equal(found: dict) -> bool:
    limits = {"loss": LOSS_LIMIT, "norm": NORM_LIMIT, "weights": WEIGHT_LIMIT}
    return all(found[name] <= limits[name] for name in limits.keys() & found.keys())


def compared(log: list[dict], theirs: dict, condition: dict, run) -> dict:
    """`compare` with a plain loop. One of pairs or rollouts that is slightly off is run in fp64, too, for its rounding."""
    found = compare(log, theirs, *run())
    is_near = found["loss"] <= 10 * LOSS_LIMIT and found["norm"] <= 10 * NORM_LIMIT
    if "method" not in condition or is_equal(found) or not is_near:
        return found
    return compare(log, theirs, *run(), exact=run(dtype=torch.float64)[0])


def candidates(inputs: Path, condition: dict) -> tuple:
    """(the plain loop, [(verdict, name, mask, the plain loop with this choice)]), conventions first."""
    if method := condition.get("method"):
        plain = partial(plain_method_curve, inputs, condition)
        return plain, [(c.verdict, c.name, None, partial(plain, c)) for c in CHOICES if method in c.methods]
    plain = partial(plain_curve, inputs, condition)
    kinds = [("convention", *choice) for choice in CONVENTIONS] + [("wrong", *mean) for mean in MEANS]
    return plain, [(kind, name, mask, partial(plain, mask, weights)) for kind, name, mask, weights in kinds]


def judge(inputs: Path, output: Path, condition: dict) -> dict:
    """{"verdict": equal, convention or wrong, "loss", "norm", "weights": worst relative differences, "note"}.

    A run that differs from the plain loop is tried with each convention, then with each known mistake of the mean.
    """
    log = [row for row in read_log(output) if "loss" in row and "grad_norm" in row]
    plain, others = candidates(inputs, condition)
    curve, *_ = plain()
    if condition.get("resume") and any((output / at).exists() for at in ("checkpoint-2", "run/checkpoints/step_2")):
        return {"verdict": "wrong", "note": "it started again from the first step"}
    if len(log) != len(curve):
        note = f"{counted(len(log), 'step is', 'steps are')} logged, the data gives {len(curve)}"
        runs = [("the plain loop", plain), *((name, run) for _, name, _, run in others)] if log else []
        same = (name for name, run in runs if is_equal(distances(log, run()[0])))
        return {
            "verdict": "wrong",
            "note": f"{note}; those are equal to {first}" if (first := next(same, "")) else note,
        }
    theirs = saved_weights(output)
    found, verdict, note, chosen = compared(log, theirs, condition, plain), "equal", "", None
    if not is_equal(found):
        verdict = "wrong"
        note = f"step 1: loss {log[0]['loss']:.6g}, plain {curve[0][0]:.6g}; norm {log[0]['grad_norm']:.6g}, plain {curve[0][1]:.6g}"
        for kind, name, mask, run in others:
            other = compared(log, theirs, condition, run)
            if is_equal(other):
                found, verdict, note, chosen = other, kind, name, mask
                break
    if condition.get("evaluation"):
        evals = [row["eval_loss"] for row in read_log(output) if "eval_loss" in row]
        samples = read_samples(str(inputs / "eval_tokens.jsonl"))
        samples = [chosen(sample) for sample in samples] if chosen else samples
        plain, *mistakes = plain_evaluations(output / "model", samples).items()
        allowed = rounding(evals)
        found["evaluation"] = distance(evals[-1], plain[1], allowed)
        if not found["evaluation"] <= LOSS_LIMIT:
            note = f"{note}; " if verdict == "wrong" else ""
            verdict, note = "wrong", f"{note}evaluation {evals[-1]:.6g}, {plain[0]} is {plain[1]:.6g}"
            for name, value in mistakes:
                if distance(evals[-1], value, allowed) <= LOSS_LIMIT:
                    note += f": it is {name}"
    if condition.get("messages") and verdict == "equal" and (output / "tokens.jsonl").exists():
        tokens, expected = read_samples(str(output / "tokens.jsonl")), read_samples(str(inputs / "rows_tokens.jsonl"))
        if tokens != expected[: condition["rows"]]:
            verdict, note = "wrong", "its tokens or masks are not transformers'"
    return {"verdict": verdict, **found, "note": note}
