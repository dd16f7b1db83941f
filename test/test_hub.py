"""--push_to_hub: what is uploaded, with an API that writes down its calls; a failure is one line, and the model stays."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
from launch import forked

from trainer.cli import train_sft
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.parse_flags import flat
from trainer.runs.features import hub


class FakeApi:
    """The two calls of huggingface_hub.HfApi that a run makes. `error` is raised by the second one, or by both."""

    calls: ClassVar[list] = []
    error, fails_at = None, "upload_folder"

    def _note(self, name: str, *values) -> None:
        self.calls.append((name, *values))
        if self.error and self.fails_at == name:
            raise self.error

    def create_repo(self, repo_id, *, private=None, exist_ok=False):
        self._note("create_repo", repo_id, private, exist_ok)
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, path_in_repo=None, commit_message=None):
        self._note("upload_folder", repo_id, folder_path, path_in_repo, commit_message)


@pytest.fixture
def api(monkeypatch):
    fake = type("Api", (FakeApi,), {"calls": []})
    monkeypatch.setattr(hub, "HfApi", fake)
    monkeypatch.setattr(hub, "from_rank_0", lambda look: look())
    return fake


def run_with(tmp_path, has_average: bool = False, rank_0: bool = True, **flags):
    models = [str(tmp_path / name) for name in ("model", "model_ema")[: 1 + has_average]]
    for number, model in enumerate(models):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text("{}" + " " * number)
    values = flat(SFTArguments()) | {"output_dir": str(tmp_path / "my-run"), "push_to_hub": True} | flags
    setup = SimpleNamespace(strategy=SimpleNamespace(is_rank_0=lambda: rank_0))
    method = SimpleNamespace(command="train_sft")
    return SimpleNamespace(
        flags=SimpleNamespace(**values), setup=setup, method=method, saved_models=lambda _: models, output_dir=""
    )


def test_the_repository_is_made_before_training_and_the_models_are_uploaded_after_it(api, tmp_path, capsys):
    run = run_with(tmp_path, has_average=True, hub_private_repo=True)
    hub.HUB.before_data(run)
    assert api.calls == [("create_repo", "my-run", True, True)]
    hub.HUB.at_end(run)
    assert api.calls[2::2] == [
        ("upload_folder", "me/my-run", str(tmp_path / "model"), None, "Model of train_sft"),
        ("upload_folder", "me/my-run", str(tmp_path / "model_ema"), "ema", "Model of train_sft"),
    ]
    assert capsys.readouterr().out.count("model pushed to me/my-run\n") == 2


def test_other_ranks_upload_nothing_and_a_public_repository_has_the_default_of_its_owner(api, tmp_path):
    hub.HUB.at_end(run_with(tmp_path, rank_0=False))
    assert api.calls == []
    hub.create(hub.HfApi(), "we/x", private=False)
    assert api.calls == [("create_repo", "we/x", None, True)]


def test_a_dry_run_calls_nothing(api, tmp_path, capsys):
    run = run_with(tmp_path, has_average=True, hub_dry_run=True, hub_model_id="we/x")
    hub.HUB.before_data(run)
    hub.HUB.at_end(run)
    assert api.calls == []
    assert capsys.readouterr().out.splitlines() == [
        "--hub_dry_run: would upload to we/x: config.json (2 bytes)",
        "--hub_dry_run: would upload to we/x/ema: config.json (3 bytes)",
    ]


def test_a_failure_is_one_line_and_the_model_stays(api, tmp_path):
    run = run_with(tmp_path, hub_model_id="we/x")
    api.error = OSError("503 Server Error\nRequest ID: 7")
    with pytest.raises(UserError) as error:
        hub.HUB.at_end(run)
    folder = tmp_path / "model"
    assert str(error.value) == (
        f"--push_to_hub: 503 Server Error. The model is in {folder}. hf upload we/x {folder} tries again."
    )
    assert (folder / "config.json").exists()
    api.fails_at = "create_repo"
    with pytest.raises(UserError, match=r"--push_to_hub: we/x: 503 Server Error\. Give a token that may write"):
        hub.HUB.before_data(run)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--hub_model_id", "a b/c", "--push_to_hub"], "--hub_model_id: .*(allowed: OWNER/NAME)"),
        (["--hub_model_id", "we/x"], "--hub_model_id we/x without --push_to_hub: nothing is uploaded"),
        (["--push_to_hub"], "--push_to_hub without --hub_model_id or --output_dir"),
        (["--push_to_hub", "--hub_model_id", "we/x", "--no_save"], "--push_to_hub with --no_save"),
    ],
)
def test_refused_before_torch(flags, expected, tmp_path):
    with pytest.raises(UserError, match=expected.replace("(", r"\(").replace(")", r"\)")):
        train_sft.check(["--pretrain", "m", "--dataset", "d", *flags])


def test_a_run_says_what_it_would_upload_and_one_without_network_is_refused_at_its_start(tmp_path):
    make_demo(str(tmp_path / "demo"))
    line = [
        "--pretrain",
        f"{tmp_path}/demo/model",
        "--dataset",
        f"{tmp_path}/demo/sft.jsonl#4",
        "--apply_chat_template",
    ]
    line += ["--train_batch_size", "4", "--micro_train_batch_size", "4", "--param_dtype", "fp32", "--push_to_hub"]
    line += ["--hub_model_id", "we/x", "--output_dir", str(tmp_path / "run")]
    code, output = forked(1, "-m", "trainer.cli.train_sft", *line)  # tests have HF_HUB_OFFLINE=1
    assert code and "error: --push_to_hub: we/x: " in output and "training data" not in output, output[-2000:]
    code, output = forked(1, "-m", "trainer.cli.train_sft", *line, "--hub_dry_run")
    [said] = (row for row in output.splitlines() if row.startswith("--hub_dry_run: would upload to we/x: README.md ("))
    assert code == 0 and all(f"{name} (" in said for name in ("model.safetensors", "config.json", "tokenizer.json"))
    assert "base_model" not in (tmp_path / "run/model/README.md").read_text().split("---")[1]
