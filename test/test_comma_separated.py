"""Flags with several names: spaces and a comma at the end do not count, and a comma alone names nothing."""

import pytest

from trainer.cli import train_kd, train_ppo, train_sft
from trainer.comma_separated import names_in, names_to_check
from trainer.errors import UserError
from trainer.flags.names.loss_names import check_loss_names
from trainer.runs.preference_runs import losses_of


def test_names():
    assert names_in(" a, b ,,c,") == ["a", "b", "c"]
    assert names_in(None) == names_in(" , ") == names_to_check(None) == []
    assert names_to_check(" a,") == ["a"] and names_to_check(",") == [""]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (train_sft, ["--pretrain", ","]),
        (train_sft, ["--dataset", ","]),
        (train_sft, ["--target_modules", ",", "--lora_rank", "4"]),
        (train_ppo, ["--reward_func", ","]),
        (train_ppo, ["--reward_pretrain", ","]),
        (train_ppo, ["--remote_rm_url", ","]),
        (train_ppo, ["--env", ",", "--env_key", "kind"]),
        (train_ppo, ["--engine_urls", ",", "--rollout_engine", "vllm_server", "--reward_func", "length"]),
        (train_kd, ["--teacher", ","]),
        (train_ppo, ["--teacher", ","]),
        (train_ppo, ["--teacher", ",", "--teacher_key", "domain"]),
    ],
)
def test_a_comma_alone_is_refused(command, flags, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    given = {"--pretrain": str(tmp_path), "--dataset": str(tmp_path / "rows.jsonl")} | dict(
        zip(flags[::2], flags[1::2])
    )
    with pytest.raises(UserError, match=rf"^{flags[0]}\b"):
        command.check([part for pair in given.items() for part in pair])


def test_a_loss_of_a_comma_alone_is_refused():
    assert [loss.needs_reference for loss in losses_of("dpo, simpo,")] == [True, False]
    with pytest.raises(UserError, match="--loss"):
        check_loss_names("train_dpo", ",")
