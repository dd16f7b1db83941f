"""What needs only flags, configs and headers is refused before the training set is read."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from launch import in_fork
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen2VLConfig, Qwen3Config

from trainer.checkpoints import checkpoint_store
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.flags.common_flags import LoraArguments
from trainer.runs.features.adapter import check_targets

SIZES = "--train_batch_size 4 --micro_train_batch_size 2 --max_steps 1 --param_dtype fp32 --output_dir out"
PAIRS = f"--pretrain demo/model --dataset demo/pairs.jsonl {SIZES}"
ROLLOUT = (
    f"--pretrain demo/model --dataset demo/prompts.jsonl --label_key label --rollout_batch_size 2 --n_samples_per_prompt 2 "
    f"--prompt_max_len 64 --generate_max_len 4 --advantage_estimator group_norm {SIZES}"
)
COMMANDS = {
    "sft": f"--pretrain demo/model --dataset demo/sft.jsonl --apply_chat_template {SIZES}",
    "rm": PAIRS,
    "dpo": PAIRS,
    "kd": f"--pretrain demo/model --teacher demo/model --dataset demo/sft.jsonl --apply_chat_template {SIZES}",
    "ppo": f"{ROLLOUT} --reward_func exact_match",
    "scores": ROLLOUT,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo; `swapped`, whose tokens have other ids; `learned`, with 64 learned positions; files that are too short."""
    folder = tmp_path_factory.mktemp("order")
    make_demo(str(folder / "demo"))
    for name in ("swapped", "learned", "t5"):
        shutil.copytree(folder / "demo/model", folder / name)
    path = folder / "t5/config.json"
    path.write_text(json.dumps({"model_type": "t5", "vocab_size": json.loads(path.read_text())["vocab_size"]}))
    path = folder / "swapped/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first, second = [word for word in tokenizer["model"]["vocab"] if len(word) == 1 and word.isalpha()][:2]
    vocab = tokenizer["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(tokenizer))
    size = json.loads((folder / "demo/model/config.json").read_text())["vocab_size"]
    ids = {"bos_token_id": 1, "eos_token_id": 1}
    GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=64, n_embd=16, n_layer=1, n_head=2, **ids)).save_pretrained(
        folder / "learned"
    )
    AutoTokenizer.from_pretrained(folder / "demo/model").save_pretrained(folder / "learned")
    (folder / "empty.jsonl").write_text("")
    (folder / "cut/new").mkdir(parents=True)
    entries = {"state.json": checkpoint_store.write_json(f"{folder}/cut/new/state.json", {})}
    checkpoint_store.commit(f"{folder}/cut/new", f"{folder}/cut/step_1", entries)
    (folder / "cut/step_1/state.json").write_text("")
    return folder


