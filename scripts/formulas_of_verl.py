"""The formulas of RL against the functions of verl themselves: python scripts/formulas_of_verl.py CHECKOUT_OF_VERL

Each formula runs on 200 random and extreme inputs, in fp64. The table has the largest difference of values and of gradients,
as a share of the largest value. Where a convention differs, the case makes it equal and says so. verl is not installed: the
script takes the files of the checkout that hold the formulas, and puts empty modules in place of its frameworks.
"""

import argparse
import importlib
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from trainer.methods import advantages as adv
from trainer.methods.rollout_corrections import chosen_tokens
from trainer.models.losses import policy_loss as losses

INPUTS, GROUP, WIDTH, LIMIT = 200, 4, 9, 1e-6
LOW, HIGH, DUAL = 0.2, 0.28, 3.0
EXTREMES = (0.0, 1e-12, 3.0, 15.0, 30.0)  # added to log-ratios
PLAIN_PACKAGES = ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers")
ABSENT = ("omegaconf", "tensordict", "verl.trainer.config", "verl.trainer.config.algorithm", "verl.protocol")
ABSENT += ("verl.workers.config", "verl.workers.config.actor", "verl.utils.device")


class Config(dict):
    """verl's ActorConfig, as its losses read it."""

    __getattr__ = dict.__getitem__


def load_verl(checkout: str) -> tuple:
    """(core_algos, rollout_corr_helper) of verl."""
    for name in PLAIN_PACKAGES:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(Path(checkout, *name.split(".")))]
    for name in ABSENT:
        sys.modules[name] = MagicMock()
    sys.modules["verl.workers.config"].ActorConfig, sys.modules["verl.trainer.config"].AlgoConfig = Config, tuple
    sys.modules["verl.utils.device"].get_device_name = lambda: "cpu"
    groupwise = importlib.import_module("verl.utils.groupwise")
    for name in ("as_torch_index", "group_mean_std"):
        setattr(sys.modules["verl.utils"], name, getattr(groupwise, name))
    names = ("core_algos", "rollout_corr_helper")
    return tuple(importlib.import_module(f"verl.trainer.ppo.{name}") for name in names)


