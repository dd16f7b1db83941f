"""metrics.jsonl on a full disk and with damaged lines, and facts that no run on a CPU shows."""

import ast
import errno
import json
import math
import os
import re

import pytest
import torch
import transformers
from launch import ROOT

from trainer import limits
from trainer.errors import UserError
from trainer.metrics import (
    METRICS_FILE,
    MOST_WAITING,
    MetricsLog,
    MetricSum,
    counted,
    flops_per_token,
    full_size,
    in_words,
    peak_flops,
    shown_number,
)

PEAKS = {
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12, "NVIDIA H200": 989e12,
    "NVIDIA H20": 148e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A10": 125e12, "NVIDIA A10G": 70e12, "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12, "NVIDIA B200": 2250e12, "NVIDIA GB200": 2500e12, "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GH200 480GB": 989e12, "NVIDIA H800": 989e12, "Tesla T4": None,
}  # fmt: skip


THINGS = """bytes columns episodes evaluations experts files flags heads images keys labels layers lines messages models objects
 pairs prompts ranks responses rollouts rows runs samples scores sets steps targets tensors texts threads tokens turns values"""
MANY = re.compile(rf" ([a-z]+ )?({'|'.join(THINGS.split())})\b")
COUNT = re.compile(r"len\(.*|(\w+\.)*(num_\w+|count|size|\w+_size)")


def test_a_small_number_is_no_share_of_a_billion():
    assert [shown_number(n) for n in (7, 216_000, 2_500_000, 7e9)] == [
        "7",
        "216.00 thousand",
        "2.50 million",
        "7.00 billion",
    ]


def test_one_of_a_thing_is_not_many():
    assert (counted(1, "row"), counted(0, "row"), counted(2, "row")) == ("1 row", "0 rows", "2 rows")
    told = "{n:row holds|rows hold} {what}, {of:token} and {share:.2f}"
    assert in_words(told, n=1, what="a", of=1, share=0.5) == "1 row holds a, 1 token and 0.50"
    assert in_words(told, n=0, what="a", of=3, share=0.5) == "0 rows hold a, 3 tokens and 0.50"


