"""The record of other trainers: its page is the committed results, and its judge names what is planted in a log."""

import json
import sys

import pytest
from launch import ROOT

sys.path.insert(0, str(ROOT / "scripts/record"))
import cases
import judge
import page

cases.EPOCHS = 2  # what is planted shows in the first step; the page's runs have four


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record") / "inputs"
    cases.make(folder)
    return folder


def write_run(folder, curve, final) -> None:
    """A run as a trainer leaves it: its log and its weights."""
    from safetensors.torch import save_file

    (folder / "model").mkdir(parents=True)
    rows = [{"loss": loss, "grad_norm": norm} for loss, norm in curve]
    (folder / "log.json").write_text(json.dumps(rows))
    save_file({name: tensor.contiguous() for name, tensor in final.items()}, folder / "model/model.safetensors")


def test_the_page_is_the_committed_results():
    record = json.loads((ROOT / "docs/record.json").read_text())
    assert (ROOT / "docs/record.md").read_text() == page.page(record)
    assert {cell["verdict"] for cells in record.values() for cell in cells.values()} <= page.SIGNS.keys()


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


def test_a_rounded_log_is_judged_with_its_rounding():
    assert judge.rounding([3.1416, 3.5]) == 5e-5 and judge.rounding([3.14159265, 4.5]) == 0.0
    assert judge.distance(3.1416, 3.14164, 5e-5) == 0.0 and judge.distance(float("nan"), 3.0, 0.1) == float("inf")
