"""Values that no model and no rows make right are refused before torch is imported, with the name that another trainer means."""

import contextlib
import subprocess
import sys

import pytest

from trainer.cli import train_dpo, train_ppo, train_rm, train_sft
from trainer.errors import UserError
from trainer.flags.names import loss_names
from trainer.flags.names.presets import PRESETS
from trainer.flags.names.sources import naming_sources
from trainer.models.losses.policy_loss import POLICY_LOSSES
from trainer.models.losses.preference_loss import PAIR_LOSSES, REWARD_LOSSES
from trainer.runs.preference_runs import losses_of
from trainer.runs.rl.rl_checks import validate

GIVEN = ["--pretrain", "m", "--dataset", "a,b"]
RL = ["--label_key", "l", "--reward_func", "exact_match"]
ONLINE = ["--online", *RL, "--n_samples_per_prompt", "2"]


@pytest.mark.parametrize(
    ("door", "flags", "found"),
    [
        (train_dpo, ["--loss", "sigmoid"], "--loss: sigmoid. Here that is --loss dpo."),
        (train_dpo, ["--loss", "nothing"], "--loss: nothing (allowed: dpo, cdpo, "),
        (train_dpo, ["--loss", "dpo,nothing"], "--loss: dpo,nothing (allowed: dpo, cdpo, "),
        (train_dpo, [*ONLINE, "--loss", "bco_pair"], "--loss: bco_pair. Here that is --loss bco."),
        (train_rm, ["--loss", "nothing"], "--loss: nothing (allowed: sigmoid, logexp)"),
        (train_ppo, [*RL, "--policy_loss", "gpso"], "--policy_loss: gpso (allowed: ppo, reinforce, gspo, "),
        (train_ppo, [*RL, "--policy_loss", "dapo"], "--policy_loss: dapo. Here that is --preset dapo."),
        (
            train_sft,
            ["--tokenizer_chat_template", "nowhere.jinja"],
            "--tokenizer_chat_template: nowhere.jinja: file not",
        ),
        (train_ppo, [*RL, "--train_batch_size", "129"], "--train_batch_size: 129, but a rollout has 128 responses"),
        (train_dpo, [*ONLINE, "--train_batch_size", "129"], "--train_batch_size: 129, but a rollout has 128 pairs"),
        (train_sft, ["--template_args", "{"], "--template_args: broken JSON"),
        (train_sft, ["--template_args", "[1]"], "--template_args: '[1]' (allowed: a JSON object"),
        (train_sft, ["--input_template", "noplace"], "--input_template: 0 times {} (allowed: exactly one {})"),
        (train_sft, ["--dataset_probs", "1"], "--dataset_probs: 1 number for 2 datasets"),
        (train_sft, ["--dataset_probs", "1,x"], "--dataset_probs: 1,x (allowed: numbers with commas"),
    ],
)
def test_a_value_that_nothing_makes_right_is_refused_at_the_door(door, flags, found):
    with pytest.raises(UserError) as error:
        door.check([*GIVEN, *flags])
    assert str(error.value).startswith(found), error.value


@pytest.mark.parametrize(
    ("flags", "source"),
    [
        (["--preset", "grpo"], "(--advantage_estimator is from --preset grpo)"),
        (["--config", "preset.yaml"], "(--advantage_estimator is from --preset grpo)"),
        (["--config=group.yaml"], "(--advantage_estimator is from --config group.yaml)"),
        (["--preset", "rloo", "--config", "group.yaml"], "(--advantage_estimator is from --config group.yaml)"),
        *(
            (["--config", first, "--config", last], f"(--advantage_estimator is from --config {last})")
            for first, last in (("group.yaml", "same.yaml"), ("same.yaml", "group.yaml"))
        ),
        (["--config", "list.yaml"], "--preset (from --config list.yaml): "),
        (["--preset", "grpo", "--advantage_estimator", "rloo"], ""),
        (["--teacher", "t", "--normalize_reward", "--ref_model", "r"], ""),
        (["--teacher", "t", "--dynamic_filtering"], "(--advantage_estimator is from --teacher)"),
        (["--config", "wrong.yaml"], "--max_steps (from --config wrong.yaml): "),
    ],
)
def test_a_refusal_names_who_set_the_flag(flags, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "preset": "preset: grpo",
        "group": "advantage_estimator: group_norm",
        "wrong": "max_steps: x",
        "same": "advantage_estimator: group_norm",
        "list": "preset: [grpo]",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        naming_sources(train_ppo.check)([*GIVEN, *RL, *flags])
    assert source in str(error.value) and ("from" in str(error.value)) == bool(source), error.value


def test_names_are_those_of_the_losses(tmp_path, monkeypatch):
    """And the names of other trainers lead to names that are there."""
    for command, table in (("train_dpo", PAIR_LOSSES), ("train_rm", REWARD_LOSSES), ("train_ppo", POLICY_LOSSES)):
        _, file, name = loss_names.TABLES[command]
        assert loss_names.keys_of(loss_names.LOSSES / file, name) == tuple(table)
    taken = {"--loss": {*PAIR_LOSSES, "kto"}, "--policy_loss": {*POLICY_LOSSES}, "--preset": {*PRESETS}}
    for flag, names in loss_names.ELSEWHERE.items():
        assert not taken[flag] & names.keys()
        for ours in names.values():
            assert ours.split()[0] == "--nll_loss_coef" or ours.split()[1] in taken[ours.split()[0]], ours
    (tmp_path / "own.py").write_text("T = {'a': 1, **OTHERS}\n")
    assert loss_names.keys_of(tmp_path / "own.py", "T") == ()  # then the loss itself is looked up
    monkeypatch.setattr(loss_names, "keys_of", lambda file, table: ())
    loss_names.check_loss_names("train_dpo", "nonsense")
    with pytest.raises(UserError, match=r"^--loss: nonsense .allowed: dpo, "):
        losses_of("dpo,nonsense")


def test_a_reward_file_that_is_no_python_is_refused_and_does_not_run(tmp_path):
    for text, is_python in (("def f(:\n", False), ("\0", False), ("raise SystemExit('ran')\n", True)):
        (tmp_path / "reward.py").write_text(text)
        args, _ = train_ppo.parse([*GIVEN, *RL, "--reward_func", f"{tmp_path}/reward.py:f"])
        refused = pytest.raises(UserError, match=r"^--reward_func: .*/reward.py cannot be imported: SyntaxError: ")
        with contextlib.nullcontext() if is_python else refused:
            validate(args)


def test_these_checks_import_no_torch():
    code = "import sys, trainer.runs.flag_checks; assert not {'torch', 'datasets', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
