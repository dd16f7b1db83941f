"""Metrics of a rollout, from its samples and log-probs. Values are the same on every rank.

Every rank knows the scores and sizes of all samples. Flat vectors have the tokens that this rank trains.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from trainer.errors import UserError, plain
from trainer.methods import advantages as adv
from trainer.methods.ppo_state import PPOOptions, RLState
from trainer.metrics import counted
from trainer.models.losses.policy_loss import bounded
from trainer.rollout.placement import Part
from trainer.rollout.prompt_order import WRONG_AND_RIGHT
from trainer.rollout.samples import Sample

PERCENTS = (10, 50, 90)
PASSES = ("eval_pass_at_1", "pass_at_1")  # of a training, of `trainer eval`


def scores_of(samples: list[Sample]) -> torch.Tensor:
    """(samples,) fp64. It is NaN for a sample that failed."""
    return torch.tensor([math.nan if sample.failed else sample.score for sample in samples], dtype=torch.float64)


def scores_by_reward(samples: list[Sample], names: Sequence[str]) -> torch.Tensor:
    """(samples, rewards) fp64, of the functions of --reward_func. It is NaN where a function gave none, or a sample failed."""
    rows = [[math.nan if s.failed else s.metrics.get(name, math.nan) for name in names] for s in samples]
    return torch.tensor(rows, dtype=torch.float64)


def rollout_log_probs_of(part: Part) -> torch.Tensor:
    return torch.tensor([p for sample in part.samples for p in sample.log_probs], dtype=torch.float64)


def sums_of_samples(part: Part, **flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sum of each flat vector over the tokens of every sample of the rollout, (samples,) (all-reduce over dp x sp).

    It is 0 for a sample that failed.
    """
    mask = adv.rows_mask(part.lengths, part.width)
    shared = part.share(torch.stack([adv.to_rows(values, mask).sum(1) for values in flat.values()], 1))
    return dict(zip(flat, shared.T.contiguous() * part.counted))


def rewards_of_turns(part: Part) -> torch.Tensor:
    """(own samples, width), fp64: the reward of each turn, at the last token that the model generated in it."""
    rewards = torch.zeros(len(part.samples), part.width, dtype=torch.float64)
    for row, sample in zip(rewards, part.samples):
        ends = itertools.accumulate(end - start for start, end in sample.turns)
        for end, reward in zip(ends, sample.turn_rewards, strict=True):
            row[end - 1] += reward
    return rewards


def means_over_tokens(part: Part, **flat: torch.Tensor) -> dict[str, float]:
    """The mean of each flat vector over all tokens that count in the rollout (all-reduce over dp x sp)."""
    return {name: (sums.sum() / part.num_tokens).item() for name, sums in sums_of_samples(part, **flat).items()}


def sample_facts(samples: list[Sample]) -> dict[str, float]:
    """Metrics that need only the samples. Those that failed count only in `failed_fraction`, which is there if any did."""
    asked, samples = len(samples), [sample for sample in samples if not sample.failed]
    scores, sizes = scores_of(samples), [sample.size() for sample in samples]
    lengths = torch.tensor([size.generated for size in sizes], dtype=torch.float64)
    facts = {
        "reward": scores.mean().item(),
        "reward_std": scores.std(correction=0).item(),
        "response_length": lengths.mean().item(),
        **quantiles("reward", scores),
        **quantiles("response_length", lengths),
        "truncated_fraction": sum(not sample.finished for sample in samples) / len(samples),
    }
    if asked > len(samples):
        facts["failed_fraction"] = 1 - len(samples) / asked
    if any(size.turns for size in sizes):
        facts["turns"] = sum(size.turns for size in sizes) / len(samples)
        facts["env_tokens"] = sum(size.response for size in sizes) / len(samples) - facts["response_length"]
    if any(size.histories > 1 for size in sizes):
        facts["histories"] = sum(size.histories for size in sizes) / len(samples)
    for end in sorted({sample.end for sample in samples} - {""}):
        facts[f"end_{end}"] = sum(sample.end == end for sample in samples) / len(samples)
    for name in dict.fromkeys(name for sample in samples for name in sample.metrics):
        values = [sample.metrics[name] for sample in samples if name in sample.metrics]  # not every call returns it
        facts[f"reward_{name}"] = sum(values) / len(values)
    return facts


