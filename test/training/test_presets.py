"""Each --preset against the equations of its paper, sample by sample: the flags, the advantages, the loss, its gradient."""

import math
import statistics

import pytest
import torch
from plain_policy import (
    CUT,
    GROUP,
    LENGTHS,
    MAX_LEN,
    SCORES,
    Table,
    arguments,
    clipped,
    found_loss,
    group_of,
    log_probs,
    make_samples,
    normed,
)

from trainer.cli.train_ppo import parse
from trainer.errors import UserError
from trainer.flags.names.presets import PRESETS, describe_preset
from trainer.models.losses.policy_loss import POLICY_LOSSES, PolicyOptions, PolicyTokens
from trainer.runs.rl.rl_checks import validate

# --- the papers, one response at a time


def grpo(samples, old, policy, reference, values):
    """DeepSeekMath (Shao et al. 2024), equations 3 and 4."""
    total = 0.0
    for n, sample in enumerate(samples):
        new, ref = log_probs(policy, sample), log_probs(reference, sample)
        gain = clipped((new - log_probs(old, sample)).exp(), normed(n), 0.2, 0.2)
        kl = (ref - new).exp() - (ref - new) - 1
        total = total + (gain - 0.04 * kl).sum() / len(new)
    return -total / len(samples)


def dr_grpo(samples, old, policy, reference, values):
    """Liu et al. 2025, figure 1 and section 3.2: without 1/|o| and the deviation; the code divides by the longest."""
    total = 0.0
    for n, sample in enumerate(samples):
        ratio = (log_probs(policy, sample) - log_probs(old, sample)).exp()
        total = total + clipped(ratio, SCORES[n] - statistics.fmean(group_of(n)), 0.2, 0.2).sum() / MAX_LEN
    return -total / len(samples)


def dapo(samples, old, policy, reference, values):
    """Yu et al. 2025, equations 8 to 10 and 13; truncated samples have no loss (section 3.4). The buffer is 6 // 5."""
    scores = [score - (length == MAX_LEN) for score, length in zip(SCORES, LENGTHS)]
    total, count = 0.0, 0
    for n, sample in enumerate(samples):
        if n not in CUT:
            ratio = (log_probs(policy, sample) - log_probs(old, sample)).exp()
            total, count = total + clipped(ratio, normed(n, scores), 0.2, 0.28).sum(), count + LENGTHS[n]
    return -total / count


def gspo(samples, old, policy, reference, values):
    """Zheng et al. 2025, equations 5 to 7; the bounds are those of section 5.1."""
    total = 0.0
    for n, sample in enumerate(samples):
        ratio = (log_probs(policy, sample).sum() - log_probs(old, sample).sum()).div(LENGTHS[n]).exp()
        total = total + clipped(ratio, normed(n), 3e-4, 4e-4)
    return -total / len(samples)


def cispo(samples, old, policy, reference, values):
    """MiniMax-M1 (Chen et al. 2025), equations 4 and 5, with the weight between 0 and 5."""
    total = 0.0
    for n, sample in enumerate(samples):
        new = log_probs(policy, sample)
        weight = (new - log_probs(old, sample)).exp().clamp(max=5).detach()
        total = total + (weight * normed(n) * new).sum()
    return -total / sum(LENGTHS)


def luspo(samples, old, policy, reference, values):
    """LUSPO (arXiv 2602.05261): GSPO's clipped sequence ratio, times the length of the response."""
    total = 0.0
    for n, sample in enumerate(samples):
        ratio = (log_probs(policy, sample).sum() - log_probs(old, sample).sum()).div(LENGTHS[n]).exp()
        total = total + LENGTHS[n] * clipped(ratio, normed(n), 2e-3, 2.5e-3)
    return -total / len(samples)


def sapo(samples, old, policy, reference, values):
    """SAPO (Gao et al. 2025, arXiv 2511.20347): the mean over responses of means over tokens."""
    total = 0.0
    for n, sample in enumerate(samples):
        ratio = (log_probs(policy, sample) - log_probs(old, sample)).exp()
        t = 1.0 if normed(n) > 0 else 1.05
        total = total + (4 / t / (1 + (-t * (ratio - 1)).exp()) * normed(n)).sum() / LENGTHS[n]
    return -total / len(samples)


def maxrl(samples, old, policy, reference, values):
    """MaxRL (Tajwar et al. 2026, arXiv 2602.02710): r / mean - 1, in the loss of PPO."""
    total = 0.0
    for n, sample in enumerate(samples):
        ratio = (log_probs(policy, sample) - log_probs(old, sample)).exp()
        total = total + clipped(ratio, SCORES[n] / statistics.fmean(group_of(n)) - 1, 0.2, 0.2).sum()
    return -total / sum(LENGTHS)


