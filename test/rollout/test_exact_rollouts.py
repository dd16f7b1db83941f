"""--exact with rollouts: generated tokens have the log-probs of training, and runs of RL have equal bits on every layout."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launch import read_steps, train_many

from trainer.compare.runs.exact_bits import bits_of, first_difference
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.exact import self_test
from trainer.exact.block_attention import block_attention
from trainer.flags.parse_flags import from_flat
from trainer.flags.rl_flags import PPOArguments
from trainer.flags.rule import UNKNOWN, defaults_of, first_broken
from trainer.flags.rules import COMMANDS
from trainer.flags.training_rules import EXACT_ROLLOUT_RULES
from trainer.methods.rollout_facts import check_log_probs
from trainer.models.attention.exact_rows import log_softmax_in_pieces
from trainer.runs.features import exact

self_test.ask_for_fixed_kernels()

REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(c in label for c in set(text)) / (1 + len(text)) for text, label in zip(responses, labels)]
"""
KL = ("--init_kl_coef", "0.05", "--use_kl_loss", "--kl_estimator", "k3")


def test_attention_over_blocks_is_softmax_attention_and_a_token_has_the_same_bits_alone():
    shapes = ((2, 4, 70, 8), (2, 2, 70, 8), (2, 2, 70, 8))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    positions, seed = torch.arange(70).expand(2, 70), torch.randn(2, 4, 70, 8, dtype=torch.float64)
    distance = positions[0][:, None] - positions[0]
    for window in (None, 40):
        seen = (distance >= 0) & (distance < (window or 70))
        expected = F.scaled_dot_product_attention(*tensors, attn_mask=seen, scale=0.3, enable_gqa=True)
        found = block_attention(*tensors, positions, 0.3, window)
        torch.testing.assert_close(found, expected)
        for ours, theirs in zip(*(torch.autograd.grad(out, tensors, seed) for out in (found, expected))):
            torch.testing.assert_close(ours, theirs)
        query, key, value = (tensor.detach().float() for tensor in tensors)
        whole = block_attention(query, key, value, positions, 0.3, window)
        for at in (0, 31, 32, 69):
            here = slice(at, at + 1)
            alone = block_attention(
                query[:, :, here], key[:, :, : at + 1], value[:, :, : at + 1], positions[:, here], 0.3, window
            )
            assert torch.equal(alone, whole[:, :, here]), (window, at)


def test_log_probs_in_pieces_are_those_of_a_softmax_for_any_number_of_rows():
    logits = torch.randn(5, 96) * 4
    found = log_softmax_in_pieces(logits)
    torch.testing.assert_close(found, logits.log_softmax(-1))
    assert torch.equal(torch.cat([log_softmax_in_pieces(row) for row in logits.split(1)]), found)


def test_rollouts_equal_training_and_layouts_have_equal_bits(tmp_path):
    make_demo(str(tmp_path / "demo"))
    (tmp_path / "reward.py").write_text(REWARD)

    def line(name: str, *more: str) -> list[str]:
        flags = ["--pretrain", f"{tmp_path}/demo/model", "--dataset", f"{tmp_path}/demo/prompts.jsonl"]
        flags += ["--reward_func", f"{tmp_path}/reward.py", "--label_key", "label", "--exact", "--param_dtype", "fp32"]
        flags += ["--advantage_estimator", "group_norm", "--rollout_batch_size", "4", "--n_samples_per_prompt", "4"]
        flags += ["--train_batch_size", "8", "--micro_train_batch_size", "1", "--micro_rollout_batch_size", "5"]
        flags += ["--prompt_max_len", "96", "--generate_max_len", "12", "--learning_rate", "1e-3", "--max_steps", "4"]
        flags += ["--device", "cpu", "--no_save", *KL, *more, "--output_dir", f"{tmp_path}/{name}"]
        return ["train_ppo", *flags, "--parity_dump", f"{tmp_path}/{name}/parity"]

    fsdp2, zero = ("--backend", "fsdp2"), ("--backend", "deepspeed", "--zero_stage")
    alone = [line("f", *fsdp2), line("z2", *zero, "2", "--micro_rollout_batch_size", "16")]
    pair = [
        line("f-dp2", *fsdp2),
        line("f-tp2", *fsdp2, "--tensor_parallel_size", "2"),
        line("z1-tp2", *zero, "1", "--tensor_parallel_size", "2"),
    ]
    pair += [line("f-ring2", *fsdp2, "--ring_attn_size", "2")]
    pair += [line("z3-ulysses2", *zero, "3", "--ring_attn_size", "2", "--sp_mode", "ulysses")]
    train_many(1, alone, tmp_path, 200)
    train_many(2, pair, tmp_path, 300)
    expected = bits_of(tmp_path / "f")
    assert len(expected.tensors) == 2 and expected.steps == 4 and len(expected.samples) == 2
    for name in ("f", "z2", "f-dp2", "f-tp2", "z1-tp2", "f-ring2", "z3-ulysses2"):
        assert [row["rollout_logprob_diff"] for row in read_steps(tmp_path / name)] == [0.0] * 4, name
        found = bits_of(tmp_path / name)
        assert first_difference(expected, found) is None and len(found.samples) == 2, name
    rollouts = tmp_path / "f/rollouts.jsonl"
    rows = rollouts.read_text().splitlines()
    changed = json.loads(rows[20])
    changed["log_probs"][0] = np.nextafter(changed["log_probs"][0], 0)
    rollouts.write_text("\n".join([*rows[:20], json.dumps(changed), *rows[21:]]))
    assert first_difference(expected, bits_of(tmp_path / "f")) == "samples differ first in rollout 1"
    rollouts.write_text("\n".join(rows[:16]))
    assert first_difference(expected, bits_of(tmp_path / "f")) == "samples differ first in rollout 1"


def test_what_could_part_rollouts_is_refused_or_ends_the_run(monkeypatch):
    defaults = defaults_of(COMMANDS.values())
    base = {**defaults, **UNKNOWN, "exact": True, "advantage_estimator": "group_norm", "reward_func": "exact_match"}
    assert first_broken(EXACT_ROLLOUT_RULES, base, defaults) is None
    for more in ({"remote_rm_url": "http://a"}, {"reward_func": "math,judge"}, {"cpu_matmul": "onednn"}):
        line = str(first_broken(EXACT_ROLLOUT_RULES, base | more, defaults))
        assert line.startswith(f"--exact with --{next(iter(more))} "), line
    check_log_probs(0.0, 0.0)
    with pytest.raises(UserError, match=r"--exact .* differ by 1e-09 in the mean"):
        check_log_probs(1e-9, 0.0)
    run = SimpleNamespace(args=from_flat(PPOArguments, {"exact": True}))
    monkeypatch.setattr(exact, "ask_for_fixed_kernels", lambda: None)
    exact.EXACT_RL.before_setup(run)
    assert (run.args.scores.max_failed_share, run.args.rollout.max_logprob_diff) == (0.0, 0.0)
