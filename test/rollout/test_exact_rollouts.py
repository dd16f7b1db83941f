"""--exact with rollouts: generated tokens have the log-probs of training, and runs of RL have equal bits on every layout."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exact_flags import OF_ROLLOUTS, REWARD, combined_rl_line, numbers_of, rl_line
from launch import FULL, read_steps, train_many

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

    def line(layout: str, name: str = "", *more: str) -> list[str]:
        return rl_line(name or layout, layout, tmp_path, *KL, *more)

    names = ("f", "z2", "f-dp2", "f-tp2", "z1-tp2", "f-ring2", "z3-ulysses2", "f-hsdp2")
    rollouts, foreign = tmp_path / "f/rollouts.jsonl", tmp_path / "foreign.jsonl"
    train_many(1, list(map(line, names[:2])), tmp_path, 200)
    rows = rollouts.read_text().splitlines()
    samples = list(map(json.loads, rows))
    foreign.write_text(
        "".join(json.dumps(s | {"log_probs": [p - 0.25 for p in s["log_probs"]]}) + "\n" for s in samples)
    )
    replays = ["replay-f-dp2", "replay-f-tp2", "replay-f-ring2"]
    again = [line(name.removeprefix("replay-"), name, "--rollouts_from", str(rollouts)) for name in replays]
    again += [line("z2-dp2", "foreign", "--rollouts_from", str(foreign))]
    train_many(2, [*map(line, names[2:]), *again], tmp_path, 300)
    expected = bits_of(tmp_path / "f")
    assert len(expected.tensors) == 2 and expected.steps == 4 and len(expected.samples) == 2
    for name in (*names, *replays):
        assert [row["rollout_logprob_diff"] for row in read_steps(tmp_path / name)] == [0.0] * 4, name
        found = bits_of(tmp_path / name)
        assert first_difference(expected, found) is None and len(found.samples) == 2, name
    replayed = bits_of(tmp_path / "foreign")  # log-probs of another model enter no loss, and are only compared
    assert (replayed.tensors, replayed.rows) == (expected.tensors, expected.rows)
    found = [row["rollout_logprob_diff"] for row in read_steps(tmp_path / "foreign")]
    assert found == pytest.approx([0.25] * 4)
    changed = json.loads(rows[20])
    changed["log_probs"][0] = np.nextafter(changed["log_probs"][0], 0)
    rollouts.write_text("\n".join([*rows[:20], json.dumps(changed), *rows[21:]]))
    assert first_difference(expected, bits_of(tmp_path / "f")) == "samples differ first in rollout 1"
    rollouts.write_text("\n".join(rows[:16]))
    assert first_difference(expected, bits_of(tmp_path / "f")) == "samples differ first in rollout 1"


def test_other_flags_of_rollouts_have_equal_bits_too(tmp_path):
    make_demo(str(tmp_path / "demo"))
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = map(json.loads, (tmp_path / "demo/prompts.jsonl").read_text().splitlines()[:6])
    chosen = [json.dumps(prompt | {"who": "ab"[number % 2]}) for number, prompt in enumerate(prompts)]
    (tmp_path / "chosen.jsonl").write_text("\n".join(chosen))
    layouts = dict.fromkeys(OF_ROLLOUTS, ("f-dp2", "f-ring2", "z2-dp2", "f-tp2"))
    layouts["teachers of rows"] = ("f-dp2", "z2-dp2", "f-tp2")  # a ring refuses eager attention
    if not FULL:
        layouts |= {"loss": ("f-ring2",), "teacher": ("f-tp2",), "teachers of rows": ("z2-dp2",)}
    train_many(1, [combined_rl_line(kind, "f", tmp_path) for kind in layouts], tmp_path, 300)
    pairs = [(kind, layout) for kind, of_kind in layouts.items() for layout in of_kind]
    train_many(2, [combined_rl_line(*pair, tmp_path) for pair in pairs], tmp_path, 500)
    for kind, layout in pairs:
        alone, pair = (tmp_path / f"{kind.replace(' ', '-')}-{name}" for name in ("f", layout))
        assert bits_of(alone).steps == 4 and bits_of(alone).samples, kind
        assert first_difference(bits_of(alone), bits_of(pair)) is None, (kind, layout)
        assert numbers_of(alone) == numbers_of(pair), (kind, layout)
        assert {row["rollout_logprob_diff"] for row in read_steps(pair)} == {0.0}, (kind, layout)


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