def rloo(samples, old, policy, reference, values):
    """Ahmadian et al. 2024, section 2.2: the response is one action, and its KL is part of its reward R(x, y)."""
    scores = [
        score - 0.03 * (log_probs(old, sample) - log_probs(reference, sample)).sum().item()
        for score, sample in zip(SCORES, samples)
    ]
    total = 0.0
    for n, sample in enumerate(samples):
        others = (sum(group_of(n, scores)) - scores[n]) / (GROUP - 1)
        total = total + (scores[n] - others) * log_probs(policy, sample).sum()
    return -total / len(samples)


def whitened_and_clipped(samples, old, policy, advantages, high=0.2):
    """PPO's clipped loss, the mean over all tokens, of advantages that are whitened over all tokens."""
    everything = [value for row in advantages for value in row]
    mean, deviation = statistics.fmean(everything), math.sqrt(statistics.pvariance(everything) + 1e-8)
    total = 0.0
    for sample, row in zip(samples, advantages):
        for ratio, advantage in zip((log_probs(policy, sample) - log_probs(old, sample)).exp(), row):
            total = total + clipped(ratio, (advantage - mean) / deviation, 0.2, high)
    return -total / len(everything)


def reinforce_plus_plus(samples, old, policy, reference, values):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): A_t = r - beta * the KL from t on, normed over all tokens; PPO's clip."""
    advantages = []
    for n, sample in enumerate(samples):
        kl = (log_probs(old, sample) - log_probs(reference, sample)).tolist()
        advantages.append([SCORES[n] - 1e-4 * sum(kl[t:]) for t in range(LENGTHS[n])])
    return whitened_and_clipped(samples, old, policy, advantages)


def ppo(samples, old, policy, reference, values):
    """Ouyang et al. 2022, equation 2; Schulman et al. 2016, equation 16, and 2017, equation 7; advantages are whitened."""
    advantages = []
    for sample, own in zip(samples, values.split(LENGTHS)):
        kl = log_probs(old, sample) - log_probs(reference, sample)
        rewards, own = (-0.02 * kl).tolist(), [*own.tolist(), 0.0]
        rewards[-1] += sample.score
        deltas = [reward + own[t + 1] - own[t] for t, reward in enumerate(rewards)]
        advantages.append([sum(0.95 ** (j - t) * deltas[j] for j in range(t, len(deltas))) for t in range(len(deltas))])
    return whitened_and_clipped(samples, old, policy, advantages)


def vapo(samples, old, policy, reference, values):
    """Yue et al. 2025 (arXiv 2504.05118), equations 8 to 10: lambda 1 - 1 / (0.05 length), and 0.1 NLL of right responses."""
    advantages = []
    for sample, own in zip(samples, values.split(LENGTHS)):
        own, length = [*own.tolist(), 0.0], len(sample.response_ids)
        deltas = [own[t + 1] - own[t] + (sample.score if t == length - 1 else 0) for t in range(length)]
        lambd = max(1 - 1 / (0.05 * length), 0)
        advantages.append([sum(lambd ** (j - t) * deltas[j] for j in range(t, length)) for t in range(length)])
    right = [log_probs(policy, sample) for sample in samples if sample.score == 1]
    return whitened_and_clipped(samples, old, policy, advantages, 0.28) - 0.1 * torch.cat(right).mean()


def scalerl(samples, old, policy, reference, values):
    """Khatri et al. 2025 (arXiv 2510.13786), section 4: CISPO, the deviation of all advantages, the mean of each prompt's tokens.

    Prompts whose scores are equal are not in the batch.
    """
    groups = [samples[n : n + GROUP] for n in range(0, len(samples), GROUP)]
    groups = [[sample for sample in group if not math.isnan(sample.score)] for group in groups]
    groups = [group for group in groups if len({sample.score for sample in group}) > 1]
    means = [statistics.fmean(sample.score for sample in group) for group in groups]
    deviation = statistics.stdev(s.score - mean for group, mean in zip(groups, means) for s in group) + 1e-6
    total = 0.0
    for group, mean in zip(groups, means):
        gains = []
        for sample in group:
            new = log_probs(policy, sample)
            weight = (new - log_probs(old, sample)).exp().clamp(max=5).detach()
            gains.append(weight * (sample.score - mean) / deviation * new)
        total = total + torch.cat(gains).mean() / len(groups)
    return -total


def opd(samples, old, policy, reference, values):
    """Lu and Thinking Machines Lab 2025, On-policy distillation: the advantage of a token is log teacher - log old policy."""
    total = 0.0
    for sample in samples:
        new, before = log_probs(policy, sample), log_probs(old, sample)
        total = total + ((new - before).exp() * (log_probs(reference, sample) - before).detach()).sum()
    return -total / sum(LENGTHS)


