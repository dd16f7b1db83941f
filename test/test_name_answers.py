"""A name of another trainer has the answer of the command that it was given to, also of the small commands."""

import importlib
import re

import pytest
from test_peer_names import FLAGS, named, refused

from trainer.cli.__main__ import RANKED
from trainer.errors import UserError
from trainer.flags.names.first_names import SMALL_NAMES
from trainer.flags.names.suggestions import ROWS
from trainer.flags.rules import COMMANDS

# {name: {command: a part of its answer}}; "" is a flag of the command itself
ANSWERS = {
    "do_train": dict.fromkeys(COMMANDS, "no counterpart: a training command always trains; leave it out"),
    "do_eval": dict.fromkeys(COMMANDS, "--eval_dataset switches it on"),
    "max_new_tokens": {
        "train_sft": "trainer eval asks", "train_rm": "trainer eval asks", "train_dpo": "trainer eval asks",
        "train_ppo": "no such flag; --generate_max_len", "train_dpo --online": "no such flag; --generate_max_len",
        "train_kd": "with --teacher_answers: --generate_max_len",
    },
    "beta": {
        "train_ppo": "--init_kl_coef 0.04 --use_kl_loss --kl_estimator k3", "train_kd": "with --kd_loss jsd: --kd_beta",
        "train_dpo": "", "train_dpo --online": "",
    },
    "gamma": {"train_dpo": "--loss simpo: --simpo_gamma", "train_dpo --online": "--simpo_gamma", "train_ppo": ""},
    "alpha": {"train_sft": "of LoRA: --lora_alpha", "train_ppo": "of LoRA: --lora_alpha", "train_kd": "--kd_coef"},
    "max_prompt_length": {
        "train_sft": "together; a prompt has no limit of its own: --max_len", "train_dpo": "no limit of its own: --max_len",
        "train_rm": "no limit of its own: --max_len", "train_ppo": "no such flag; --prompt_max_len",
    },
    "per_device_eval_batch_size": {"train_sft": "--micro_train_batch_size", "train_ppo": "--micro_rollout_batch_size"},
    "new_special_tokens": {
        "train_sft": "commas between them: --add_tokens", "train_dpo": "commas between them: --add_tokens",
        "train_ppo": "no model learns them here", "train_kd": "no model learns them here",
    },
    "data.truncation": {"train_sft": "cut at their end", "train_ppo": "longer prompts than --prompt_max_len are left out"},
    "dataset_text_field": {"train_sft": "--pretrain_mode", "train_kd": "--pretrain_mode", "train_dpo": "are for train_sft"},
    "datasets": dict.fromkeys(COMMANDS, "else names with commas: --dataset"),
    "assistant_only_loss": {"train_sft": "--multiturn", "train_kd": "--multiturn", "train_rm": "the tokens of answers"},
    "generate_during_eval": {"train_sft": "is a loss", "train_ppo": "always generates", "train_dpo --online": "always generates"},
    "eval_delay": dict.fromkeys(COMMANDS, "all metrics of the command"),
    "loss_type": {"train_rm": "no such flag; --loss", "train_dpo": "--loss", "train_ppo": "--loss_agg", "train_kd": "--kd_loss"},
    "stage": {"train_sft": "--pretrain_mode", "train_rm": "the command says it", "train_ppo": "--preset"},
    "max_pixels": {"train_sft": "--image_max_pixels", "train_kd": "rows of this command are texts"},
    "ref.offload": {"train_dpo": "--offload_ref", "train_dpo --online": "--offload_ref", "train_ppo": "--offload_ref"},
    "actor.ppo_mini_batch_size": {"train_ppo": "x responses per prompt", "train_dpo --online": "in pairs"},
    "algo": {"train_ppo": "--preset grpo", "train_dpo": "--loss"},
    "num_samples": {"train_sft": "--max_samples", "train_ppo": "--n_samples_per_prompt"},
    "response_column": {"train_sft": "--output_key", "train_kd": "--output_key"},
    "vf_coef": {"train_sft": "not of this command; in train_ppo no counterpart: the critic has an optimizer of its own"},
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_name_has_the_answer_of_its_command(name):
    for command, part in ANSWERS[name].items():
        if not part:
            assert name in FLAGS[command], command
            continue
        found = refused(command, f"--{name}", "1")
        assert part in found and "(a flag of" not in found, (command, found)


def test_a_switch_that_is_off_is_answered_as_such():
    assert "without training" in refused("train_sft", "--do_train", "false")
    assert "--no_shuffle" in refused("train_sft", "--shuffle", "false")


def test_no_answer_sends_to_another_command_for_a_flag_that_this_one_has():
    """A row that names only flags of a command is about it too, unless its words are about rollouts or reference models."""
    of_others = re.compile(
        r"rollout|teacher|ppo_|sft_model|mini-batch|response|every rank has all models|prompts? of|simpo|ipo|kto|reward|log-probs|answer|policy"
    )
    answered = {(name, command) for row in ROWS for name in row.names.split() for command in row.commands}
    for row in ROWS:
        flags = named(f"{row.ours} {row.words} {row.off}")
        for command in COMMANDS:
            if (
                row.ours
                and command not in row.commands
                and flags <= FLAGS[command]
                and not of_others.search(f"{row.names} {row.words}")
            ):
                missing = [n for n in row.names.split() if (n, command) not in answered and n not in FLAGS[command]]
                assert not missing, (command, missing, row.ours)


def answer_of(capsys, *words: str) -> str:
    """What a command of `trainer` says before it ends."""
    door = importlib.import_module(f"trainer.cli.{RANKED.get(words[0], words[0])}")
    try:
        door.run(list(words[1:]))
    except UserError as error:
        return str(error)
    except SystemExit:
        pass
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("plan --model m --num_gpus 8 --seq_len 512", ["a word without a flag: MODEL", "--gpus", "--max_len"]),
        ("plan m --gpus 8 --train_batch_sze 4", ["did you mean --train_batch_size?"]),
        ("plan m", ["the following arguments are required: --gpus"]),
        ("check --model m", ["a word without a flag: MODEL"]),
        ("export a b --torch_dtype bf16", ["--torch_dtype: no such flag; bf16, fp16 or fp32: --dtype"]),
        ("export --model a --output_dir b", ["a word without a flag: SOURCE", "a word without a flag: OUT"]),
        ("export a b --max-shard-gb 3", ["did you mean --max_shard_gb?"]),
        ("report --run_dir r", ["a word without a flag: RUN"]),
        ("watch --output_dir r", ["a word without a flag: RUN"]),
        ("verify_run r --replay 3", ["--certify"]),
        ("doctor --pathh r", ["did you mean --path?"]),
        ("serve_rm --model m", ["--reward_pretrain"]),
        ("serve_engine --model m --tp 2", ["--pretrain", "--tp -> --tensor_parallel_size"]),
        ("serve_train --model m --tp 2", ["--pretrain", "--tensor_parallel_size"]),
        ("eval --model m --test_data d --save_dir s", ["--pretrain", "--eval_dataset", "--save_dir -> --output_dir"]),
        ("eval --max_new_tokens 5 --n 4", ["--generate_max_len", "--eval_samples"]),
        ("prepare_data --model m --data d", ["--pretrain", "--dataset"]),
    ],
)
def test_a_small_command_answers_names_too(line, parts, capsys):
    found = answer_of(capsys, *line.split())
    assert all(part in found for part in parts) and "\n" not in found, found


@pytest.mark.parametrize("command", SMALL_NAMES)
def test_answers_of_small_commands_name_their_flags(command, capsys):
    shown = set(re.findall(r"^ +--(\w+)", answer_of(capsys, command, "--help").partition("usage:")[2], re.M))
    for names, ours in SMALL_NAMES[command]:
        assert named(ours) <= shown and not shown.intersection(names.split()), (names, ours)
    names = [name for row, _ in SMALL_NAMES[command] for name in row.split()]
    assert len(names) == len(set(names))
