"""report and watch, on real runs: what they show, and what they say of files that are no run."""

import html.parser
import json
import shutil
import sys
from pathlib import Path

import pytest
from launch import run_process, train_many
from safetensors.torch import load_file, save_file

from trainer.cli.parting import gradient_differences, parting_rows
from trainer.cli.report import page
from trainer.cli.run_rows import read_rows
from trainer.cli.watch import checkpoints, progress, sparkline
from trainer.datasets.demo import make_demo
from trainer.errors import UserError

NAMES = ("first", "same", "other")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """first and same: equal runs of 4 steps with checkpoints; other: with another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    make_demo(str(folder))
    line = ["--pretrain", str(folder / "model"), "--dataset", str(folder / "sft.jsonl"), "--apply_chat_template"]
    line += ["--max_steps", "4", "--train_batch_size", "8", "--micro_train_batch_size", "4", "--no_save"]
    lines = [[*line, "--output_dir", str(folder / name)] for name in NAMES]
    lines = [[*line, "--parity_dump", str(folder / name / "parity")] for line, name in zip(lines, NAMES, strict=True)]
    lines[0] += ["--save_steps", "2"]
    lines[2] += ["--learning_rate", "0.01"]
    train_many(1, lines, folder, timeout=240)
    return folder


def test_the_page_says_where_runs_part(runs, tmp_path):
    """`other` has another rate, so its loss parts after two updates. A planted gradient is the first of its copy to differ."""
    shutil.copytree(runs / "first", tmp_path / "planted", symlinks=True)
    path = tmp_path / "planted/parity/grads_step1.safetensors"
    tensors = load_file(path)
    for name in ("model.layers.1.self_attn.o_proj.weight", "model.norm.weight"):
        tensors[name] *= 1.01
    save_file(tensors, path)
    rows = read_rows(str(tmp_path / "planted"))
    rows.start["config"]["parity_dump"] = None  # the folder was copied
    found = [read_rows(str(runs / name)) for name in NAMES] + [rows]
    differences = gradient_differences(found)
    assert list(differences) == ["same", "other", "planted"]
    wrong = {name: value for name, value in differences["planted"].items() if value}
    assert list(wrong) == ["model.layers.1.self_attn.o_proj.weight", "model.norm.weight"]
    assert list(wrong.values()) == pytest.approx([0.01, 0.01], rel=1e-4)
    table = parting_rows(found, differences)[1:]
    assert table[0] == ["same", "no step", "no step", "none"]
    losses = [read_rows(str(runs / name)).series("loss")[1] for name in ("first", "other")]
    step = 1 + next(i for i, (a, b) in enumerate(zip(*losses, strict=True)) if abs(b / a - 1) > 0.01)
    assert step >= 3 and table[1] == ["other", "no step", f"step {step} (over 0.01)", "none"]
    assert table[2] == ["planted", "no step", "no step", "model.layers.1.self_attn.o_proj.weight: 0.01 away"]
    parsed = read(page(found))
    assert "Where they part from first" in parsed.texts and "model.layers.1.self_attn.o_proj.weight" in parsed.texts


class Page(html.parser.HTMLParser):
    """Checks that all tags are closed in order, and collects texts and addresses."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


def read(text: str) -> Page:
    parsed = Page()
    parsed.feed(text)
    parsed.close()
    assert not parsed.open
    return parsed


def test_a_report_is_one_file_with_all_runs(runs):
    command = [sys.executable, "-m", "trainer.cli.report", *(str(runs / name) for name in ("first", "same", "other"))]
    code, output = run_process(command)
    assert code == 0 and str(runs / "first/report.html") in output, output
    parsed = read((runs / "first/report.html").read_text())
    assert {"first", "same", "other", "loss", "grad_norm", "lr", "--"} - set(parsed.texts) == {"--"}
    assert "learning_rate" in parsed.texts and "0.01" in parsed.texts  # the flags that differ
    assert "max_steps" not in parsed.texts
    inside = ("#", "data:image/png;base64,")  # the colour bar of the heat map is a picture in the file
    assert all(address.startswith(inside) for address in parsed.addresses)  # nothing is loaded
    losses = read_rows(str(runs / "first")).series("loss")[1]
    assert f"{losses[0]:.5g}, {losses[-1]:.5g}" in parsed.texts


def test_equal_runs_are_told(runs):
    text = page([read_rows(str(runs / name)) for name in ("first", "same")])
    assert "equal at every step" in text
    assert "equal at every step" not in page([read_rows(str(runs / name)) for name in ("first", "other")])


def test_watch_shows_where_the_run_is(runs):
    code, output = run_process([sys.executable, "-m", "trainer.cli.watch", str(runs / "first"), "--once"])
    assert code == 0, output
    assert "step 4 of 4, ended" in output and "checkpoints: step_2, step_4" in output
    assert checkpoints(str(runs / "same")) == []


def test_a_run_that_is_still_written(runs, tmp_path):
    lines = (runs / "first/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])  # half a line
    run = read_rows(str(tmp_path))
    assert sorted(run.steps) == [1, 2]
    written = (tmp_path / "metrics.jsonl").stat().st_mtime
    assert progress(run, written + 5).endswith("last row 5 s ago")
    assert progress(run, written + 3600).endswith("last row 1 h 0 min ago (does it hang?)")
    resumed = [json.loads(line) for line in lines[1:3]]
    resumed[1]["loss"] = 7.0  # the step is trained again after a resume
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]) + json.dumps(resumed[1]) + "\n")
    assert read_rows(str(tmp_path)).series("loss")[1][1] == 7.0


@pytest.mark.parametrize(
    ("content", "expected"),
    {None: "holds no metrics.jsonl", "no json\n{}\n": "line 1 is no row of a run", "[1]\n": "line 1 is no row"}.items(),
)
def test_what_is_no_run_is_one_line(content, expected, tmp_path):
    if content:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=expected):
        read_rows(str(tmp_path))


def test_a_curve_in_one_line():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0] * 100, 5) == "▁▁▁▁▁"
    assert sparkline([0, 0, 8, 8], 2) == "▁█"
    assert sparkline([], 5) == ""
