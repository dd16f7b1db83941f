"""Runs that a stranger planted: no command that reads one runs its code, fetches its addresses or leaves its folder."""

import functools
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.console import Console

from trainer import limits
from trainer.compare.certificates import plain_replay, verification
from trainer.compare.certificates.certificate_checks import check_files, check_saved
from trainer.compare.certificates.rights import PLAIN_TEXTS, READ_HERE, SWITCHES, is_value
from trainer.datasets.demos.demo import make_demo
from trainer.distributed.mesh import start_process_group
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.generating_flags import OnlineDPOArguments
from trainer.flags.parse_flags import flags_of, flat
from trainer.flags.rules import COMMANDS
from trainer.reports import certificate
from trainer.reports.live_view import view
from trainer.reports.report_page import page
from trainer.reports.run_rows import read_rows
from trainer.runs.outputs import final_values, write_model_card

PLANTED = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import PreTrainedTokenizerFast
class Planted(PreTrainedTokenizerFast):
    pass
def reward_func(prompts, responses, labels):
    return [0.0] * len(responses)
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make_demo(str(folder))
    return folder


@pytest.fixture
def planted(demo, tmp_path):
    """make(**arguments) plants a run whose certificate has these flags, and whose model folder has code."""
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    run.mkdir()
    for file in (demo / "model").iterdir():
        (model / file.name).symlink_to(file)
    (model / "planted.py").write_text(PLANTED.format(marker=str(tmp_path / "executed")))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").unlink()
    settings["auto_map"] = {"AutoTokenizer": [None, "planted.Planted"]}
    settings["tokenizer_class"] = "Planted"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))

    def make(command="train_sft", kind=SFTArguments, left_out=(), **arguments) -> str:
        own = {"pretrain": str(model), "dataset": str(demo / "sft.jsonl"), "apply_chat_template": True, **arguments}
        values = {name: value for name, value in (flat(kind()) | own).items() if name not in left_out}
        facts = {"config": values, "versions": {}, "mesh": {}, "data": {}, "total_steps": 1}
        row = {"step": 1, "epoch": 0, "loss": 1.0, "grad_norm": 1.0, "lr": 0.0, "batch_hash": "0", "tokens": 1}
        rows = [{"event": "start", "step": 0, **facts}, row]
        (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        content = {
            "format": certificate.FORMAT, "command": command, "arguments": values, "mesh": {}, "versions": {},
            "models": {"pretrain": {}}, "data": {"files": {}, "ledger": {}, "data": ""},
            "steps": certificate.describe_steps([row]), "files": certificate.hash_run_files(str(run)),
            "saved_models": {}, "checkpoints": {}, "resumed_after_steps": [], "total_steps": 1,
        }  # fmt: skip
        certificate.write(str(run), content)
        return str(run)

    return make


def with_plain_tokenizer(folder: Path, demo: Path) -> None:
    settings = (demo / "model/tokenizer_config.json").read_bytes()
    (folder / "model/tokenizer_config.json").write_bytes(settings)


def verified(run: str, *, certify=None, rerun=None, flags=(), trusted=False) -> bool:
    places = {"dataset": None, "pretrain": None}
    return verification.verify_run(run, places, certify, "cpu", rerun, list(flags), trusted)


def test_a_certificate_cannot_make_verify_run_execute_the_code_of_its_model(planted, tmp_path, capsys):
    run = planted(trust_remote_code=True)
    verified(run)
    told = capsys.readouterr().out
    assert not (tmp_path / "executed").exists()
    assert "not granted  --trust_remote_code: " in told and "order        not checked" in told
    verified(run, trusted=True)  # the user's own flag grants it
    assert (tmp_path / "executed").exists()


def test_nor_does_a_certificate_without_the_flag(planted, tmp_path):
    verified(planted())
    assert not (tmp_path / "executed").exists()


def test_certify_and_rerun_name_the_flag_that_is_missing(planted, tmp_path):
    run = planted(trust_remote_code=True)
    for option in ({"certify": 1}, {"rerun": str(tmp_path / "again")}):
        with pytest.raises(UserError, match="--trust_remote_code"):
            verified(run, **option)
    assert not (tmp_path / "executed").exists() and not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"train_batch_size": 0}, {"train_batch_size": None}, {"learning_rate": "x"}, {"lr_warmup_ratio": 1e308},
        {"lr_scheduler": "x"}, {"dataset_flags": "[" * 5000}, {"param_dtype": []}, {"seed": -1}, {"max_len": -1},
    ],
)  # fmt: skip
def test_odd_values_of_a_certificate_are_a_difference(changes, planted, demo, tmp_path, capsys):
    run = planted(**changes)
    with_plain_tokenizer(tmp_path, demo)
    assert not verified(run)
    output = capsys.readouterr().out
    assert "cannot be compared" in output or "cannot be read as it was" in output, output
    with pytest.raises(UserError) as error:
        verified(run, certify=1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["learning_rate", "total_steps", "warmup_steps", "min_lr_ratio", "deep"])
