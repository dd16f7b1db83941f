"""The record of other trainers: its page is the committed results, and its judge names what is planted in a log."""

import json
import math
import re
import sys

import pytest
from launch import ROOT

sys.path.insert(0, str(ROOT / "scripts/record"))
import cases
import judge
import methods
import page
import record

cases.EPOCHS = methods.EPOCHS = 1  # what is planted shows in two steps; the page's runs have four epochs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record") / "inputs"
    cases.make(folder)
    methods.make(folder)
    return folder


def write_run(folder, curve, final) -> None:
    """A run as a trainer leaves it: its log and its weights."""
    from safetensors.torch import save_file

    (folder / "model").mkdir(parents=True)
    rows = [{"loss": loss, "grad_norm": norm} for loss, norm in curve]
    (folder / "log.json").write_text(json.dumps(rows))
    save_file({name: tensor.contiguous() for name, tensor in final.items()}, folder / "model/model.safetensors")


def test_the_page_is_the_committed_results():
    results = json.loads((ROOT / "docs/record.json").read_text())
    sizes = json.loads((ROOT / "docs/record_tensor_parallel.json").read_text())
    assert (ROOT / "docs/record.md").read_text() == page.page(results, sizes)
    assert {cell["verdict"] for cells in results.values() for cell in cells.values()} <= page.SIGNS.keys()


def test_a_cell_counts_its_runs_until_a_version_or_a_verdict_changes():
    cell = {"verdict": "wrong", "note": "a mean of means", "version": "1.0"}
    first = record.with_runs(cell, {})
    again = record.with_runs(cell, first)
    assert [record.with_runs(cell, before)["runs"] for before in ({}, first, again, cell)] == [1, 2, 3, 2]
    for change in ({"version": "1.1"}, {"verdict": "equal"}, {"note": "other"}):
        assert record.with_runs({**cell, **change}, again)["runs"] == 1
    rows = {
        "TRL": {"a": again, "b": first, "c": {"verdict": "equal"}, "d": {"verdict": "none"}},
        "this trainer, fsdp2": {"a": again},
    }
    assert "1 of 3 cells ran again" in page.runs_text(rows) and "it is 1 of 2." in page.runs_text(rows)


