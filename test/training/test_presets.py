"""Each --preset against the equations of its paper, sample by sample: the flags, the advantages, the loss, its gradient.

The policy is a table of logits (next token by this token). The old policy, the policy and the reference are different
tables. Samples have one to six tokens, in two micro-batches, one of them packed.
"""

import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from trainer.cli.train_ppo import parse
from trainer.errors import UserError
from trainer.flags.names.presets import PRESETS, describe_preset
from trainer.methods.ppo import add_advantages, add_log_probs
from trainer.methods.ppo_state import RLState
from trainer.methods.roles import make_policy_loss
from trainer.models.losses.policy_loss import POLICY_LOSSES, PolicyOptions, PolicyTokens
from trainer.rollout.micro_batches import SampleSet, collate_samples
from trainer.rollout.placement import Part
from trainer.rollout.samples import Sample
from trainer.runs.rl.rl_checks import validate
from trainer.runs.rl.rl_options import ppo_options

WORDS, GROUP, MAX_LEN = 11, 4, 6
LENGTHS, SCORES = [1, 6, 3, 6, 2, 5, 6, 4], [1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 0.0]
CUT = [1, 6]  # the responses that the limit of tokens cut


class Table(torch.nn.Module):
    """A model whose logits depend on the last token only."""

    def __init__(self, seed: int, size: float):
        super().__init__()
        start, step = (torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(s)) for s in (0, seed))
        self.table = torch.nn.Parameter(start + size * step)

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.table[input_ids])

    def get_output_embeddings(self):
        return torch.nn.Identity()  # no linear head, so no chunks


def make_samples() -> list[Sample]:
    ids = torch.randint(WORDS, (8, 9), generator=torch.Generator().manual_seed(1)).tolist()
    return [
        Sample(n, n // GROUP, row[:2], row[2 : 2 + LENGTHS[n]], [0.0] * LENGTHS[n], n not in CUT, None, SCORES[n])
        for n, row in enumerate(ids)
    ]


def arguments(*flags: str):
    line = ["--pretrain", "m", "--dataset", "d", "--reward_func", "r.py", "--n_samples_per_prompt", str(GROUP)]
    return parse([*line, "--generate_max_len", str(MAX_LEN), *flags])[0]


def found_loss(args, old, policy, reference, values) -> torch.Tensor:
    """The loss of the trainer's own phases: log-probs, advantages, loss."""
    validate(args)
    samples, options = make_samples(), ppo_options(args, (0,))
    rows = SampleSet(samples, args.advantage.loss_agg, args.rollout.generate_max_len, args.advantage.mask_truncated)
    parts = [
        collate_samples([rows[n] for n in part], 0, packed) for part, packed in (([0, 1, 2], 0), ([3, 4, 5, 6, 7], 1))
    ]
    batch = SimpleNamespace(micro_batches=parts, num_targets=sum(rows["num_loss_tokens"]))
    strategy = SimpleNamespace(device=torch.device("cpu"), all_reduce=lambda tensor: tensor)
    roles = SimpleNamespace(
        routers=None, actor=(old,), has_reference=bool(args.kl.init_kl_coef), reference=reference, critic=None
    )
    state = RLState(None, args.kl.init_kl_coef)
    part = Part(strategy, samples, None)
    flat = add_log_probs(strategy, roles, [batch, batch], options, part)  # two: off-policy
    if args.advantage.advantage_estimator == "gae":
        flat["old_values"] = values
    add_advantages([batch], samples, part, flat, state, options)
    loss_fn = make_policy_loss(options.policy, lambda: state.kl_coef, None, None)
    results = [loss_fn(policy, part) for part in parts]
    assert sum(int(count) for _, count, _ in results) == batch.num_targets
    return sum(total for total, _, _ in results) / batch.num_targets


# --- the papers, one response at a time


def log_probs(model: Table, sample: Sample) -> torch.Tensor:
    before = [sample.prompt_ids[-1], *sample.response_ids[:-1]]
    return model.table.log_softmax(-1)[before, sample.response_ids].double()


def clipped(ratio, advantage: float, low: float, high: float):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def group_of(n: int, scores=SCORES) -> list[float]:
    return scores[n // GROUP * GROUP : (n // GROUP + 1) * GROUP]


def normed(n: int, scores=SCORES) -> float:
    """DeepSeekMath, section 4.1.2; also DAPO equation 9, GSPO equation 6."""
    return (scores[n] - statistics.fmean(group_of(n, scores))) / (statistics.stdev(group_of(n, scores)) + 1e-6)


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


def ppo(samples, old, policy, reference, values):
    """Ouyang et al. 2022, equation 2; Schulman et al. 2016, equation 16, and 2017, equation 7; advantages are whitened."""
    advantages = []
    for sample, own in zip(samples, values.split(LENGTHS)):
        kl = log_probs(old, sample) - log_probs(reference, sample)
        rewards, own = (-0.02 * kl).tolist(), [*own.tolist(), 0.0]
        rewards[-1] += sample.score
        deltas = [reward + own[t + 1] - own[t] for t, reward in enumerate(rewards)]
        advantages.append([sum(0.95 ** (j - t) * deltas[j] for j in range(t, len(deltas))) for t in range(len(deltas))])
    everything = [value for row in advantages for value in row]
    mean, deviation = statistics.fmean(everything), math.sqrt(statistics.pvariance(everything) + 1e-8)
    total = 0.0
    for sample, row in zip(samples, advantages):
        for ratio, advantage in zip((log_probs(policy, sample) - log_probs(old, sample)).exp(), row):
            total = total + clipped(ratio, (advantage - mean) / deviation, 0.2, 0.2)
    return -total / len(everything)


PAPERS = {f.__name__: f for f in (grpo, dr_grpo, dapo, gspo, cispo, rloo, ppo)}


@pytest.mark.parametrize("size", [0.02, 0.7, 2.0])
@pytest.mark.parametrize("name", PRESETS)
def test_the_loss_and_its_gradient_are_those_of_the_paper(name, size):
    values = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    old, reference, *policies = Table(2, 0.0), Table(4, 0.5), Table(5, size), Table(5, size)
    loss = found_loss(arguments("--preset", name), old, policies[0], reference, values)
    expected = PAPERS[name](make_samples(), old, policies[1], reference, values)
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
    for name in PRESETS:
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


@pytest.mark.parametrize("loss_agg", ["token", "sequence", "fixed_length", "sum"])
def test_truncated_samples_have_no_loss_and_do_not_count_in_its_mean(loss_agg):
    flags = ["--preset", "dr_grpo", "--loss_agg", loss_agg, "--mask_truncated"]
    old, policy = Table(2, 0.0), Table(5, 0.3)
    total, count = 0.0, 0
    for n, sample in enumerate(make_samples()):
        if n not in CUT:
            ratio = (log_probs(policy, sample) - log_probs(old, sample)).exp()
            gain = clipped(ratio, SCORES[n] - statistics.fmean(group_of(n)), 0.2, 0.2).sum()
            divisor = {"token": 1, "sum": 1, "sequence": LENGTHS[n], "fixed_length": MAX_LEN}[loss_agg]
            total, count = total + gain / divisor, count + (LENGTHS[n] if loss_agg == "token" else 1)
    found = found_loss(arguments(*flags), old, policy, None, None)
    assert found.item() == pytest.approx(-total.item() / count, abs=1e-6)