@pytest.mark.parametrize(
    ("command", "flags", "found"),
    [
        ("dpo", "--ref_model swapped", "--ref_model: swapped has another vocabulary"),
        ("ppo", "--ref_model swapped --init_kl_coef 0.1", "--ref_model: swapped has another vocabulary"),
        ("ppo", "--teacher swapped", "--teacher: swapped has another vocabulary"),
        ("kd", "--teacher swapped", "--teacher: swapped has another vocabulary"),
        ("ppo", "--ref_model learned --init_kl_coef 0.1", "--ref_model: learned has 64 positions, and prompts"),
        *[(name, "--pretrain learned --max_len 65", "--max_len: 65 tokens") for name in ("sft", "rm", "dpo", "kd")],
        ("ppo", "--pretrain learned", "--prompt_max_len + --generate_max_len: 64 + 4 tokens"),
        *[(name, "--expert_parallel_size 2", "--expert_parallel_size: 2 does not divide") for name in ("sft", "ppo")],
        *[
            (name, "--load_checkpoint cut/step_1", "--load_checkpoint: ")  # which is an absolute path
            for name in ("sft", "ppo")
        ],
        ("sft", "--load_checkpoint --allow_change nothing", "--allow_change: nothing is no flag"),
        *[
            (name, "--lora_rank 4 --target_modules nothing", "--target_modules: ")
            for name in ("sft", "rm", "dpo", "ppo")
        ],
        *[(name, "--aux_loss_coef 0.1", "--aux_loss_coef: qwen3 does not return") for name in ("sft", "ppo")],
        ("scores", "--reward_pretrain demo/model", "--reward_pretrain: demo/model is no reward model"),
        *[
            (
                name,
                "--lr_scheduler cosine_warmup_with_min_lr --lr_warmup_ratio 0 --min_lr_ratio 0",
                "--lr_scheduler: cosine_warmup_with_min_lr has a rate of 0 in every step of 1",
            )
            for name in ("sft", "ppo")
        ],
        ("sft", "--expert_bias_update_rate 0.1", "--expert_bias_update_rate: no router of qwen3 has"),
        ("rm", "--value_head_prefix nothing", "--value_head_prefix: no nothing.weight in "),
        (
            "ppo",
            "--advantage_estimator gae --critic_pretrain swapped",
            "--critic_pretrain: swapped has another vocabulary",
        ),
        ("ppo", "--advantage_estimator gae --critic_pretrain t5", "--critic_pretrain: t5: t5 is an encoder-decoder"),
        ("rm", "--pretrain t5", "--pretrain: "),
        ("ppo", "--rollouts_from none.jsonl", "--rollouts_from: none.jsonl: No such file"),
        ("ppo", "--rollouts_from empty.jsonl", "--rollouts_from: empty.jsonl holds no rollout"),
    ],
)
def test_cheap_checks_come_before_the_data(folder, command, flags, found):
    module = f"trainer.cli.train_{command.replace('scores', 'ppo')}"
    code, output = in_fork("-m", module, *COMMANDS[command].split(), *flags.split(), cwd=folder)
    assert code == 2 and output.splitlines()[-1].startswith(f"error: {found}"), output[-2000:]
    assert "reading demo" not in output and "training data:" not in output, output


def test_targets_of_any_folder_are_checked_or_left_to_the_loaded_model(tmp_path):
    """Weights may be no safetensors, and rows with images may need a class that only the data tell."""
    setup = SimpleNamespace(folder=str(tmp_path), trust_remote_code=False)
    run = SimpleNamespace(args=SimpleNamespace(), setup=setup, auto_class=AutoModelForCausalLM)
    torch.save({}, tmp_path / "pytorch_model.bin")
    for config, refused in ((Qwen3Config(num_hidden_layers=1), True), (Qwen2VLConfig(), False)):
        config.save_pretrained(tmp_path)
        for name in ("q_proj", "nothing"):
            run.args.lora = LoraArguments(lora_rank=4, target_modules=name)
            if refused and name == "nothing":
                with pytest.raises(UserError, match="--target_modules: "):
                    check_targets(run)
            else:
                check_targets(run)


def test_a_critic_has_the_vocabulary_of_the_policy(folder):
    flags = [*COMMANDS["ppo"].split(), "--advantage_estimator", "gae", "--critic_pretrain", "swapped"]
    code, output = in_fork("-m", "trainer.cli.train_ppo", *flags, cwd=folder)
    expected = (
        "error: --critic_pretrain: swapped has another vocabulary than --pretrain (allowed: a model with the same one)"
    )
    assert code == 2 and output.splitlines()[-1] == expected, output[-2000:]


@pytest.mark.parametrize(("command", "flag"), [("dpo", "--ref_model"), ("kd", "--teacher")])
def test_a_row_beyond_the_positions_of_a_frozen_model_is_refused(folder, command, flag):
    long = {"messages": [{"role": "user", "content": "1 " * 60}, {"role": "assistant", "content": "2"}]}
    pair = {"prompt": "1 " * 60, "chosen": "2", "rejected": "3"}
    (folder / "long.jsonl").write_text(json.dumps(pair if command == "dpo" else long) + "\n")
    flags = [*COMMANDS[command].split(), "--dataset", "long.jsonl", flag, "learned"]
    code, output = in_fork("-m", f"trainer.cli.train_{command}", *flags, cwd=folder)
    assert code == 2 and output.splitlines()[-1].startswith("error: --dataset row 1: "), output[-2000:]
    assert "more than the model's 64 positions" in output.splitlines()[-1]