PAPERS = {f.__name__: f for f in (grpo, dr_grpo, dapo, gspo, luspo, cispo, scalerl, sapo, maxrl, rloo, vapo, opd, ppo)}
PAPERS["reinforce++"] = reinforce_plus_plus


@pytest.mark.parametrize("size", [0.02, 0.7, 2.0])
@pytest.mark.parametrize("name", PRESETS)
def test_the_loss_and_its_gradient_are_those_of_the_paper(name, size):
    values = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    old, reference, *policies = Table(2, 0.0), Table(4, 0.5), Table(5, size), Table(5, size)
    teacher = ["--teacher", "t"] if name == "opd" else []
    loss = found_loss(arguments("--preset", name, *teacher), old, policies[0], reference, values)
    expected = PAPERS[name](make_samples(), old, policies[1], reference, values)
    loss.backward(), expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6) and policies[1].table.grad.abs().max() > 1e-3
    torch.testing.assert_close(policies[0].table.grad, policies[1].table.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"rloo"}))
def test_in_bypass_mode_the_old_policy_is_the_engine(name):
    """The same equations, with the engine as the old policy. No pass of a policy gives old log-probs."""
    values = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    engine, reference, *policies = Table(2, 0.1), Table(4, 0.5), Table(5, 0.7), Table(5, 0.7)
    samples = make_samples()
    for sample in samples:
        sample.log_probs = log_probs(engine, sample).tolist()
    args = arguments("--preset", name, "--bypass_mode", *["--teacher", "t"] * (name == "opd"))
    loss = found_loss(args, None, policies[0], reference, values, samples)
    expected = PAPERS[name](samples, engine, policies[1], reference, values)
    loss.backward(), expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6) and policies[1].table.grad.abs().max() > 1e-3
    torch.testing.assert_close(policies[0].table.grad, policies[1].table.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "scores", ([1, 0, 0.5, 0, 1, 1, 1, 1], [0.1] * 4 + [0, 1, math.nan, 0.3], [1, 0, math.nan, 1] * 2)
)
def test_scalerl_leaves_prompts_of_equal_scores_out_of_the_mean(scores):
    old, *policies = Table(2, 0.0), Table(5, 0.7), Table(5, 0.7)
    samples = make_samples()
    for sample, score in zip(samples, scores):
        sample.score, sample.failed = score, "no answer" * math.isnan(score)
    args = arguments("--preset", "scalerl")
    loss, expected = found_loss(args, old, policies[0], samples=samples), scalerl(samples, old, policies[1], None, None)
    loss.backward(), expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6) and policies[1].table.grad.abs().max() > 1e-3
    torch.testing.assert_close(policies[0].table.grad, policies[1].table.grad, rtol=0, atol=1e-6)


def test_every_preset_has_a_paper_and_others_are_refused():
    assert PAPERS.keys() == PRESETS.keys()
    with pytest.raises(UserError, match=r"--preset: grpoo .allowed: grpo, dr_grpo"):
        arguments("--preset", "grpoo")


# --- flags


def test_given_flags_win_and_the_line_says_so(tmp_path):
    (tmp_path / "flags.yaml").write_text("preset: dapo\neps_clip: 0.1\n")
    args = arguments(
        "--config", str(tmp_path / "flags.yaml"), "--dynamic_filtering", "false", "--generate_max_len", "40"
    )
    assert (
        args.advantage.eps_clip,
        args.advantage.eps_clip_high,
        args.rollout.dynamic_filtering,
        args.scores.overlong_buffer_len,
    ) == (
        0.1,
        0.28,
        False,
        8,
    )
    line = describe_preset(args)
    assert line.startswith("--preset dapo: --advantage_estimator group_norm --policy_loss ppo --loss_agg token")
    assert line.endswith("; given: --eps_clip 0.1 instead of 0.2, --dynamic_filtering False instead of True")


def test_a_preset_wins_over_the_demo_and_no_kl_means_no_kl():
    args, is_demo = parse(["--preset", "ppo"])
    assert is_demo and (args.advantage.advantage_estimator, args.advantage.lambd, args.optimizer.learning_rate) == (
        "gae",
        0.95,
        2e-4,
    )
    with pytest.raises(UserError, match="--preset opd without --teacher: it sets the loss"):
        validate(arguments("--preset", "opd"))
    for name in PRESETS.keys() - {"opd"}:
        args = arguments("--preset", name, "--init_kl_coef", "0")
        validate(args)
        assert not args.kl.use_kl_loss and not args.kl.kl_in_score


# --- the token variant of GSPO, and samples without loss


