"""SkyRL: https://github.com/NovaSky-AI/SkyRL"""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from formulas.bypass import of_engine
from formulas.covariances import RANGE, SHARE, clip_cov_case, kl_cov_case
from formulas.rollouts import (
    DUAL,
    GROUP,
    HIGH,
    LOW,
    WIDTH,
    Rollout,
    absent,
    as_it_is,
    estimator_case,
    held,
    held_at_10,
    loss_case,
    one_advantage,
    our_advantages,
    our_loss,
    plain,
    probable,
    right_or_wrong,
    whitened,
)

from trainer.methods import advantages as adv
from trainer.models.losses import policy_loss as losses

CONFIG = {"eps_clip_low": LOW, "eps_clip_high": HIGH, "clip_ratio_c": DUAL}
CONFIG["sapo"] = SimpleNamespace(tau_pos=1.0, tau_neg=1.05)
CONFIG["clip_cov"] = SimpleNamespace(clip_ratio=1.0, clip_cov_lb=RANGE[0], clip_cov_ub=RANGE[1])
CONFIG["kl_cov"] = SimpleNamespace(kl_cov_frac=SHARE, ppo_kl_coef=1.0)
OFF = ("tis_ratio_type", "sequence_mask_metric", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high")
OFF += ("token_mask_is_threshold_low", "token_mask_is_threshold_high")
CONFIG["off_policy_correction"] = SimpleNamespace(**dict.fromkeys(OFF))


def load(checkout: str):
    packages = "skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils"
    plain(checkout, *packages)
    absent("ray", "jaxtyping", "loguru", "omegaconf", "skyrl.train", "skyrl.train.config")
    sys.modules["ray"].is_initialized = lambda: False
    peer = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    peer.corrections = sys.modules["skyrl.backends.skyrl_train.utils.off_policy_correction_utils"]
    return peer


def in_32_bits(inputs: Callable) -> Callable:
    """SkyRL's ratios have 32 bits: the log-ratios have them too, so that only the ratio is rounded."""

    def changed(rollout: Rollout) -> Rollout:
        rollout = inputs(rollout)
        rollout.new = (rollout.old + (rollout.new.detach() - rollout.old).float()).requires_grad_()
        return rollout

    return changed


MEANS = {"token": "token_mean", "sequence": "sequence_mean", "fixed_length": "seq_mean_token_sum_norm"}
MEANS |= {"sum": "seq_mean_token_sum_norm", "prompt": "prompt_mean"}


def their_loss(skyrl, rollout: Rollout, name: str, loss_agg: str, scaled: bool = True, **config) -> torch.Tensor:
    """SkyRL sums a loss whose advantages have the weights of the mean. Without `scaled`, the sum is divided here, as bounds
    of covariances and the coefficient of a KL have no such weights."""
    mask, advantages, count = rollout.mask.double(), rollout.advantages, rollout.mask.sum()
    if scaled:
        starts = range(0, len(mask), GROUP)
        width = 1 if loss_agg == "sum" else WIDTH
        facts = MEANS[loss_agg], len(mask), width, [(start, start + GROUP) for start in starts]
        advantages, count = skyrl.apply_loss_reduction_to_advantages_minibatch(advantages, mask, *facts), 1
    given = SimpleNamespace(policy_loss_type=name, loss_reduction=MEANS[loss_agg], **CONFIG | config)
    rollout_log_probs = config.get("rollout_log_probs")
    old = rollout.old if rollout_log_probs is None else rollout.values
    args = rollout.new, old, advantages, given, mask, rollout_log_probs
    return skyrl.PolicyLossRegistry.get(name)(*args)[0] / count


def own_case(ours: str, theirs: str, loss_agg: str, inputs: Callable = as_it_is, **options) -> Callable:
    return loss_case(partial(their_loss, name=theirs, loss_agg=loss_agg), ours, loss_agg, in_32_bits(inputs), **options)


def cispo(skyrl, rollout: Rollout, anchor: str = "old", **config) -> torch.Tensor:
    chosen = SimpleNamespace(cispo_anchor=anchor, cispo_eps_clip_low=LOW, cispo_eps_clip_high=HIGH)
    return their_loss(skyrl, rollout, "cispo", "token", cispo=chosen, **config)


def dppo_case(kind: str) -> Callable:
    chosen = SimpleNamespace(dppo_type=f"binary_{kind}", delta_low=LOW, delta_high=HIGH)
    theirs = partial(their_loss, name="dppo", loss_agg="token", dppo=chosen)
    return loss_case(theirs, f"dppo_{kind}", "token", in_32_bits(probable))


def bypass(skyrl, rollout: Rollout) -> tuple:
    """The old log-probs that SkyRL gets are the rollout's `values`, which must not count."""
    rollout = in_32_bits(held)(rollout)
    theirs = cispo(skyrl, rollout, "rollout", rollout_log_probs=rollout.old)
    return our_loss(of_engine(rollout), "cispo", "token"), theirs


def advantages(skyrl, rollout: Rollout, name: str, **options) -> torch.Tensor:
    args = {"token_level_rewards": rollout.rewards, "response_mask": rollout.mask.double(), "index": rollout.index}
    return skyrl.AdvantageEstimatorRegistry.get(name)(**args, **options)[0]


def gae(skyrl, rollout: Rollout) -> tuple:
    ours, _ = our_advantages(rollout, "gae", gamma=0.98, lambd=0.9)
    theirs = advantages(skyrl, rollout, "gae", values=rollout.values, gamma=0.98, lambd=0.9)
    return whitened(rollout, ours), theirs * rollout.mask


def reinforce(skyrl, rollout: Rollout) -> tuple:
    ours, _ = our_advantages(rollout, "reinforce", gamma=0.97)
    return whitened(rollout, ours), advantages(skyrl, rollout, "reinforce++", gamma=0.97)


def value(skyrl, rollout: Rollout) -> tuple:
    """SkyRL has the mean over responses of means. So a rollout has one response here, which has every token."""
    of_tokens = rollout.values, rollout.new, rollout.advantages
    old, new, returns = (values[rollout.mask][None] for values in of_tokens)
    ours = losses.value_loss(new, old, returns, 0.2).mean()
    config = SimpleNamespace(value_clip=0.2)
    return ours, skyrl.ppo_critic_loss(new, old, returns, config, torch.ones_like(new))[0]


def kl_case(estimator: str) -> Callable:
    """SkyRL also holds k3 at 10."""

    def case(skyrl, rollout: Rollout) -> tuple:
        ours = adv.kl_estimate(rollout.new, rollout.old, estimator)
        held = ours.clamp(max=10) if estimator == "k3" else ours
        return held, skyrl.compute_approx_kl(rollout.new, rollout.old, None, estimator)

    return case


LIMITS = SimpleNamespace(token_tis_ratio_clip_high=2.0, sequence_tis_ratio_clip_high=2.0)
LIMITS.token_mask_is_threshold_low, LIMITS.token_mask_is_threshold_high = 0.5, 2.0
LIMITS.product_mask_low = LIMITS.geo_mask_low = 0.5
LIMITS.product_mask_high = LIMITS.geo_mask_high = 2.0


def correction_case(ours: Callable, function: str, *kind: str) -> Callable:
    """Of the log-probs of training, `new`, and of the engine, `old`."""

    def case(skyrl, rollout: Rollout) -> tuple:
        mask, new = rollout.mask, in_32_bits(as_it_is)(rollout).new.detach()
        theirs, _ = getattr(skyrl.corrections, function)(new, rollout.old, mask.double(), *kind, LIMITS)
        return ours(new - rollout.old, mask).double() * mask, theirs.double().expand(mask.shape) * mask

    return case


def weights(level: str) -> Callable:
    return correction_case(lambda *args: adv.importance_weights(*args, level, 2.0), "compute_tis_ratio", level)


def within(level: str, *theirs: str) -> Callable:
    return correction_case(lambda *args: adv.within_ratios(*args, level, (0.5, 2.0)), *theirs)


ROWS: dict[str, Callable] = {
    "`ppo` with `--dual_clip`, mean over tokens": own_case("ppo", "dual_clip", "token", dual_clip=DUAL),
    "`ppo`, mean over responses of means": own_case("ppo", "regular", "sequence"),
    "`ppo`, mean over responses of sums": own_case("ppo", "regular", "sum"),
    "`ppo`, sums over a fixed length": own_case("ppo", "regular", "fixed_length"),
    "`ppo`, mean over prompts of means": own_case("ppo", "regular", "prompt"),
    "`--bypass_mode` with `cispo`": bypass,
    "`gspo_token`": own_case("gspo_token", "gspo", "sequence", held_at_10),
    "LUSPO: `gspo`, mean over responses of sums": own_case("gspo", "gspo", "sum", one_advantage),
    "`sapo`": own_case("sapo", "sapo", "sequence"),
    "`cispo`": loss_case(cispo, "cispo", "token", in_32_bits(held)),
    "`dppo_tv`": dppo_case("tv"),
    "`dppo_kl`": dppo_case("kl"),
    "`clip_cov`": clip_cov_case(partial(their_loss, name="clip_cov", loss_agg="token", scaled=False)),
    "`kl_cov`": kl_cov_case(partial(their_loss, name="kl_cov", loss_agg="token", scaled=False)),
    "`group_norm`": estimator_case(partial(advantages, name="grpo"), "group_norm"),
    "`dr_grpo`": estimator_case(partial(advantages, name="grpo", grpo_norm_by_std=False), "dr_grpo"),
    "`rloo`": estimator_case(partial(advantages, name="rloo"), "rloo"),
    "`maxrl`": estimator_case(partial(advantages, name="maxrl", epsilon=1e-12), "maxrl", right_or_wrong),
    "`gae`": gae,
    "`reinforce`": reinforce,
    "`--value_clip`": value,
    "KL `k1`": kl_case("k1"),
    "KL `k2`": kl_case("k2"),
    "KL `k3`": kl_case("k3"),
    "`--tis_cap`, tokens": weights("token"),
    "`--tis_cap`, responses": weights("sequence"),
    "`--tis_mask`, tokens": within("token", "compute_token_mask"),
    "`--tis_mask`, responses": within("sequence", "compute_sequence_mask", "product"),
    "`--tis_mask`, geometric": within("geometric", "compute_sequence_mask", "geometric"),
}
