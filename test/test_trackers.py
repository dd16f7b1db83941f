"""--report_to: each tracker gets the numbers and tables, by the calls of its own package, and a resume goes on in its run.

The packages are small modules with the signatures of trackio 0.30, mlflow 3 and swanlab 0.7: other arguments fail.
"""

import importlib.util
import re
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from trainer.cli import train_sft
from trainer.distributed.mesh_sizes import MeshSizes
from trainer.errors import UserError
from trainer.flags.common_flags import OutputArguments
from trainer.metrics import MetricsLog
from trainer.mirrors import Mirrors, shared_name
from trainer.runs.flag_checks import check_trackers
from trainer.runs.outputs import start_metrics
from trainer.training.checkpointing import Progress

calls: list[tuple] = []


def note(name: str, signature: str):
    """A function with the parameters of `signature`, which notes its name and what it was given."""
    made: dict = {"note": lambda **given: calls.append((name, {k: v for k, v in given.items() if v is not None}))}
    exec(f"def call({signature}):\n    note(**locals())", made)
    return made["call"]


def stub(monkeypatch, name: str, **functions: str) -> ModuleType:
    module = ModuleType(name)
    vars(module).update({function: note(f"{name}.{function}", signature) for function, signature in functions.items()})
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def trackers(monkeypatch):
    calls.clear()
    log = {"finish": ""}
    trackio = stub(
        monkeypatch, "trackio", init="project, name=None, group=None, config=None, resume='never'",
        **(log | {"log": "metrics, step=None"}),
    )  # fmt: skip
    trackio.Table = lambda dataframe: dataframe.to_dict("records")
    swanlab = stub(
        monkeypatch, "swanlab",
        init="project=None, workspace=None, experiment_name=None, config=None, logdir=None, mode=None, id=None, resume=None",
        **(log | {"log": "data, step=None"}),
    )  # fmt: skip
    swanlab.Text = lambda data: data
    mlflow = stub(
        monkeypatch, "mlflow", set_experiment="experiment_name=None, experiment_id=None", log_params="params",
        log_metrics="metrics, step=None", log_text="text, artifact_file", end_run="status='FINISHED'",
    )  # fmt: skip

    def start_run(run_id=None, experiment_id=None, run_name=None):
        calls.append(("mlflow.start_run", {"run_id": run_id, "run_name": run_name}))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "new"))

    mlflow.start_run = start_run
    return SimpleNamespace(trackio=trackio, mlflow=mlflow, swanlab=swanlab)


def write(tmp_path, name: str, run_ids=None) -> dict:
    config = {"seed": 1, "long": "x" * 900} | {f"flag{n}": n for n in range(150)}
    log = MetricsLog(str(tmp_path), trackers=[name], project="mine", run_name="run 1", config=config, run_ids=run_ids)
    log.row(3, loss=0.5, lr=0.1, batch_hash="text")
    log.row(3, eval_loss=0.25)
    log.table("samples", 3, [{"prompt": "a|b", "score": 1.0}])
    log.close()
    return log.run_ids


NUMBERS = {"train/loss": 0.5, "train/learning_rate": 0.1}
TABLE = "| prompt | score |\n| --- | --- |\n| a\\|b | 1.0 |\n"


def test_curves_have_the_names_of_trl():
    """Those of its GRPOTrainer._metrics."""
    names = {
        "reward": "train/reward",
        "reward_std": "train/reward_std",
        "reward_p90": "train/reward_p90",
        "reward_accuracy": "train/rewards/accuracies",
        "reward_math": "train/rewards/math/mean",
        "eval_reward_math": "eval/rewards/math/mean",
        "eval_response_length": "eval/completions/mean_length",
        "truncated_fraction": "train/completions/clipped_ratio",
        "clip_fraction": "train/clip_ratio/region_mean",
        "reward/easy": "train/reward/easy",
        "best_reward_math": "train/best_reward_math",
    }
    assert {name: shared_name(name) for name in names} == names


def test_trackio(trackers, tmp_path):
    found = write(tmp_path, "trackio")
    (_, start), *rest = calls
    assert found == {"trackio": start["name"]} and re.fullmatch("run 1-[0-9a-f]{6}", start["name"])
    assert (start["project"], start["resume"], start["config"]["seed"]) == ("mine", "allow", 1)
    assert rest == [
        ("trackio.log", {"metrics": NUMBERS, "step": 3}),
        ("trackio.log", {"metrics": {"eval/loss": 0.25}, "step": 3}),
        ("trackio.log", {"metrics": {"samples": [{"prompt": "a|b", "score": 1.0}]}, "step": 3}),
        ("trackio.finish", {}),
    ]
    calls.clear()
    assert write(tmp_path, "trackio", found) == found and calls[0][1]["name"] == found["trackio"]


def test_mlflow(trackers, tmp_path):
    assert write(tmp_path, "mlflow") == {"mlflow": "new"}
    assert calls[:2] == [
        ("mlflow.set_experiment", {"experiment_name": "mine"}),
        ("mlflow.start_run", {"run_id": None, "run_name": "run 1"}),
    ]
    params = [given["params"] for name, given in calls if name == "mlflow.log_params"]
    assert [len(part) for part in params] == [100, 52] and len(params[0]["long"]) == 500
    assert calls[4:] == [
        ("mlflow.log_metrics", {"metrics": NUMBERS, "step": 3}),
        ("mlflow.log_metrics", {"metrics": {"eval/loss": 0.25}, "step": 3}),
        ("mlflow.log_text", {"text": TABLE, "artifact_file": "samples_3.md"}),
        ("mlflow.end_run", {"status": "FINISHED"}),
    ]
    calls.clear()
    assert write(tmp_path, "mlflow", {"mlflow": "new"}) == {"mlflow": "new"}
    assert calls[1] == ("mlflow.start_run", {"run_id": "new", "run_name": "run 1"})
    assert "mlflow.log_params" not in [name for name, _ in calls]