def test_every_message_counts_by_the_helper():
    """`{len(rows)} rows` in an f-string, or `{num_rows} rows` in a template, says "1 rows"."""
    found = []
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                for value, after in zip(node.values, node.values[1:]):
                    is_plain = isinstance(value, ast.FormattedValue) and not value.format_spec
                    count = ast.unparse(value.value) if is_plain and isinstance(after, ast.Constant) else ""
                    if COUNT.fullmatch(count) and MANY.match(after.value):
                        found.append(f"{path.name}:{value.lineno}: {count}{after.value}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                parts = re.findall(r"\{(\w*)\}( [a-z ]+)", node.value)
                found += [f"{path.name}:{node.lineno}: {name}{words}" for name, words in parts if MANY.match(words)]
    at_least_two = ("num_ranks ranks", "vllm_experts.py", "judge_modes.py")
    assert [line for line in found if not any(name in line for name in at_least_two)] == []


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_a_device(name):
    assert peak_flops(name) == PEAKS[name]


def test_a_partitioned_parameter_has_its_whole_size():
    """ZeRO 3 leaves an empty tensor and says the size in ds_numel; bitsandbytes packs two weights into a byte."""
    partitioned, packed = (torch.nn.Parameter(torch.empty(size)) for size in (0, 6))
    partitioned.ds_numel = 12
    packed.quant_state = type("State", (), {"shape": torch.Size((3, 4))})()
    assert [full_size(p) for p in (partitioned, packed, torch.nn.Parameter(torch.empty(5)))] == [12, 12, 5]


def test_a_metric_says_what_it_is_a_mean_over():
    assert MetricSum(6.0).means("x", 3) == {"x": 2.0}
    assert MetricSum(6.0, count=2).means("x", 3) == {"x": 3.0} and MetricSum(0.0, count=0).means("x", 3) == {}
    both = MetricSum(1.0, squares=1.0) + MetricSum(3.0, squares=9.0)
    assert both.means("x", 2) == {"x": 2.0, "x_std": 1.0}


def test_a_model_without_attention_has_flops_of_its_parameters_alone():
    assert flops_per_token(transformers.FalconMambaConfig(num_hidden_layers=2), 10.0, 100.0) == 60.0


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full while `disk["is_full"]`: half of what is written fits."""
    real, state = os.write, {"is_full": False}

    def write(handle: int, data: bytes) -> int:
        if state["is_full"]:
            real(handle, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)
    return state


def test_rows_wait_for_a_full_disk_and_none_is_lost_or_torn(tmp_path, disk, capsys):
    with MetricsLog(str(tmp_path)) as log:
        for step in range(6):
            disk["is_full"] = step in (2, 3)
            log.row(step, loss=0.5)
            assert len(log.waiting) == {2: 1, 3: 2}.get(step, 0) and not log.is_stuck
    rows = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert rows == [{"step": step, "loss": 0.5} for step in range(6)]
    first, second = capsys.readouterr().out.splitlines()
    assert "No space left on device" in first and "written again" in second


def test_a_disk_that_stays_full_ends_the_run_and_its_checkpoint_has_the_rows(tmp_path, disk):
    log = MetricsLog(str(tmp_path))
    log.row(0)
    disk["is_full"] = True
    for step in range(1, MOST_WAITING + 2):
        assert not log.is_stuck
        log.row(step)
    assert log.is_stuck
    kept = list(log.waiting)  # what a checkpoint holds
    with pytest.raises(UserError, match=f"{METRICS_FILE}: {len(kept)} rows cannot be written: No space left"), log:
        pass
    disk["is_full"] = False
    again = MetricsLog(str(tmp_path))
    again.add_missing(kept)
    again.add_missing(kept)
    again.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert steps == list(range(MOST_WAITING + 2))


@pytest.mark.parametrize("damage", [b'{"step": 2, "lo', b"[2]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_a_damaged_line_is_told_at_the_start(tmp_path, damage, capsys):
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    MetricsLog(str(tmp_path)).close()
    assert "metrics.jsonl line 2 is damaged: it is no row of a run" in capsys.readouterr().out
    with pytest.raises(UserError, match="line 2: is damaged"):
        MetricsLog(str(tmp_path), needs_whole=True)


STEP = {"step": 2, "loss": 1.5, "grad_norm": math.nan, "batch_hash": "a"}
ODD_ROWS = [STEP | {"loss": "x"}, STEP | {"grad_norm": None}, STEP | {"batch_hash": 5}, STEP | {"step": "2"}]
ODD_ROWS += [{"loss": 1.5}, {"step": 2, "loss": 1.5}, STEP | {"step": True}, STEP | {"step": 1 << 60}, {"step": -1}]
ODD_ROWS += [{"event": "start", name: 5} for name in ("config", "mesh", "versions", "data")]
ODD_ROWS += [{"event": "start", "total_steps": "x"}, {"event": 5}, {"event": "resume", "step": None}]


@pytest.mark.parametrize("row", ODD_ROWS, ids=json.dumps)
def test_a_row_with_values_that_no_run_writes_is_told_at_the_start(tmp_path, row, capsys):
    """With --certificate, the certificate would find it after the last step."""
    path = tmp_path / METRICS_FILE
    path.write_text(f"{json.dumps(STEP)}\n{json.dumps(row)}\n")
    MetricsLog(str(tmp_path)).close()
    assert "metrics.jsonl line 2 is damaged: it is no row of a run" in capsys.readouterr().out
    with pytest.raises(UserError, match="line 2: is damaged"):
        MetricsLog(str(tmp_path), needs_whole=True)


def test_a_line_beyond_the_limit_is_told_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(limits.DEFAULTS, "row_mb", (1, "MB"))
    (tmp_path / METRICS_FILE).write_bytes(b" " * (1 << 21) + b"\n")
    with pytest.raises(UserError, match="row_mb"):
        MetricsLog(str(tmp_path))
