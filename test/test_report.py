"""report and watch, on real runs: what they show, and what they say of files that are no run."""

import html.parser
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from launch import run_process, train_many
from safetensors.torch import load_file, save_file

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.reports import live_view, report_page
from trainer.reports.live_view import checkpoints, memory, printable, progress, sparkline
from trainer.reports.report_page import page
from trainer.reports.run_differences import difference_rows, gradient_differences
from trainer.reports.run_rows import RunRows, read_rows

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
    table = difference_rows(found, differences)[1:]
    assert table[0] == ["same", "no step", "no step", "0 at step 1", "not judged", "none"]
    losses = [read_rows(str(runs / name)).series("loss")[1] for name in ("first", "other")]
    step = 1 + next(i for i, (a, b) in enumerate(zip(*losses, strict=True)) if abs(b / a - 1) > 0.01)
    assert step >= 3 and table[1][:3] == ["other", "no step", f"step {step} (over 0.01)"] and table[1][-1] == "none"
    assert table[2][-1] == "model.layers.1.self_attn.o_proj.weight: 0.01 away"
    parsed = read(page(found))
    assert "Where they differ from first" in parsed.texts and "model.layers.1.self_attn.o_proj.weight" in parsed.texts


class Page(html.parser.HTMLParser):
    """Checks that all tags are closed in order, and collects texts and addresses."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br", "link"):
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
    inside = ("#", "data:,")
    assert all(address.startswith(inside) for address in parsed.addresses)  # nothing is loaded
    losses = read_rows(str(runs / "first")).series("loss")[1]
    assert f"{losses[0]:.5g}, {losses[-1]:.5g}" in parsed.texts


def test_equal_losses_do_not_hide_other_gradient_norms():
    """As GRPO with one update per rollout has them: its loss is made of rewards and lengths."""
    runs = [RunRows(name, ".", {"config": {"param_dtype": "fp32"}}) for name in "ab"]
    for run, norms in zip(runs, ((1.0, 2.0, 3.0), (1.0 + 1e-6, 2.0, 3.01)), strict=True):
        run.steps = {step: {"loss": 0.5 / step, "grad_norm": norm} for step, norm in enumerate(norms, start=1)}
    told = difference_rows(runs, {})[1]
    assert told[2:5] == ["no step", "0 at step 1", "step 3 (over 0.0001)"]


SEEN = """<script>onload = () => {
  const boxes = [...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height).filter(h => h > 0);
  parent.postMessage(JSON.stringify({width: innerWidth, needed: document.documentElement.scrollWidth,
    charts: boxes.length, least: Math.min(...boxes), loaded: performance.getEntriesByType('resource').length}), '*'); }</script>"""
FRAME = "<title></title><script>onmessage = e => document.title = e.data</script><iframe src=report.html width={} height=900>"


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_report(runs, width, tmp_path):
    """On a phone and on a screen: nothing is loaded, nothing is wider than the window, and labels can be read."""
    text = page([read_rows(str(runs / name)) for name in NAMES])
    (tmp_path / "report.html").write_text(text.replace("</body>", SEEN + "</body>"))
    (tmp_path / "frame.html").write_text(FRAME.format(width))  # a window is at least 500 pixels wide
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [f"--user-data-dir={tmp_path}/profile", "--window-size=1400,1000", "--dump-dom"]
    code, output = run_process([*command, "--virtual-time-budget=9000", f"file://{tmp_path}/frame.html"], timeout=120)
    output = html.unescape(output)
    seen = json.loads(output.split("<title>")[1].split("</title>")[0])
    assert code == 0 and seen["loaded"] == 0 and seen["charts"] > 50, seen
    assert seen["needed"] <= seen["width"] == width and seen["least"] >= 9, seen


def test_equal_runs_are_told(runs):
    text = page([read_rows(str(runs / name)) for name in ("first", "same")])
    assert "equal at every step" in text
    assert "equal at every step" not in page([read_rows(str(runs / name)) for name in ("first", "other")])


def test_watch_shows_where_the_run_is(runs):
    code, output = run_process([sys.executable, "-m", "trainer.cli.watch", str(runs / "first"), "--once"])
    assert code == 0, output
    assert "step 4 of 4, ended" in output and "checkpoints: step_2, step_4" in output
    assert checkpoints(str(runs / "same")) == []


@pytest.mark.parametrize("jump", [-3600, 86400])
def test_watch_sees_a_hang_although_the_clock_jumps(jump, tmp_path, monkeypatch):
    path, clock, steady = tmp_path / "metrics.jsonl", [1e9], [50.0]
    monkeypatch.setattr(live_view.time, "time", lambda: clock[0])
    monkeypatch.setattr(live_view.time, "monotonic", lambda: steady[0])

    def wait(seconds: float) -> float:
        clock[0], steady[0] = clock[0] + seconds, steady[0] + seconds
        return round(row.age())

    path.write_text("{}\n")
    os.utime(path, (clock[0] - 7, clock[0] - 7))
    row = live_view.LastRow(str(tmp_path))
    assert row.age() == 7 and wait(10) == 17
    clock[0] += jump
    assert wait(10) == 27
    os.utime(path, (clock[0], clock[0]))  # a new row
    assert wait(2) == 0 and wait(90) == 90
    assert live_view.LastRow(str(tmp_path / "none")).age() == 0


def test_a_run_that_is_still_written(runs, tmp_path):
    lines = (runs / "first/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])  # half a line
    run = read_rows(str(tmp_path))
    assert sorted(run.steps) == [1, 2]
    assert progress(run, 5).endswith("last row 5 s ago")
    assert progress(run, 3600).endswith("last row 1 h 0 min ago (does it hang?)")
    stopped = {"event": "stop", "reason": "stopped by SIGINT after step 2"}
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]) + json.dumps(stopped) + "\n")
    assert progress(read_rows(str(tmp_path)), 3600) == "step 2 of 4, stopped by SIGINT after step 2"
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


S = '{"event": "start", "config": {"param_dtype": "fp32"}, "total_steps": 5}\n'
BROKEN = {
    "a config that is no table": ('{"event": "start", "config": "x"}\n', "line 1 is no row"),
    "a step that is a text": (S + '{"step": "1", "loss": 1}\n', "line 2 is no row"),
    "a total that is a text": ('{"event": "start", "total_steps": "x"}\n', "line 1 is no row"),
    "brackets without end": ("[" * 100_000 + "\n", "line 1 is no row"),
    "no step": (S, "has no step yet"),
    "a broken dump": (S + '{"step": 1, "loss": 1.0}\n', "grads_step1.safetensors: cannot be read"),
}
ODD = {
    "nan": S + '{"step": 1, "loss": NaN}\n{"step": 2, "loss": Infinity}\n',
    "too large": S + '{"step": 1, "loss": 1e308}\n{"step": 2, "loss": 1' + "0" * 400 + "}\n",
    "half": S + '{"step": 1, "loss": 1.0}\n{"step": 2',
    "ranks": S + '{"step": 1, "peak_memory_bytes": 5, "peak_memory_per_rank": ["a"]}\n',
    "scripts": S + '{"step": 1, "loss": "<script>"}\n',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_one_line(name, tmp_path):
    content, message = BROKEN[name]
    (tmp_path / "metrics.jsonl").write_text(content)
    (tmp_path / "parity").mkdir()
    (tmp_path / "parity/grads_step1.safetensors").write_bytes(b"broken" * 9)
    with pytest.raises(UserError, match=message) as told:
        report_page.run([str(tmp_path), str(tmp_path)])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ODD)
def test_odd_values_are_shown_or_left_out(name, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(ODD[name])
    (tmp_path / "rollouts.jsonl").write_text(
        '{"cut\n{"prompt": "a\\u001b[2J", "response": "</pre><script>", "score": 1}\n'
    )
    report_page.run([str(tmp_path)])
    live_view.run([str(tmp_path), "--once"])
    assert "\x1b[2J" not in capsys.readouterr().out and "<script>" not in (tmp_path / "report.html").read_text()
    if name == "nan":
        assert "from step 1 on, 2 steps" in (tmp_path / "report.html").read_text()


def test_the_memory_of_every_rank_is_shown(tmp_path):
    run = RunRows("a", str(tmp_path), steps={1: {"peak_memory_bytes": 2**30, "peak_memory_per_rank": [2**30, 2**31]}})
    assert memory(run) == "peak memory in GiB: rank 0 1.00, rank 1 2.00"
    run.steps[2] = {"peak_memory_bytes": 2**30, "peak_memory_per_rank": list(range(2**30, 2**30 + 9))}
    assert memory(run).count("rank ") == 8 and memory(run).endswith("the largest 8 of 9 ranks")
    assert printable("a\x1b[2J\nb") == "a·[2J b"


def test_a_curve_in_one_line():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0] * 100, 5) == "▁▁▁▁▁"
    assert sparkline([0, 0, 8, 8], 2) == "▁█"
    assert sparkline([], 5) == ""
