"""Names on the hub are asked for in one request, before libraries load. The hub is played by its client's own errors."""

import itertools
import subprocess
import sys
import time

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError
from launch import _environment

from trainer.cli import train_ppo
from trainer.datasets.files.set_names import names_on_hub
from trainer.errors import UserError
from trainer.model_folders.folder_names import check_model_name, check_on_hub
from trainer.runs import flag_checks

ANSWER = httpx2.Response(404, request=httpx2.Request("GET", "https://huggingface.co/api/models/a/b"))
ERRORS = {
    "no such model": RepositoryNotFoundError("404\nlong", response=ANSWER),
    "let you in": GatedRepoError("403\nlong", response=ANSWER),
    "HF_HUB_OFFLINE is set": OfflineModeIsEnabled("offline"),
    "no answer from https://huggingface.co: no such host; HF_ENDPOINT=ADDRESS asks a mirror": httpx2.ConnectError(
        "no such host"
    ),
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A cache without a model, and a function that makes the hub's client raise an error."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))

    def answer(error):
        def repo_info(self, name, *, repo_type, timeout):
            if error:
                raise error

        monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)

    return answer


@pytest.mark.parametrize("reason", ERRORS)
def test_what_the_hub_does_not_give_is_one_line_with_a_reason(hub, reason, tmp_path, capsys):
    hub(ERRORS[reason])
    with pytest.raises(UserError) as refused:
        check_model_name("a/b", "--pretrain")
    line = str(refused.value)
    assert line.startswith("--pretrain: a/b is not a folder, and the hub does not give it (") and reason in line
    assert "\n" not in line and "long" not in line
    for kind, folder in (("model", "models--a--b"), ("dataset", "datasets/a___b")):  # a cache serves alone
        (tmp_path / folder).mkdir(parents=True)
        check_on_hub("a/b", "--pretrain", kind)
    assert constants.HF_HUB_OFFLINE == ("no answer" in reason) == ("taken from the cache" in capsys.readouterr().out)


def test_what_the_hub_has_passes_and_a_name_that_cannot_be_is_refused(hub):
    hub(None)
    check_model_name("a/b", "--pretrain")
    with pytest.raises(UserError, match="--teacher: names no model"):
        check_model_name(" ", "--teacher")


def test_names_of_repositories_among_those_of_files(tmp_path):
    (tmp_path / "here.jsonl").write_text("{}\n")
    assert names_on_hub(f"{tmp_path}/here.jsonl#1, org/set:part#5,org/other") == ["org/set", "org/other"]


def test_without_a_network_the_answer_comes_at_once(tmp_path):
    """Nothing listens at the address of the hub. The libraries would ask six times, within 23 seconds."""
    environment = {
        **_environment(),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
    }
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    sets = {"--pretrain": ["--dataset", "rows.jsonl", "--pretrain", "a/b"], "--dataset": ["--dataset", "a/b"]}
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    sets["--dataset"] += ["--pretrain", "model"]
    for flag, words in sets.items():
        command = [sys.executable, "-X", "importtime", "-m", "trainer.cli", "sft", *words]
        started = time.monotonic()
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
        *before, last = [line for line in ended.stderr.splitlines() if "import time:" not in line]
        assert ended.returncode == 2 and last.startswith(f"error: {flag}: a/b is not a f") and "127.0.0.1:9" in last, (
            ended
        )
        assert not before and "| torch\n" not in ended.stderr and time.monotonic() - started < 20


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
def test_a_run_folder_names_its_model(file, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / file).write_text("{}")
    with pytest.raises(UserError, match=f"contains no config.json.*Did you mean {tmp_path}/model?"):
        check_model_name(str(tmp_path), "--pretrain")


@pytest.mark.parametrize("held", ["a.gguf", "a.gguf config.json"])
def test_a_folder_of_a_gguf_file_says_how_to_convert_it(held, tmp_path):
    for name in held.split():
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=f"Convert it: trainer export {tmp_path}/a.gguf MODEL"):
        check_model_name(str(tmp_path), "--pretrain")


# faults of one command, by what it costs to find them: flags alone, this machine's files, one file's content, the hub
FAULTS = {
    "a pair of flags": (["--lora_dropout", "0.1"], "--lora_dropout"),
    "a folder in use": (["--output_dir", "used"], "--output_dir"),
    "an absent file": (["--eval_dataset", "none.jsonl"], "--eval_dataset none.jsonl"),
    "a folder without a model": (["--ref_model", "used", "--init_kl_coef", "0.1"], "--ref_model"),
    "texts beyond the positions": (["--generate_max_len", "99999"], "--prompt_max_len"),
    "a name that the hub lacks": (["--dataset", "org/none"], "hub"),
}


@pytest.mark.parametrize("cheap, dear", itertools.combinations(FAULTS, 2))
def test_the_cheaper_check_comes_first(cheap, dear, tmp_path, monkeypatch):
    """All come before a library is imported: `check` is what a command does before its ranks start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used/metrics.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"max_position_embeddings": 2048}')
    (tmp_path / "model/model.safetensors").write_text("")
    (tmp_path / "rows.jsonl").write_text("{}\n")

    def asked(name, flag, kind):
        raise UserError("hub", f"{name} is asked for")

    monkeypatch.setattr(flag_checks, "check_on_hub", asked)
    flags = ["--pretrain", "model", "--dataset", "rows.jsonl", "--reward_func", "format"]
    for fault in (dear, cheap):
        with pytest.raises(UserError) as refused:
            train_ppo.check([*flags, *FAULTS[fault][0]])
        assert refused.value.where.startswith(FAULTS[fault][1]), refused.value
    with pytest.raises(UserError) as refused:
        train_ppo.check([*flags, *FAULTS[dear][0], *FAULTS[cheap][0]])
    assert refused.value.where.startswith(FAULTS[cheap][1]), refused.value
