"""Logs of other trainers: read, replayed with the plain loop, and planted differences named; gradients audited.

The installed TRL and HF Trainer train a tiny model in this process. The formats of the others are written as their
sources print them.
"""

import io
import json
import os
import pickle
import shlex
import shutil
import time
import zipfile
from pathlib import Path

import pytest
import torch
from doc_blocks import read_blocks, statements
from launch import ROOT
from transformers import SchedulerType

import compare_backends
from trainer.compare.other_trainers import their_config
from trainer.compare.other_trainers.adapters import HFTrainerAdapter, audit, audit_text
from trainer.compare.other_trainers.plain_reference import make_job
from trainer.compare.other_trainers.their_config import read_their_config, training_arguments
from trainer.compare.runs.logs import read_run
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    make_demo(str(folder))
    return folder


def options(output: Path, **changes) -> dict:
    base = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    base |= {"learning_rate": 1e-3, "logging_steps": 1, "bf16": False, "use_cpu": True, "report_to": "none"}
    base |= {"save_strategy": "steps", "save_steps": STEPS, "disable_tqdm": True, "max_grad_norm": 1.0}
    return {"output_dir": str(output), **base, **changes}


def model_of(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def train_trl(folder: Path, name: str, kind=None, **changes) -> Path:
    """Train with TRL's SFTTrainer, and write the rows that it made beside its folder. Returns the folder."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = [json.loads(line)["messages"] for line in (folder / "sft.jsonl").read_text().splitlines()[:60]]
    trainer = (kind or SFTTrainer)(
        model=model_of(folder),
        args=SFTConfig(**options(folder / name, **changes)),
        train_dataset=Dataset.from_list([{"prompt": row[:1], "completion": row[1:]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.train()
    trainer.train_dataset.to_json(str(folder / f"{name}.jsonl"))
    return folder / name


def train_hf(folder: Path, name: str, rows: list[dict], **changes) -> Path:
    from datasets import Dataset
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(folder / "model"))
    arguments = TrainingArguments(**options(folder / name, **changes))
    data = Dataset.from_list([{key: row[key] for key in ("input_ids", "labels")} for row in rows])
    Trainer(model_of(folder), arguments, train_dataset=data, data_collator=collator).train()
    return folder / name


@pytest.fixture(scope="module")
def trl_run(folder) -> Path:
    os.environ |= {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "TENSORBOARD_LOGGING_DIR": str(folder / "events"),
    }
    import wandb

    log = train_trl(folder, "trl", report_to=["tensorboard", "wandb"])
    wandb.finish()
    written, until = next(folder.rglob("*.wandb")), time.monotonic() + 60
    while b"train_loss" not in written.read_bytes():  # by a process of wandb's own, late on a busy machine
        assert time.monotonic() < until, "wandb has not written the last row"
        time.sleep(0.2)
    return log


@pytest.fixture(scope="module")
def rows(trl_run, folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "trl.jsonl").read_text().splitlines()]


def compare(folder: Path, log: Path, *more: str, args: Path | None = None) -> tuple[int, list[str]]:
    where = ["--data", str(folder / "trl.jsonl"), "--model", str(folder / "model")]
    arguments = args or log / f"checkpoint-{STEPS}/training_args.bin"
    line = ["--logs", f"theirs={log}", "--reference", "plain", *where, "--training_args", str(arguments), *more]
    return compare_backends.main(line), line


# --- logs


def test_all_logs_of_a_trl_run_hold_the_same_curve(trl_run, folder):
    state = read_run("state", trl_run)
    assert list(state.steps) == list(range(1, STEPS + 1)) and state.steps[1].lr == 1e-3
    events = folder / "events"
    offline = next(folder.rglob("*.wandb"))
    for other in (read_run("tensorboard", events), read_run("wandb", offline), read_run("wandb", offline.parent)):
        assert list(other.steps) == list(state.steps)
        for step, row in state.steps.items():
            assert other.steps[step].loss == pytest.approx(row.loss, rel=1e-6)
            assert other.steps[step].grad_norm == pytest.approx(row.grad_norm, rel=1e-6)
            assert other.steps[step].lr == pytest.approx(row.lr, rel=1e-6)


TORCHTITAN = (
    "[rank0]:[titan] 2025-01-01 10:00:00,000 - root - INFO - \x1b[31mstep: {0:2}  \x1b[32mloss: {1:8.5f}  "
    "\x1b[38;2;180;60;0mgrad_norm: {2:7.4f}  \x1b[36mmemory:  1.00GiB(1.25%)  \x1b[34mtps: 1,234  \x1b[39m\n"
)
VERL = (
    "(TaskRunner pid=7) step:{0} - actor/pg_loss:{1} - actor/grad_norm:np.float64({2}) - actor/lr:1e-06 - "
    "timing_s/gen:3.5\n"
)
NEMO = (
    "\n========================= Step {0}/3 =========================\n▶ Taking a training step...\n"
    "\n📊 Training Results:\n  • Loss: {1}\n  • Mean Microbatch Size: 2\n"
)
HF_TEXT = "  7%|7         | {0}/3 [00:01<00:02]{{'loss': '{1}', 'grad_norm': '{2}', 'learning_rate': '1e-06', 'epoch': '0.1'}}\n"
FACTORY = '{{"current_steps": {0}, "total_steps": 3, "loss": {1}, "lr": 1e-06, "epoch": 0.1, "percentage": 33.3}}\n'
VERL_LINES = '{{"step": {0}, "data": {{"train/loss": {1}, "train/grad_norm": {2}, "train/lr(1e-3)": 0.001}}}}\n'
CURVE = [(1, 2.125, 0.5), (2, 1.75, 0.25), (3, 1.0625, 0.125)]


@pytest.mark.parametrize(
    ("name", "line", "has_norm"),
    [
        ("titan.log", TORCHTITAN, True),
        ("verl.log", VERL, True),
        ("nemo.log", NEMO, False),
        ("axolotl.log", HF_TEXT, True),
        ("trainer_log.jsonl", FACTORY, False),
        ("verl.jsonl", VERL_LINES, True),
    ],
)
def test_printed_logs_and_json_lines(name, line, has_norm, tmp_path):
    path = tmp_path / name
    path.write_text("some other line\n" * (path.suffix == ".log") + "".join(line.format(*values) for values in CURVE))
    run = read_run("theirs", path)
    found = [(step, row.loss, row.grad_norm) for step, row in run.steps.items()]
    assert found == [(step, loss, norm if has_norm else None) for step, loss, norm in CURVE]
    assert run.rounding == 5e-5  # 1.0625 has four decimals
    # two such logs are compared as any others are
    assert compare_backends.main(["--logs", f"a={path}", f"b={path}"]) == 0


def test_nemo_counts_its_steps_anew_in_each_epoch(tmp_path):
    (tmp_path / "nemo.log").write_text("".join(NEMO.format(*values) for values in CURVE * 2))
    assert list(read_run("theirs", tmp_path / "nemo.log").steps) == [1, 2, 3, 4, 5, 6]


def test_a_folder_without_a_log_is_one_line(tmp_path):
    with pytest.raises(UserError, match="holds no log that can be read"):
        read_run("theirs", tmp_path)


BROKEN_LOGS = {
    "trainer_state.json": ("{", '{"log_history": null}', '{"log_history": 5}', '{"log_history": ' + "[" * 100_000),
    "checkpoint-x/trainer_state.json": ('{"log_history": [{"step": 1, "loss": 1.0}]}',),
    "trainer_log.jsonl": ('{"current_steps": "a", "loss": 1}\n', '{"current_steps": 1, "loss": null}\n', "[" * 100_000),
    "run.wandb": (":W&B\0\0\0" + "\0\0\0\0\5\0\1" + "\7" * 5, "x", ""),
    "metrics.jsonl": (
        '{"step": 1, "loss": 1' + "0" * 5000 + "}\n",
        "[" * 100_000,
        '{"step": 1, "loss": NaN, "grad_norm": 1}\n',
    ),
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN_LOGS.items() for text in texts],
                         ids=lambda value: None)  # fmt: skip
def test_a_broken_log_is_one_line(name, text, tmp_path, capsys):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert compare_backends.main(["--logs", f"a={tmp_path}", f"b={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error


def test_odd_rows_of_a_log_are_left_out(tmp_path):
    rows = [1, None, {"step": "a", "loss": 1.0}, {"step": float("inf"), "loss": 1.0}, {"step": 2, "loss": 1.5}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert list(read_run("theirs", tmp_path).steps) == [2]


# --- replays


def test_a_trl_run_agrees_with_the_plain_loop(trl_run, folder, capsys):
    assert compare(folder, trl_run, "--json", str(folder / "out.json"))[0] == 0
    assert "theirs agrees with the plain loop at all 6 logged steps" in capsys.readouterr().out
    found = json.loads((folder / "out.json").read_text())
    assert found["steps"] == STEPS and found["max_rel_loss"] < 1e-6 and found["max_rel_grad_norm"] < 1e-5


def test_an_enumeration_may_be_pickled_by_its_name():
    class ByName:
        def __reduce__(self):  # as Python 3.11.2 writes SchedulerType.COSINE
            return getattr, (SchedulerType, "COSINE")

    for value in (ByName(), SchedulerType.COSINE):
        assert their_config._plain(their_config._Reader(io.BytesIO(pickle.dumps(value))).load()) == "cosine"


def test_an_hf_run_with_other_options_agrees_with_the_plain_loop(rows, folder, capsys):
    """Two epochs with a short last batch, means over two steps in the log, weight decay, warm-up, a cosine."""
    changes = {"max_steps": -1, "num_train_epochs": 2, "logging_steps": 2, "weight_decay": 0.1, "warmup_steps": 2}
    changes |= {"lr_scheduler_type": "cosine", "save_strategy": "epoch", "data_seed": 5}
    log = train_hf(folder, "hf", rows[:21], **changes)
    (folder / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:21]))
    args = next(log.glob("checkpoint-*/training_args.bin"))
    line = ["--logs", f"theirs={log}", "--reference", "plain", "--data", str(folder / "short.jsonl")]
    line += ["--model", str(folder / "model"), "--training_args", str(args)]
    assert compare_backends.main(line) == 0
    assert "agrees with the plain loop at all 6 logged steps" in capsys.readouterr().out


def mean_of_means():
    from trl import SFTTrainer

    class MeanOfMeans(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, None)
            return loss / self.current_gradient_accumulation_steps

    return MeanOfMeans


def test_the_mean_of_means_over_uneven_micro_batches_is_named(trl_run, folder, capsys):
    log = train_trl(folder, "means", mean_of_means())
    assert compare(folder, log)[0] == 1
    told = capsys.readouterr().out
    assert "theirs differs from the plain loop at step 1: its loss is" in told
    assert "same curve with this mistake: a mean of the means of micro-batches" in told
    assert told.count("this mistake") == 1


@pytest.mark.parametrize(
    ("changes", "whole", "step", "named"),
    [
        ({}, True, 1, "a loss on the prompt's tokens too"),
        ({"train_sampling_strategy": "sequential"}, False, 1, "rows in the order of the file"),
        ({"max_grad_norm": 0.0}, False, 3, "no clipping of the gradient"),
        ({"learning_rate": 2e-3}, False, 2, "learning rate at step 1: 0.002, the configuration gives 0.001"),
    ],
    ids=["prompt", "order", "clipping", "rate"],
)
def test_other_planted_differences_are_named(changes, whole, step, named, trl_run, rows, folder, capsys, request):
    """The HF Trainer does something else than the configuration, which is that of the clean run, says."""
    if whole:
        rows = [{**row, "labels": row["input_ids"]} for row in rows]
    log = train_hf(folder, request.node.callspec.id, rows, **changes)
    code, _ = compare(folder, log, args=trl_run / f"checkpoint-{STEPS}/training_args.bin")
    told = capsys.readouterr().out
    assert code == 1 and f"at step {step}: its" in told and named in told, told


def test_the_order_may_come_from_a_file(trl_run, rows, folder, capsys):
    log = train_hf(folder, "sequential", rows, train_sampling_strategy="sequential")
    ids = folder / "ids.jsonl"
    ids.write_text("".join(f"{list(range(i, i + 4))}\n" for i in range(0, 4 * STEPS, 4)))
    args = trl_run / f"checkpoint-{STEPS}/training_args.bin"
    assert compare(folder, log, "--sample_ids", str(ids), args=args)[0] == 0
    ids.write_text("[0, 1, 2, 3]\n[4, 5, 6, 99]\n")
    capsys.readouterr()
    assert compare(folder, log, "--sample_ids", str(ids), args=args)[0] == 2
    assert "--sample_ids: line 2 names a row beyond the 60 of --data" in capsys.readouterr().err


def test_two_ranks_share_out_the_batches_of_a_step(trl_run, rows, folder):
    """With 2 ranks and no accumulation, a step has the micro-batches that 1 rank accumulates."""
    values = read_their_config(str(trl_run / f"checkpoint-{STEPS}/training_args.bin"))
    where = (str(folder / "trl.jsonl"), str(folder / "model"))
    one = make_job(*where, values, 1, None, STEPS)
    two = make_job(*where, {**values, "gradient_accumulation_steps": 1}, 2, None, STEPS)
    assert one.steps == two.steps and all(len(batches) == 2 for batches in one.steps)


# --- audits


class HalfOfQNorm(HFTrainerAdapter):
    """As if two ranks had not added up the gradients of norms between them."""

    def step(self, batch):
        loss, gradients = super().step(batch)
        return loss, {name: grad / 2 if "q_norm" in name else grad for name, grad in gradients.items()}


class AddsTwice(HFTrainerAdapter):
    def step(self, batch):
        loss, gradients = super().step(batch)
        return loss, {name: 2 * grad for name, grad in gradients.items()}


class SwapsRows(HFTrainerAdapter):
    """As if a gathered weight had its shards in the wrong order."""

    def step(self, batch):
        loss, gradients = super().step(batch)
        name = "model.layers.1.mlp.down_proj.weight"
        return loss, {**gradients, name: torch.cat(gradients[name].chunk(2)[::-1])}


class Forgets(HFTrainerAdapter):
    def step(self, batch):
        loss, gradients = super().step(batch)
        return loss, {name: grad for name, grad in gradients.items() if "embed" not in name}


@pytest.fixture(scope="module")
def job(trl_run, folder):
    values = read_their_config(str(trl_run / f"checkpoint-{STEPS}/training_args.bin"))
    return make_job(str(folder / "trl.jsonl"), str(folder / "model"), values, 1, None, 1), values


@pytest.mark.parametrize("name", ["hf", "trl"])
def test_hf_and_trl_pass_an_audit(name, trl_run, folder, capsys):
    line = ["--audit", name, "--data", str(folder / "trl.jsonl"), "--model", str(folder / "model")]
    line += ["--training_args", str(trl_run / f"checkpoint-{STEPS}/training_args.bin")]
    assert compare_backends.main(line) == 0
    assert f"gradients: 24 compared, 0 beyond 0.0001\nPASS {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("adapter", "wrong", "told"),
    [
        (HalfOfQNorm, {f"model.layers.{i}.self_attn.q_norm.weight" for i in range(2)}, "0.5 times the gradients"),
        (SwapsRows, {"model.layers.1.mlp.down_proj.weight"}, "model.layers.1.mlp.down_proj.weight: "),
        (Forgets, set(), "no gradient of model.embed_tokens.weight"),
        (AddsTwice, None, "2 times the gradients"),
    ],
)
def test_gradients_that_are_wrong_by_layout_are_named(adapter, wrong, told, job):
    found = audit(adapter(), *job)
    text = audit_text("planted", found)
    assert not found.passed and found.relative_loss < 1e-6 and told in text and "FAIL planted" in text, text
    assert set(found.wrong) == (set(found.differences) if wrong is None else wrong)


# --- the page


def test_the_examples_of_the_page(folder, trl_run, tmp_path, monkeypatch, capsys):
    """The page in a folder: its Python runs, and its commands print what the page shows."""
    shutil.copytree(folder / "model", tmp_path / "my_model")
    lines = (folder / "sft.jsonl").read_text().splitlines()[:64]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    blocks = read_blocks(ROOT / "docs/other_trainers.md", "other_trainers")
    sources = [block.text for block in blocks if block.language == "python"]
    for source in sources[:2]:
        exec(compile(source, "page", "exec"), {"__name__": "__main__"})
    (tmp_path / "my_adapter.py").write_text(sources[2])
    (tmp_path / "runs/a").mkdir()
    shutil.copy(
        next(Path("runs/trl").glob("*/trainer_state.json")), "runs/a"
    )  # the first command compares any two logs
    texts = [text.replace("\\\n", " ") for block in blocks if block.language == "bash" for _, text in statements(block)]
    commands = [shlex.split(text)[2:] for text in texts if "compare_backends.py" in text]
    capsys.readouterr()
    assert [compare_backends.main(command) for command in commands] == [0, 0, 1, 0, 1]
    told = capsys.readouterr().out
    shown = [block.text.splitlines() for block in blocks if block.language == "text"]
    assert all(
        line in told for lines in shown for line in lines if line.startswith(("trl ", "hf ", "PASS", "FAIL", "  the"))
    )
    monkeypatch.setenv("RANK", "1")
    assert compare_backends.main(commands[-1]) == 0 and "my_adapter" not in capsys.readouterr().out


# --- refusals


def test_a_pickle_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil()))
    read_their_config(str(tmp_path / "training_args.bin"))
    assert not (tmp_path / "ran").exists()


def test_refusals(trl_run, folder, tmp_path, capsys):
    def error(*line: str) -> str:
        assert compare_backends.main(list(line)) == 2
        return capsys.readouterr().err

    log, data, model = f"a={trl_run}", str(folder / "trl.jsonl"), str(folder / "model")
    flags = ["--logs", log, "--reference", "plain", "--data", data]
    assert "--model: missing" in error(*flags)
    assert "--data: a replay compares one log" in error("--logs", log, "--data", data)
    assert "--world_size: has no effect" in error("--logs", log, f"b={trl_run}", "--world_size", "2")
    (tmp_path / "args.yaml").write_text("packing: true\n")
    whole = [*flags, "--model", model, "--training_args", str(tmp_path / "args.yaml")]
    assert "packing True, which the plain loop does not do" in error(*whole)
    (tmp_path / "args.yaml").write_text("optim: adafactor\n")
    assert "optim adafactor" in error(*whole)
    (tmp_path / "args.yaml").write_text("max_steps: 6\n")
    whole[5] = str(folder / "sft.jsonl")
    assert "row 1 has no input_ids" in error(*whole)
    audit = ["--audit", "nowhere:Adapter", "--data", data, *whole[6:]]
    assert "--audit: nowhere:Adapter" in error(*audit)
    assert "--audit: math:pi" in error("--audit", "math:pi", *audit[2:])
    assert "has no load and step" in error("--audit", "json:JSONDecoder", *audit[2:])
    whole[5] = data
    assert "--device: toaster" in error(*whole, "--device", "toaster")
    assert "--model: " in error(*whole[:7], str(tmp_path / "nowhere"), *whole[8:])
    wrong = {
        "learning_rate: fast": "learning_rate 'fast'",
        "max_steps: [1]": "max_steps [1]",
        "adam_beta1: 2": "adam_beta1 2",
    }
    wrong |= {"gradient_accumulation_steps: -1": "gradient_accumulation_steps -1", "seed: x": "seed 'x'"}
    for text, message in wrong.items():
        (tmp_path / "args.yaml").write_text(text)
        assert message in error(*whole)
    (tmp_path / "args.yaml").write_text("max_steps: 6\nper_device_train_batch_size: 100\ndataloader_drop_last: true")
    assert "gives no batch of 100 rows" in error(*whole)
    rows = {
        '{"input_ids": ["a"]}': "no list of token numbers",
        '{"input_ids": [99999, 1]}': "token 99999, but the model has",
    }
    rows |= {'{"input_ids": [5, 6], "labels": [5]}': "do not have the 2 places"}
    (tmp_path / "args.yaml").write_text("max_steps: 6")
    whole[5] = str(tmp_path / "rows.jsonl")
    for text, message in rows.items():
        (tmp_path / "rows.jsonl").write_text((text + "\n") * 60)
        assert message in error(*whole)


def test_yaml_numbers_that_are_texts_are_numbers(tmp_path):
    """YAML reads 2e-5 as a text, and configurations are full of it."""
    (tmp_path / "args.yaml").write_text("learning_rate: 2e-5\nmax_steps: 6\n")
    values = read_their_config(str(tmp_path / "args.yaml"))
    assert values["learning_rate"] == "2e-5" and training_arguments(values, str(tmp_path)).learning_rate == 2e-5