def test_numbers_beyond_all_bounds_and_deep_values_are_one_line(name, planted):
    run = planted()
    content = certificate.read(run)
    deep = functools.reduce(lambda inner, _: [inner], range(900), 0)
    (content if name == "total_steps" else content["arguments"])[name] = deep if name == "deep" else 10**400
    certificate.write(run, content)
    with pytest.raises(UserError, match="in each other" if name == "deep" else "a number of 1329 bits"):
        verified(run)


def test_the_number_of_processes_is_of_this_machine(planted, demo, tmp_path, monkeypatch):
    started = []

    def load(args, *_) -> tuple[list, None]:
        started.append(args.data.dataset_num_proc)
        return [], None

    with_plain_tokenizer(tmp_path, demo)
    monkeypatch.setattr(verification, "run_here", lambda command, line: started.append(Path(line[1]).read_text()))
    monkeypatch.setattr(verification, "compare_curves", lambda *_: [])
    run = planted(dataset_num_proc=12)
    monkeypatch.setitem(plain_replay.LOADERS, "train_sft", load)
    content = certificate.read(run)
    plain_replay.planned_batches(content, str(tmp_path / "model"))
    verification.rerun(content, str(tmp_path / "again"), [], set())
    assert started[0] == 1 and "num_proc" not in started[1]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("reward_func", "{folder}/model/planted.py"),
        ("env", "{folder}/model/planted.py"),
        ("remote_rm_url", "http://127.0.0.1:9/"),
        ("remote_rm_api_key", "/etc/hostname"),
        ("engine_urls", "http://127.0.0.1:9/"),
        ("reward_pretrain", "somebody/model"),
        ("rollouts_from", "/etc/hostname"),
        ("ref_model", "somebody/model"),
    ],
)
def test_a_rerun_takes_no_right_from_a_certificate(flag, value, planted, tmp_path, monkeypatch):
    """Also if the certificate lies about the kind of run: without rollout_batch_size it counts as one of rows."""
    started = []
    monkeypatch.setattr(verification, "run_here", lambda *line: started.append(line))
    value = value.format(folder=tmp_path)
    run = planted("train_dpo", OnlineDPOArguments, ("rollout_batch_size",), online=True, **{flag: value})
    monkeypatch.setitem(COMMANDS, "train_dpo", OnlineDPOArguments)
    with pytest.raises(UserError, match=rf"--{flag}: certificate\.json asks for .* grants no right"):
        verified(run, rerun=str(tmp_path / "again"))
    assert started == [] and not (tmp_path / "executed").exists()


@pytest.mark.parametrize("flag", ["pretrain", "dataset"])
def test_a_hub_name_of_a_certificate_is_not_fetched(flag, planted, tmp_path, monkeypatch, capsys):
    def fetched(name, *_, **__):
        raise AssertionError(f"{name} was fetched")

    monkeypatch.setattr("trainer.models.model_loading.snapshot_download", fetched)
    monkeypatch.setattr("datasets.load_dataset", fetched)
    run = planted(**{flag: "stranger/name"})
    verified(run)
    assert f"not granted  --{flag}: stranger/name is not here" in capsys.readouterr().out
    for option in ({"certify": 1}, {"rerun": str(tmp_path / "again")}):
        with pytest.raises(UserError, match=f"--{flag}"):
            verified(run, **option)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", ".."])
def test_names_in_a_certificate_do_not_leave_the_run_folder(name, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "secret").write_text("secret")
    files = {name: {"size": 6, "blake2b": "0"}}
    assert "is no file directly in" in check_files(str(run), {"files": files})[0]
    (run / "model").mkdir()
    assert "is no file directly in" in check_saved(str(run), {"saved_models": {"model": files}})[0]
    assert "leaves the run folder" in check_saved(str(run), {"saved_models": {"../run": {}}})[0]


def test_every_text_flag_is_a_value_or_a_right():
    """A new flag of free text is a right until somebody says otherwise. The lists name no flag that is gone."""
    hints = {field.name: hint for command in COMMANDS.values() for field, hint in flags_of(command)}
    assert hints.keys() >= PLAIN_TEXTS | READ_HERE | SWITCHES
    rights = {name for name, hint in hints.items() if not is_value(name, hint)}
    assert {"trust_remote_code", "use_wandb", "reward_func", "env", "remote_rm_url", "save_path", "pretrain"} <= rights
    assert not {"learning_rate", "seed", "backend", "param_dtype", "input_template", "reward_weights"} & rights
    assert os.sep not in "".join(PLAIN_TEXTS)


EVIL = "</pre><script>alert(1)</script>\x1b[2J|`[x](javascript:y)"