def quantiles(name: str, values: torch.Tensor) -> dict[str, float]:
    """The 10th, 50th and 90th percentile of `values` (n,), between two values by their distance."""
    shares = torch.tensor([percent / 100 for percent in PERCENTS], dtype=torch.float64)
    return {f"{name}_p{percent}": value for percent, value in zip(PERCENTS, values.quantile(shares).tolist())}


def rewards_by_group(samples: list[Sample], groups: dict[int, list[str]]) -> dict[str, float]:
    """The mean score of the samples of each group, as reward/GROUP. `groups` names those of a prompt's row."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name in () if sample.failed else groups.get(sample.row, ()):
            found.setdefault(name, []).append(sample.score)
    return {f"reward/{name}": math.fsum(scores) / len(scores) for name, scores in sorted(found.items())}


def group_facts(samples: list[Sample], options: PPOOptions) -> dict[str, float]:
    """Shares of the prompts whose responses are all right, all wrong, or have all the same score (if there are several)."""
    size, (wrong, right) = options.advantages.group_size, options.reward_range or WRONG_AND_RIGHT
    groups = scores_of(samples).view(-1, size)
    low, high = adv.range_of_groups(groups[~groups.isnan().all(1)])
    facts = {"groups_all_right": low >= right, "groups_all_wrong": high <= wrong}
    facts |= {"groups_equal": low == high} if size > 1 else {}
    return {name: found.double().mean().item() for name, found in facts.items()}


def failed_note(samples: list[Sample]) -> dict[str, str]:
    """A line about samples that got no score, if there are any."""
    lost = [sample.failed for sample in samples if sample.failed]
    text = f"warning: {len(lost)} of {counted(len(samples), 'sample')} failed and are left out"
    return {"failed": f"{text}: {plain(lost[0])}"} if lost else {}


def misread_as_passes(scores: torch.Tensor) -> bool:
    """Whether `scores` (n,) seem to have another best one than 1: it is above, or the best one here is graded, or 0 after less."""
    best = best_score(scores)
    return best > 1 or 0 < best < 1 or (best == 0 and bool((scores < 0).any()))


def best_score(scores: torch.Tensor) -> float:
    """The largest of `scores` (n,), or NaN. Failed samples have NaN."""
    return max((score for score in scores.tolist() if not math.isnan(score)), default=math.nan)


def range_note(scores: torch.Tensor, users: list[str], reward_range: Sequence[float] | None) -> dict[str, str]:
    """A line about `scores` (n,) if `users` take 0 and 1 for wrong and right, and no range was given.

    Some are outside of 0 to 1, or `misread_as_passes` found that even the best one is not right.
    """
    if reward_range is not None or not users:
        return {}
    outside, best, all_of = (
        ((scores < 0) | (scores > 1)).sum().item(),
        best_score(scores),
        counted(len(scores), "score"),
    )
    if outside:
        text = f"{outside} of {all_of} are not from 0 to 1, which {', '.join(users)} take for wrong and right"
    elif 0 < best < 1 and (users := [name for name in users if name in PASSES]):
        text = f"the best of {all_of} is {best:.6g}, but {', '.join(users)} take 1 for right"
    else:
        return {}
    return {"range": f"warning: {text}: give --reward_range WRONG RIGHT"}


def score_notes(samples: list[Sample], options: PPOOptions, curriculum: str, evaluates: bool) -> dict[str, str]:
    """Lines for the user about the scores of a rollout, by subject: scores that are not read as meant, or teach nothing."""
    scores = scores_of(samples)
    is_bounded = options.filtering_range is not None and math.isfinite(options.filtering_range[0])
    users = {
        "--dynamic_filtering_range": is_bounded,
        f"--curriculum {curriculum}": curriculum != "none",
        "--positive_nll_coef": bool(options.positive_nll_coef),
        PASSES[0]: evaluates and misread_as_passes(scores),
        "groups_all_right": options.advantages.group_size > 1 and bool((scores > 1).any()),
    }
    notes = failed_note(samples) | range_note(
        scores, [name for name, used in users.items() if used], options.reward_range
    )
    size = options.advantages.group_size
    low, high = adv.range_of_groups(scores.view(-1, size) if size > 1 else scores.view(1, -1))
    if options.advantages.estimator not in ("distill", "gdpo") and len(scores) > 1 and (low >= high).all():
        kind = "all responses to each prompt have" if size > 1 else "all responses have"
        notes["equal"] = f"warning: in a rollout, {kind} the same score, so scores teach nothing: check the reward"
    return notes


def log_prob_facts(part: Part, flat: dict, state: RLState, options: PPOOptions) -> dict[str, float]:
    """The KL to the reference, and the difference between log-probs of the rollout engine and of training.

    The difference is given as mean, as maximum, and as KL(rollout || training) by the k3 estimator. It is of the tokens whose
    `trained_log_probs` are `seen`, which are those of the first batch with `bypass_mode`, else all.
    """
    trained, rollout_log_probs, seen = flat["trained_log_probs"], rollout_log_probs_of(part), flat["seen"]
    difference, share = (trained - rollout_log_probs).abs(), means_over_tokens(part, share=seen)["share"] or 1.0
    values = {
        "rollout_logprob_diff": difference / share,
        "rollout_kl": adv.kl_estimate(rollout_log_probs, trained, "k3") / share,
    }
    if "ref_log_probs" in flat:
        values["kl"] = adv.kl_estimate(flat["old_log_probs"], flat["ref_log_probs"], options.kl_estimator)
    facts = means_over_tokens(part, **values)
    if "kl" in facts:
        per_response = facts["kl"] * part.num_tokens / int(part.counted.sum())
        facts |= {"kl_coef": state.kl_coef, "kl_per_response": per_response}

    def mean(values: torch.Tensor) -> float:
        return means_over_tokens(part, mean=values * seen)["mean"] / share

    facts["rollout_ess"] = effective_share(trained - rollout_log_probs, mean)
    largest = adv.to_rows(difference, adv.rows_mask(part.lengths, part.width)).amax(1)
    return facts | {"rollout_logprob_diff_max": (part.share(largest) * part.counted).max().item()}


def check_log_probs(difference: float, limit: float) -> None:
    """Raise UserError if the engine samples from another model than the one that is trained.

    `difference` is the mean of |training - engine| over the log-probs of a rollout. A sync that fails in part makes it
    large, also where each weight arrived: engines keep values that they once derived from weights.
    """
    if difference > limit or (math.isnan(difference) and limit < math.inf):
        if not limit:
            found = f"log-probs of the engine and of training differ by {difference:.3g} in the mean"
            raise UserError("--exact or --max_logprob_diff 0", found, instead="Remove the flag, or report this model.")
        found = f"{limit:g}, but log-probs of the engine and of training differ by {difference:.3g} in the mean"
        raise UserError(
            "--max_logprob_diff", found, instead="Its weights are not those of the policy: try --rollout_engine hf."
        )


def effective_share(log_weights: torch.Tensor, mean: Callable = lambda values: values.mean().item()) -> float:
    """The effective sample size of importance weights, as a share of their number: (sum w)^2 / (n sum w^2), Kish 1965.

    Weights of exp(0) give 1. Weights [1, 0] give 0.5. `mean` is over the tokens of all ranks.
    """
    weights = bounded(log_weights).exp()
    return mean(weights) ** 2 / mean(weights**2)