def test_the_page_fits_a_phone():
    """At 390 pixels: the site scrolls tables and code, code in a line breaks, a word does not. The picture shrinks to the width."""
    text = re.sub(r"```.*?```", "", (ROOT / "docs/record.md").read_text(), flags=re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1, f"a cell is cut: {table[:80]}"
    words = re.sub(r"(?:^\|.*\n)+|`[^`]*`", "", text, flags=re.MULTILINE).split()
    assert max(map(len, words)) <= 40
    width = int.from_bytes((ROOT / "docs/record.png").read_bytes()[16:20], "big")  # of the IHDR chunk
    assert 9 / 72 * 150 * 358 / width >= 8, "letters of 9 points at 150 dpi, in a column of 358 pixels"
    style = (ROOT / "docs/stylesheets/extra.css").read_text()
    inline = style[style.index(".md-typeset p > code") :].split("}")[0]
    assert ".md-typeset li > code" in inline and "max-width: 100%" in inline


PLANTED = {
    "": ("equal", {}),
    "the line break behind each turn's end has a loss": ("convention", {"mask": judge.with_line_break}),
    "the line break between turns has a loss": ("convention", {"mask": judge.without_last_line_break}),
    judge.MEANS[0][0]: ("wrong", {"weights": judge.MEANS[0][2]}),
    judge.MEANS[1][0]: ("wrong", {"weights": judge.MEANS[1][2]}),
}


@pytest.mark.parametrize("note", PLANTED)
def test_the_judge_names_what_is_planted(inputs, tmp_path, note):
    verdict, planted = PLANTED[note]
    condition = cases.CONDITIONS["accumulation 4, uneven lengths"]
    curve, _, final = judge.plain_curve(inputs, condition, **planted)
    write_run(tmp_path, curve, final)
    found = judge.judge(inputs, tmp_path, condition)
    assert (found["verdict"], found["note"]) == (verdict, note)


CONDITIONS_OF_CHOICES = {  # where each choice changes the numbers
    "dpo": "DPO, last short batch",
    "rm": "reward model, last short batch",
    "grpo": "GRPO, top-k sampling, log-probs of the engine",
}
NAMED = [(method, choice) for method in methods.LOSSES for choice in methods.CHOICES if method in choice.methods]
SAME = (
    "means of ranks",
    "means of samples",
    "divided by the number",
    "sum of the means",
    "full step; ",
)  # no change, or of micro-batches again


@pytest.mark.parametrize(
    ("method", "choice"),
    [pytest.param(m, c, id=f"{m}: {c.name}") for m, c in NAMED if not any(part in c.name for part in SAME)],
)
def test_the_judge_names_what_is_planted_in_pairs_and_rollouts(inputs, tmp_path, method, choice):
    condition = methods.METHODS[CONDITIONS_OF_CHOICES[method]]
    curve, _, final = methods.plain_method_curve(inputs, condition, choice)
    write_run(tmp_path, curve, final)
    found = judge.judge(inputs, tmp_path, condition)
    assert (found["verdict"], found["note"]) == (choice.verdict, choice.name)


def test_the_rounding_of_the_plain_loop_is_no_difference():
    """What the loop in fp64 shows of its rounding is allowed at that step, and no more."""
    log = [{"loss": 0.5, "grad_norm": 1.0}, {"loss": 0.1500020123, "grad_norm": 1.0}]
    plain, exact = [(0.5, 1.0), (0.1500000123, 1.0)], [(0.5, 1.0), (0.1499980123, 1.0)]
    assert judge.distances(log, plain)["loss"] == pytest.approx(2e-6 / 0.15, rel=1e-3) and not judge.is_equal(
        judge.distances(log, plain)
    )
    assert judge.distances(log, plain, exact)["loss"] < 1e-9
    log[0]["loss"] = 0.5001
    assert judge.distances(log, plain, exact)["loss"] == pytest.approx(2e-4, rel=1e-3)


def test_the_plain_loop_of_pairs_is_that_of_one_padded_batch(inputs):
    """The loss of the first step, written again with all pairs in one padded batch: log 2 for DPO, and the scores' for the model."""
    import torch
    from transformers import AutoModelForSequenceClassification

    condition = {**methods.METHODS["reward model, accumulation 4"]}
    pairs = methods.read_items(inputs, condition)[0]
    rows = [pair["prompt_ids"] + pair[side] for side in ("chosen_ids", "rejected_ids") for pair in pairs]
    width = max(map(len, rows))
    ids, mask = (
        torch.tensor([row + [0] * (width - len(row)) for row in kind]) for kind in (rows, [[1] * len(r) for r in rows])
    )
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "reward_model", dtype=torch.float32)
    chosen, rejected = model(input_ids=ids, attention_mask=mask).logits[:, 0].chunk(2)
    expected = torch.log1p(torch.exp(rejected - chosen)).mean().item()
    assert methods.plain_method_curve(inputs, condition)[0][0][0] == pytest.approx(expected, rel=1e-6)
    dpo = methods.plain_method_curve(inputs, methods.METHODS["DPO, last short batch"])[0]
    assert dpo[0][0] == pytest.approx(math.log(2), rel=1e-6) and dpo[1][0] < dpo[0][0]


def test_a_wrong_gradient_norm_and_wrong_weights_are_no_equality(inputs, tmp_path):
    condition = cases.CONDITIONS["accumulation 4, uneven lengths"]
    curve, first, final = judge.plain_curve(inputs, condition)
    write_run(tmp_path / "norm", [(loss, norm * 1.001) for loss, norm in curve], final)
    write_run(
        tmp_path / "weights", curve, {name: tensor + 0.01 * (tensor - first[name]) for name, tensor in final.items()}
    )
    assert [judge.judge(inputs, tmp_path / name, condition)["verdict"] for name in ("norm", "weights")] == [
        "wrong",
        "wrong",
    ]


def test_the_steps_of_a_run_that_ends_early_are_named(inputs, tmp_path):
    condition, (name, _, weights) = cases.CONDITIONS["last short batch"], judge.MEANS[0]
    curve, _, final = judge.plain_curve(inputs, condition, weights=weights)
    write_run(tmp_path, curve[:1], final)
    note = f"1 step is logged, the data gives 2; those are equal to {name}"
    assert judge.judge(inputs, tmp_path, condition) == {"verdict": "wrong", "note": note}


def test_a_rounded_log_is_judged_with_its_rounding():
    assert judge.distance(-1.0, -2.0, 0.0) == 0.5, "a loss below 0"
    assert judge.rounding([3.1416, 3.5]) == 5e-5 and judge.rounding([3.14159265, 4.5]) == 0.0
    assert judge.distance(3.1416, 3.14164, 5e-5) == 0.0 and judge.distance(float("nan"), 3.0, 0.1) == float("inf")