def test_a_report_of_a_planted_run_has_no_markup_of_it(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    config = {"pretrain": EVIL, "dataset": EVIL, "backend": EVIL, EVIL: EVIL, "param_dtype": "fp32"}
    facts = {"config": config, "versions": {EVIL: EVIL}, "mesh": {EVIL: 1}, "data": {EVIL: EVIL}, "total_steps": 2}
    rows = [{"event": "start", "step": 0, **facts}]
    rows += [
        {"step": step, "loss": 1.0 / step, "grad_norm": 1.0, "lr": 0.1, EVIL: step, "reward": 0.5} for step in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {"prompt": EVIL, "response": EVIL, "score": EVIL, "label": EVIL, EVIL: 1}
    (run / "rollouts.jsonl").write_text(
        json.dumps({"rollout": 0, "samples": [sample]}) + "\n" + json.dumps(sample) + "\n"
    )
    text = page([read_rows(str(run)), read_rows(str(run))])
    assert "<script" not in text
    shown = io.StringIO()
    Console(file=shown, width=120).print(view(read_rows(str(run)), 120, 0.0))
    assert "\x1b" not in shown.getvalue()


def test_a_model_card_is_plain_text(tmp_path):
    config = {"pretrain": EVIL, "dataset": EVIL, "lora_rank": None}
    progress = SimpleNamespace(step=1, skipped_steps=0, tokens_seen=2)
    write_model_card(str(tmp_path), "train_sft", config, progress, EVIL, {})
    _, front, card = (tmp_path / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == EVIL
    assert "<script" not in card and "\x1b" not in card and card.count("\n# ") == 1
    assert all(line.count("|") - line.count("\\|") == 3 for line in card.splitlines() if line.startswith("|"))


def test_a_model_card_says_what_came_out(tmp_path):
    rows = [{"event": "start"}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5, "reward": 0.25}]
    rows += [{"step": 2, "eval_loss": 1.75, "eval_time": 3.0}, {"event": "end"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')
    config = {
        "pretrain": "org/base",
        "dataset": f"org/data,{tmp_path},org/more:config,org/data:other,org/some#500,org/last:config#5,gone.jsonl#5",
        "lora_rank": 8,
        "loss": "simpo",
        "reward_func": None,
    }
    progress = SimpleNamespace(step=2, skipped_steps=0, tokens_seen=2)
    for command, tag in (("train_dpo", "text-generation"), ("train_rm", "text-classification")):
        results = final_values(str(tmp_path))
        write_model_card(str(tmp_path), command, config, progress, "2 rows", results)
        _, front, card = (tmp_path / "README.md").read_text().split("---\n", 2)
        head = yaml.safe_load(front)
        assert head["datasets"] == ["org/data", "org/more", "org/some", "org/last"]
        assert (head["pipeline_tag"], head["library_name"]) == (tag, "peft")
        for row in (
            "lora_rank | 8",
            "loss | simpo",
            "final loss | 1.5",
            "final eval_loss | 1.75",
            "final reward | 0.25",
        ):
            assert f"| {row} |" in card, card
        assert "reward_func" not in card and "eval_time" not in card
        code = card.split("```python\n")[1].split("```")[0]
        compile(code, "card", "exec")
        assert ("SequenceClassification" in code) == (command == "train_rm") == ("PeftModel" in code)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    write_model_card(str(tmp_path), "train_sft", config, progress, "2 rows", {})
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and "AutoModelForImageTextToText, AutoProcessor" in card


ROWS = ["[" * 100_000, "5", "[1]", "null", '{"step": 9}', '{"step": 1, "loss": "x"}', '{"step": "1", "loss": 3.5}']
ROWS += ['{"step": 1, "loss": NaN}', '{"step": 1, "loss": -Infinity}', '{"step": NaN, "loss": 3.5}', '{"loss": 3.5}']
ROWS += [
    f'{{"step": {"9" * 5000}, "loss": 3.5}}',
    '{"step": true, "loss": 3.5}',
    '{"step": 1, "loss": {"a": 1.5}}',
    "\xff",
]
ROWS += [f'{{"step": 1, "eval_{"a" * 300}": 1.5}}', '{"step": 1, "loss": true}']


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[:40])
def test_results_of_a_strangers_run_are_finite_numbers_of_its_steps(tmp_path, row):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "reward": 0.5}\n' + row.encode("latin-1") + b"\n")
    assert final_values(str(tmp_path), 2) == {"reward": 0.5}


def test_a_line_of_a_strangers_run_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setitem(limits.DEFAULTS, "row_mb", (1, "MB"))
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 0.5}' + b" " * (1 << 20) + b"\n")
    with pytest.raises(UserError, match="row_mb"):
        final_values(str(tmp_path))


def test_a_rank_without_an_address_is_one_line(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="RANK: is set without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        start_process_group(torch.device("cpu"))