def test_swanlab(trackers, tmp_path):
    run_ids = write(tmp_path, "swanlab")
    (_, start), *rest = calls
    assert (start["project"], start["experiment_name"], start["resume"]) == ("mine", "run 1", "allow")
    assert start["id"] == run_ids["swanlab"] and len(start["id"]) == 21 and start["logdir"] == f"{tmp_path}/swanlog"
    assert rest[0] == ("swanlab.log", {"data": NUMBERS, "step": 3}) and rest[-1] == ("swanlab.finish", {})
    assert rest[2] == ("swanlab.log", {"data": {"samples": TABLE}, "step": 3})
    calls.clear()
    assert write(tmp_path, "swanlab", run_ids) == run_ids and calls[0][1]["id"] == run_ids["swanlab"]


@pytest.mark.parametrize("in_its_folder", [True, False])
def test_a_checkpoint_from_elsewhere_names_no_run_of_a_tracker(in_its_folder, trackers, tmp_path):
    if in_its_folder:
        (tmp_path / "metrics.jsonl").write_text('{"event": "start"}\n')
    progress = Progress(step=2, swanlab_run_id="x" * 21)
    checkpoints = SimpleNamespace(progress=progress, kept_rows=[], changes=[], metrics=None)
    strategy = SimpleNamespace(is_rank_0=lambda: True, sizes=MeshSizes(1, 1, 1, 1), device=torch.device("cpu"))
    args = SimpleNamespace(output=OutputArguments(report_to="swanlab"))
    start_metrics(strategy, args, str(tmp_path), checkpoints).close()
    assert (calls[0][1]["id"] == "x" * 21) == in_its_folder and progress.swanlab_run_id == calls[0][1]["id"]


def test_a_tracker_that_fails_is_left_out_and_one_that_does_not_start_is_one_line(trackers, tmp_path, capsys):
    def fail(*_, **__):
        raise ConnectionError("no route\nto host")

    trackers.mlflow.log_metrics = fail
    write(tmp_path, "mlflow")
    assert capsys.readouterr().out == "--report_to mlflow gets no more rows: no route\n"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    trackers.trackio.init = fail
    with pytest.raises(UserError, match=r"^--report_to trackio: no route$"):
        write(tmp_path, "trackio")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--report_to trackio", r"--report_to trackio: trackio is not installed \(allowed: pip install"),
        (
            "--report_to tensorboard,comet",
            r"--report_to: 'comet' \(allowed: wandb, tensorboard, trackio, mlflow, swanlab",
        ),
        ("--report_to all", "--report_to: 'all'"),
        ("--report_to tensorboard --run_name x", "--run_name x without a tracker that has projects"),
        ("--report_to none --wandb_project x", "--wandb_project x without a tracker that has projects"),
    ],
)
def test_refused_at_the_start(flags, expected, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trackio" else find(name))
    with pytest.raises(UserError, match=expected):
        train_sft.check(["--pretrain", "m", "--dataset", "d", *flags.split()])


@pytest.mark.parametrize(
    ("mode", "has_key", "refused"),
    [("online", False, "it has no key"), ("online", None, "40"), ("online", True, ""), ("offline", False, "")],
)
def test_a_key_of_wandb_is_looked_for_before_data_is_read(monkeypatch, mode, has_key, refused):
    """By the package's own search, which asks no person here."""

    def login(relogin=None, verify=True, prompt=True):
        assert not (verify or prompt)
        if has_key is None:
            raise ValueError("API key must have 40+ characters")
        return has_key

    wandb, settings = ModuleType("wandb"), SimpleNamespace(mode=mode)
    wandb.login, wandb.setup = login, lambda: SimpleNamespace(settings=settings)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    line = ["--pretrain", "m", "--dataset", "d", "--use_wandb"]
    with pytest.raises(UserError, match=f"--report_to wandb: .*{refused}.*WANDB_MODE") if refused else nullcontext():
        check_trackers(train_sft.parse(line)[0].output)
    monkeypatch.setenv("RANK", "1")  # rank 0 alone has trackers
    check_trackers(train_sft.parse(line)[0].output)
    monkeypatch.delenv("RANK")
    wandb.login = lambda relogin=None, verify=True: pytest.fail("an older version would ask a person")
    check_trackers(train_sft.parse(line)[0].output)


@pytest.mark.parametrize("is_disabled", [True, False])
def test_a_disabled_wandb_says_so(monkeypatch, tmp_path, capsys, is_disabled):
    wandb = ModuleType("wandb")
    wandb.init = lambda **options: SimpleNamespace(id="a", disabled=is_disabled)  # what the package returns has both
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    Mirrors(str(tmp_path), ["wandb"], "mine")
    assert ("WANDB_MODE=disabled, so nothing is logged there" in capsys.readouterr().out) == is_disabled