def test_gspo_token_has_the_ratio_of_the_sequence_and_the_gradient_of_the_token():
    """Zheng et al. 2025, equations 13 to 15: the gradient is s A_t grad log p_t, and 0 where clipped."""
    old = torch.randn(5, dtype=torch.float64)
    new = (old + 0.05 * torch.randn(5, dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)
    tokens = PolicyTokens(new, new - old, advantages, lambda values: values.mean().expand(5))
    loss, clip, _ = POLICY_LOSSES["gspo_token"](tokens, PolicyOptions(eps_low=1e-9, eps_high=1e9))
    ratio = (new - old).mean().exp().item()
    held = [max(ratio, 1 - 1e-9) if a < 0 else ratio for a in advantages.tolist()]
    assert loss.tolist() == pytest.approx([-s * a for s, a in zip(held, advantages.tolist())])
    [gradient] = torch.autograd.grad(loss.sum(), new)
    flat = [a < 0 and ratio < 1 - 1e-9 for a in advantages.tolist()]
    assert gradient.tolist() == pytest.approx([0 if f else -ratio * a for f, a in zip(flat, advantages.tolist())])
    assert clip.tolist() == flat
    # with one advantage for all tokens, it is GSPO
    same = PolicyTokens(new, new - old, advantages.new_full((5,), 0.7), tokens.mean_by_sequence)
    wide = PolicyOptions(eps_low=0.9, eps_high=9.0)
    losses = [POLICY_LOSSES[name](same, wide)[0].sum() for name in ("gspo", "gspo_token")]
    assert losses[0].item() == pytest.approx(losses[1].item())
    torch.testing.assert_close(*(torch.autograd.grad(loss, new)[0] for loss in losses))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_chosen_over_both_micro_batches(name):
    """Cui et al. 2025 (arXiv 2505.22617): a third of the tokens of both micro-batches, by covariance."""
    old, policy, samples = Table(2, 0.0), Table(5, 0.3), make_samples()
    of_tokens = [(p, normed(n)) for n, sample in enumerate(samples) for p in log_probs(old, sample).tolist()]
    middle = [statistics.fmean(values) for values in zip(*of_tokens)]
    found = [(p - middle[0]) * (a - middle[1]) for p, a in of_tokens]
    most = len(found) // 3
    if name == "kl_cov":
        chosen = sorted(range(len(found)), key=lambda place: -found[place])[:most]
    else:  # as many as there are, so that chance does not decide
        chosen = [place for place, value in enumerate(found) if 0.9 < value < 5]
        assert 0 < len(chosen) < most
    total, place = 0.0, 0
    for n, sample in enumerate(samples):
        for log_ratio in log_probs(policy, sample) - log_probs(old, sample):
            gain = clipped(log_ratio.exp(), normed(n), 0.2, 0.2) if name == "clip_cov" else log_ratio.exp() * normed(n)
            if place in chosen:
                gain = gain - 0.5 * log_ratio.abs() if name == "kl_cov" else 0 * gain
            total, place = total + gain, place + 1
    line = ["--advantage_estimator", "group_norm", "--policy_loss", name, "--cov_share", "0.34"]
    line += ["--cov_range", "0.9", "5"] if name == "clip_cov" else ["--kl_cov_coef", "0.5"]
    loss = found_loss(arguments(*line), old, policy)
    assert loss.item() == pytest.approx(-total.item() / sum(LENGTHS), abs=1e-6)


@pytest.mark.parametrize("loss_agg", ["token", "sequence", "prompt", "fixed_length", "sum"])
def test_truncated_samples_have_no_loss_and_do_not_count_in_its_mean(loss_agg):
    flags = ["--preset", "dr_grpo", "--loss_agg", loss_agg, "--mask_truncated"]
    old, policy = Table(2, 0.0), Table(5, 0.3)
    total, count = 0.0, 0
    for n, sample in enumerate(make_samples()):
        if n not in CUT:
            ratio = (log_probs(policy, sample) - log_probs(old, sample)).exp()
            gain = clipped(ratio, SCORES[n] - statistics.fmean(group_of(n)), 0.2, 0.2).sum()
            group = [LENGTHS[m] for m in range(8) if m // GROUP == n // GROUP and m not in CUT]
            of_prompt = sum(group) / len(group)
            divisor = {"token": 1, "sum": 1, "sequence": LENGTHS[n], "prompt": of_prompt, "fixed_length": MAX_LEN}[
                loss_agg
            ]
            total, count = total + gain / divisor, count + (LENGTHS[n] if loss_agg == "token" else 1)
    found = found_loss(arguments(*flags), old, policy, None, None)
    assert found.item() == pytest.approx(-total.item() / count, abs=1e-6)