@dataclass
class Rollout:
    """Random responses to prompts, GROUP each. Tensors are (n, WIDTH), but scores (n,)."""

    mask: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    advantages: torch.Tensor
    scores: torch.Tensor
    values: torch.Tensor

    @classmethod
    def random(cls, number: int) -> "Rollout":
        generator = torch.Generator().manual_seed(number)
        count = GROUP * (1 + number % 3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        lengths = torch.randint(1, WIDTH + 1, (count,), generator=generator)
        lengths[0] = WIDTH
        old = -normal(count, WIDTH).abs() - 0.01
        new = old + normal(count, WIDTH) * (0.05, 0.5, 2.0)[number % 3]
        new[1, 0] += EXTREMES[number % len(EXTREMES)] * (-1) ** number
        scores = normal(count) if number % 2 else (normal(count) > 0).double()
        if number % 7 == 0:
            scores[:GROUP] = 1.0  # a group of equal scores
        mask = torch.arange(WIDTH)[None] < lengths[:, None]
        return cls(mask, old, new.requires_grad_(), normal(count, WIDTH) * mask, scores, normal(count, WIDTH) * mask)

    @property
    def index(self):
        return (torch.arange(len(self.scores)) // GROUP).numpy()

    @property
    def rewards(self) -> torch.Tensor:
        return adv.token_rewards(self.scores, self.mask)


def our_loss(rollout: Rollout, name: str, loss_agg: str, **options) -> torch.Tensor:
    """The mean loss that a step descends."""
    mask, lengths = rollout.mask, rollout.mask.sum(1)

    def mean_by_sequence(values: torch.Tensor) -> torch.Tensor:
        return ((values * mask).sum(1) / lengths)[:, None].expand_as(values)

    chosen = options.pop("chosen", None)
    log_ratio = rollout.new - rollout.old
    tokens = losses.PolicyTokens(rollout.new, log_ratio, rollout.advantages, mean_by_sequence, chosen)
    own = losses.PolicyOptions(eps_low=LOW, eps_high=HIGH, **options)
    values, _, _ = losses.POLICY_LOSSES[name](tokens, own)
    weights = torch.tensor(losses.token_weights(lengths.tolist(), loss_agg, WIDTH), dtype=torch.float64)
    count = sum(losses.num_targets(length, loss_agg) for length in lengths.tolist())
    return (torch.where(mask, values, 0.0) * weights[:, None]).sum() / count


def their_loss(core, rollout: Rollout, name: str, loss_agg: str, **config) -> torch.Tensor:
    given = Config(clip_ratio=LOW, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=DUAL, global_batch_info={})
    given |= {"tau_pos": 1.0, "tau_neg": 1.05} | config
    function = core.get_policy_loss_fn(name)
    args = rollout.old, rollout.new, rollout.advantages, rollout.mask.double()
    return function(*args, loss_agg_mode=loss_agg, config=given)[0]


MEANS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "sum": "seq-mean-token-sum"}


def loss_case(ours: str, theirs: str, loss_agg: str, **options) -> Callable:
    def case(core, _, rollout: Rollout) -> tuple:
        return our_loss(rollout, ours, loss_agg, **options), their_loss(core, rollout, theirs, MEANS[loss_agg])

    return case


def gspo(core, _, rollout: Rollout) -> tuple:
    """verl holds the ratio of a response at e^10, we at e^20: no input is above."""
    rollout.new = torch.minimum(rollout.new.detach(), rollout.old + 10).requires_grad_()
    return our_loss(rollout, "gspo_token", "sequence"), their_loss(core, rollout, "gspo", MEANS["sequence"])


def fixed_length(core, _, rollout: Rollout) -> tuple:
    """verl's seq-mean-token-sum-norm is a sum over responses, ours a mean over them."""
    theirs = their_loss(core, rollout, "vanilla", "seq-mean-token-sum-norm") / len(rollout.scores)
    return our_loss(rollout, "ppo", "fixed_length", dual_clip=DUAL), theirs


def covariance_case(name: str, share: float) -> Callable:
    """On policy, where verl's log-probs of the update are the old ones of the choice. Its choice within the range is
    of all tokens here, so that it is not random."""

    def case(core, _, rollout: Rollout) -> tuple:
        rollout.old = rollout.new.detach()
        options = SimpleNamespace(policy=losses.PolicyOptions(loss=name), cov_range=(0.1, 5.0), cov_share=share, seed=0)
        mask, chosen = rollout.mask, torch.zeros_like(rollout.mask)
        chosen[mask] = chosen_tokens(rollout.old[mask], rollout.advantages[mask], options, 0)
        if name == "clip_cov" and not chosen.any():
            return torch.zeros(2)
        config = SimpleNamespace(
            clip_cov_ratio=share, clip_cov_lb=0.1, clip_cov_ub=5.0, kl_cov_ratio=share, ppo_kl_coef=1.0
        )
        return our_loss(rollout, name, "token", chosen=chosen), their_loss(
            core, rollout, name, "token-mean", policy_loss=config
        )

    return case


def group_case(estimator: str, function: str, **theirs) -> Callable:
    def case(core, _, rollout: Rollout) -> tuple:
        own = adv.AdvantageOptions(estimator, GROUP)
        ours, _ = adv.estimate_advantages(own, rollout.scores, rollout.mask)
        found, _ = getattr(core, function)(rollout.rewards, rollout.mask.double(), rollout.index, **theirs)
        return ours, found

    return case


def whitened(rollout: Rollout, ours: torch.Tensor) -> torch.Tensor:
    """verl divides by the unbiased variance: (count - 1) / count of it is ours."""
    count = rollout.mask.sum()
    return ours * ((count - 1) / count).sqrt()


def gae(core, _, rollout: Rollout) -> tuple:
    own = adv.AdvantageOptions("gae", GROUP, gamma=0.98, lambd=0.9)
    ours, returns = adv.estimate_advantages(own, rollout.scores, rollout.mask, values=rollout.values)
    mask = rollout.mask.double()
    theirs, their_returns = core.compute_gae_advantage_return(rollout.rewards, rollout.values, mask, 0.98, 0.9)
    return torch.stack([whitened(rollout, ours), returns]), torch.stack([theirs, their_returns]) * mask


def reinforce(core, _, rollout: Rollout) -> tuple:
    own = adv.AdvantageOptions("reinforce", gamma=0.97)
    ours, _ = adv.estimate_advantages(own, rollout.scores, rollout.mask)
    args = rollout.rewards, rollout.mask.double(), Config(gamma=0.97)
    theirs, _ = core.compute_reinforce_plus_plus_outcome_advantage(*args)
    return whitened(rollout, ours), theirs


def reinforce_baseline(core, _, rollout: Rollout) -> tuple:
    own = adv.AdvantageOptions("reinforce_baseline", GROUP)
    ours, _ = adv.estimate_advantages(own, rollout.scores, rollout.mask)
    args = rollout.rewards, rollout.mask.double(), rollout.index
    theirs, _ = core.compute_reinforce_plus_plus_baseline_outcome_advantage(*args)
    return whitened(rollout, ours), theirs


def value(core, _, rollout: Rollout) -> tuple:
    ours = losses.value_loss(rollout.new, rollout.values, rollout.advantages, 0.2)[rollout.mask].mean()
    args = rollout.new, rollout.advantages, rollout.values, rollout.mask.double(), 0.2
    return ours, core.compute_value_loss(*args)[0]


def kl_case(estimator: str) -> Callable:
    """verl also holds k3 at 10."""

    def case(core, _, rollout: Rollout) -> tuple:
        ours = adv.kl_estimate(rollout.new, rollout.old, estimator)
        held = ours.clamp(max=10) if estimator == "k3" else ours
        return held, core.kl_penalty(rollout.new, rollout.old, estimator)

    return case


def weights_case(level: str) -> Callable:
    def case(_, correction, rollout: Rollout) -> tuple:
        log_ratio = (rollout.new - rollout.old).detach()
        theirs, _ = correction.compute_rollout_correction_weights(log_ratio, rollout.mask.double(), level, 2.0)
        return adv.importance_weights(log_ratio, rollout.mask, level, 2.0) * rollout.mask, theirs

    return case


def rejection_case(ours: Callable, theirs: str, threshold: str) -> Callable:
    def case(_, correction, rollout: Rollout) -> tuple:
        log_ratio = (rollout.new - rollout.old).detach()
        kept, _ = correction.compute_rollout_rejection_mask(log_ratio, rollout.mask.double(), theirs, threshold)
        return (ours(rollout, log_ratio) & rollout.mask).double(), kept.double()

    return case


def within(level: str) -> Callable:
    return lambda rollout, log_ratio: adv.within_ratios(log_ratio, rollout.mask, level, (0.5, 2.0))


def near(estimator: str, most: float) -> Callable:
    def kept(rollout: Rollout, log_ratio: torch.Tensor) -> torch.Tensor:
        return adv.within_kl(rollout.old, rollout.old + log_ratio, rollout.mask, estimator, most)[:, None]

    return kept


CASES: dict[str, Callable] = {
    "`ppo` with `--dual_clip`, mean over tokens": loss_case("ppo", "vanilla", "token", dual_clip=DUAL),
    "`ppo`, mean over responses of means": loss_case("ppo", "vanilla", "sequence", dual_clip=DUAL),
    "`ppo`, mean over responses of sums": loss_case("ppo", "vanilla", "sum", dual_clip=DUAL),
    "`ppo`, sums over a fixed length": fixed_length,
    "`gspo_token`": gspo,
    "`sapo`": loss_case("sapo", "sapo", "sequence"),
    "`cispo`": loss_case("cispo", "cispo", "token"),
    "`clip_cov`": covariance_case("clip_cov", share=1.0),
    "`kl_cov`": covariance_case("kl_cov", share=0.2),
    "`group_norm`": group_case("group_norm", "compute_grpo_outcome_advantage"),
    "`dr_grpo`": group_case("dr_grpo", "compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=False),
    "`rloo`": group_case("rloo", "compute_rloo_outcome_advantage"),
    "`gae`": gae,
    "`reinforce`": reinforce,
    "`reinforce_baseline`": reinforce_baseline,
    "`--value_clip`": value,
    "KL `k1`": kl_case("k1"),
    "KL `k2`": kl_case("k2"),
    "KL `k3`": kl_case("k3"),
    "`--tis_cap`, tokens": weights_case("token"),
    "`--tis_cap`, responses": weights_case("sequence"),
    "`--tis_mask`, tokens": rejection_case(within("token"), "token_k1", "0.5_2.0"),
    "`--tis_mask`, responses": rejection_case(within("sequence"), "seq_sum_k1", "0.5_2.0"),
    "`--tis_mask`, geometric": rejection_case(within("geometric"), "seq_mean_k1", "0.5_2.0"),
    "`--rollout_kl_max`, `k2`": rejection_case(near("k2", 0.1), "seq_mean_k2", "0.1"),
    "`--rollout_kl_max`, `k3`": rejection_case(near("k3", 0.1), "seq_mean_k3", "0.1"),
}


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value of theirs, or of 1."""
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        return math.inf
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item()


def largest(modules: tuple, case: Callable) -> tuple[float, float | None]:
    """The largest differences of values and of gradients over all inputs."""
    values, gradients = 0.0, None
    for number in range(INPUTS):
        results = case(*modules, rollout := Rollout.random(number))
        values = max(values, difference(*(result.detach() for result in results)))
        if all(result.requires_grad for result in results):
            found = [torch.autograd.grad(result.sum(), rollout.new, retain_graph=True)[0] for result in results]
            gradients = max(gradients or 0.0, difference(*found))
    return values, gradients


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="a checkout of verl")
    modules, worst = load_verl(parser.parse_args().checkout), 0.0
    print("| Formula | Values | Gradients |\n|---|---|---|")
    for name, case in CASES.items():
        values, gradients = largest(modules, case)
        worst = max(worst, values, gradients or 0.0)
        print(f"| {name} | {values:.0e} | {'' if gradients is None else f'{gradients:.0e}'} |", flush=True)
    print(
        f"\n{len(CASES)} formulas on {INPUTS} inputs: the largest difference is {worst:.0e}, at most {LIMIT:g} is allowed"
    )
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
