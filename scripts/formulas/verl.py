"""verl: https://github.com/verl-project/verl"""

import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
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
    Rollout,
    absent,
    estimator_case,
    gradients_of,
    held_at_10,
    loss_case,
    our_advantages,
    our_loss,
    plain,
    probable,
    whitened,
)

from trainer.methods import advantages as adv
from trainer.models.losses import policy_loss as losses


class Config(dict):
    """verl's ActorConfig, as its losses read it."""

    __getattr__ = dict.__getitem__


def load_core(checkout: str):
    """verl.trainer.ppo.core_algos of verl, or of an early fork of it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        del sys.modules[name]
    plain(checkout, "verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers")
    absent("omegaconf", "tensordict", "verl.trainer.config", "verl.trainer.config.algorithm", "verl.protocol")
    absent("verl.workers.config", "verl.workers.config.actor", "verl.utils.device", "einops")
    sys.modules["verl.workers.config"].ActorConfig, sys.modules["verl.trainer.config"].AlgoConfig = Config, tuple
    sys.modules["verl.utils.device"].get_device_name = lambda: "cpu"
    try:
        groupwise = importlib.import_module("verl.utils.groupwise")
    except ModuleNotFoundError:  # of a fork
        return importlib.import_module("verl.trainer.ppo.core_algos")
    for name in ("as_torch_index", "group_mean_std"):
        setattr(sys.modules["verl.utils"], name, getattr(groupwise, name))
    return importlib.import_module("verl.trainer.ppo.core_algos")


def load(checkout: str) -> SimpleNamespace:
    core = load_core(checkout)
    return SimpleNamespace(core=core, correction=importlib.import_module("verl.trainer.ppo.rollout_corr_helper"))


MEANS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "sum": "seq-mean-token-sum"}
MEANS["fixed_length"] = "seq-mean-token-sum-norm"


def their_loss(verl, rollout: Rollout, name: str, loss_agg: str, **config) -> torch.Tensor:
    given = Config(clip_ratio=LOW, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=DUAL, global_batch_info={})
    given |= {"tau_pos": 1.0, "tau_neg": 1.05} | config
    args = rollout.old, rollout.new, rollout.advantages, rollout.mask.double()
    return verl.core.get_policy_loss_fn(name)(*args, loss_agg_mode=MEANS[loss_agg], config=given)[0]


def own_case(ours: str, theirs: str, loss_agg: str, inputs: Callable = lambda rollout: rollout, **options) -> Callable:
    return loss_case(partial(their_loss, name=theirs, loss_agg=loss_agg), ours, loss_agg, inputs, **options)


def dppo_case(name: str) -> Callable:
    """verl multiplies log p by a ratio without a gradient, at most `clip_ratio_c`. No input reaches this bound."""
    theirs = partial(their_loss, name=name, loss_agg="token", clip_ratio_c=1e9)
    return gradients_of(loss_case(theirs, name, "token", probable))


def bypass(verl, rollout: Rollout) -> tuple:
    """The rollout's `values` are other log-probs, which must not count."""
    batch = {"old_log_probs": rollout.values, "rollout_log_probs": rollout.old}
    chosen, sys.modules["omegaconf"].open_dict = {}, nullcontext
    verl.correction.apply_bypass_mode(SimpleNamespace(batch=batch), {"loss_type": "ppo_clip"}, chosen)
    ours = our_loss(of_engine(rollout), "ppo", "token", dual_clip=DUAL)
    rollout.old = batch["old_log_probs"]
    return ours, their_loss(verl, rollout, chosen["loss_mode"], "token", policy_loss=chosen)


def covariance_loss(verl, rollout: Rollout, name: str) -> torch.Tensor:
    chosen = {"clip_cov_ratio": 1.0, "clip_cov_lb": RANGE[0], "clip_cov_ub": RANGE[1]}
    chosen |= {"kl_cov_ratio": SHARE, "ppo_kl_coef": 1.0}
    return their_loss(verl, rollout, name, "token", policy_loss=SimpleNamespace(**chosen))


def advantages(verl, rollout: Rollout, function: str, **options) -> torch.Tensor:
    args = rollout.rewards, rollout.mask.double(), rollout.index
    return getattr(verl.core, function)(*args, **options)[0]


def group_case(estimator: str, function: str, **theirs) -> Callable:
    return estimator_case(partial(advantages, function=function, **theirs), estimator)


def gae_case(own: dict, *lambdas: float) -> Callable:
    """verl's function is called with the lambda of advantages, and then with that of returns."""

    def case(verl, rollout: Rollout) -> tuple:
        ours, returns = our_advantages(rollout, "gae", gamma=0.98, **own)
        args = rollout.rewards, rollout.values, rollout.mask.double(), 0.98
        (theirs, _), (_, their_returns) = (verl.core.compute_gae_advantage_return(*args, lambd) for lambd in lambdas)
        return torch.stack([whitened(rollout, ours), returns]), torch.stack([theirs, their_returns]) * rollout.mask

    return case


def reinforce(verl, rollout: Rollout) -> tuple:
    ours, _ = our_advantages(rollout, "reinforce", gamma=0.97)
    args = rollout.rewards, rollout.mask.double(), Config(gamma=0.97)
    theirs, _ = verl.core.compute_reinforce_plus_plus_outcome_advantage(*args)
    return whitened(rollout, ours), theirs


def reinforce_baseline(verl, rollout: Rollout) -> tuple:
    ours, _ = our_advantages(rollout, "reinforce_baseline")
    theirs = advantages(verl, rollout, "compute_reinforce_plus_plus_baseline_outcome_advantage")
    return whitened(rollout, ours), theirs


def gdpo(verl, rollout: Rollout) -> tuple:
    """verl has scores of 32 bits, and whitens over tokens where we do over responses: all have one length here. Ours is divided
    by its deviation over tokens."""
    width = rollout.mask.shape[1]
    rollout.mask = torch.ones_like(rollout.mask)
    rewards = torch.stack([rollout.scores, rollout.values[:, 0].round()], 1).float().double()
    ours = adv.normalized_apart(rewards, torch.tensor([0.25, 0.75]), GROUP)[:, None].expand(-1, width)
    ours = ours / ours.std() if ours.any() else ours
    batch = {"prompts": torch.zeros(len(rewards), 0), "attention_mask": rollout.mask.long()}
    config = Config(gdpo_reward_keys=["a", "b"], gdpo_reward_weights=[0.25, 0.75])
    scores = dict(zip("ab", rewards.T.numpy()))
    facts = {"config": config, "non_tensor_batch": scores, "batch": batch}
    return ours, advantages(verl, rollout, "compute_gdpo_outcome_advantage", **facts).double()


def value(verl, rollout: Rollout) -> tuple:
    ours = losses.value_loss(rollout.new, rollout.values, rollout.advantages, 0.2)[rollout.mask].mean()
    args = rollout.new, rollout.advantages, rollout.values, rollout.mask.double(), 0.2
    return ours, verl.core.compute_value_loss(*args)[0]


def kl_case(estimator: str) -> Callable:
    """verl also holds k3 at 10."""

    def case(verl, rollout: Rollout) -> tuple:
        ours = adv.kl_estimate(rollout.new, rollout.old, estimator)
        held = ours.clamp(max=10) if estimator == "k3" else ours
        return held, verl.core.kl_penalty(rollout.new, rollout.old, estimator)

    return case


def weights_case(level: str) -> Callable:
    def case(verl, rollout: Rollout) -> tuple:
        log_ratio = (rollout.new - rollout.old).detach()
        args = log_ratio, rollout.mask.double(), level, 2.0
        theirs, _ = verl.correction.compute_rollout_correction_weights(*args)
        return adv.importance_weights(log_ratio, rollout.mask, level, 2.0) * rollout.mask, theirs

    return case


def rejection_case(ours: Callable, theirs: str, threshold: str) -> Callable:
    def case(verl, rollout: Rollout) -> tuple:
        log_ratio = (rollout.new - rollout.old).detach()
        kept, _ = verl.correction.compute_rollout_rejection_mask(log_ratio, rollout.mask.double(), theirs, threshold)
        return (ours(rollout, log_ratio) & rollout.mask).double(), kept.double()

    return case


def within(level: str) -> Callable:
    return lambda rollout, log_ratio: adv.within_ratios(log_ratio, rollout.mask, level, (0.5, 2.0))


def near(estimator: str, most: float) -> Callable:
    def kept(rollout: Rollout, log_ratio: torch.Tensor) -> torch.Tensor:
        return adv.within_kl(rollout.old, rollout.old + log_ratio, rollout.mask, estimator, most)[:, None]

    return kept


ROWS: dict[str, Callable] = {
    "`ppo` with `--dual_clip`, mean over tokens": own_case("ppo", "vanilla", "token", dual_clip=DUAL),
    "`ppo`, mean over responses of means": own_case("ppo", "vanilla", "sequence", dual_clip=DUAL),
    "`ppo`, mean over responses of sums": own_case("ppo", "vanilla", "sum", dual_clip=DUAL),
    "`ppo`, sums over a fixed length": own_case("ppo", "vanilla", "fixed_length", dual_clip=DUAL),
    "`--bypass_mode` with `ppo`": bypass,
    "`gspo_token`": own_case("gspo_token", "gspo", "sequence", held_at_10),
    "`sapo`": own_case("sapo", "sapo", "sequence"),
    "`cispo`": own_case("cispo", "cispo", "token"),
    "`dppo_tv`": dppo_case("dppo_tv"),
    "`dppo_kl`": dppo_case("dppo_kl"),
    "`clip_cov`": clip_cov_case(partial(covariance_loss, name="clip_cov")),
    "`kl_cov`": kl_cov_case(partial(covariance_loss, name="kl_cov")),
    "`group_norm`": group_case("group_norm", "compute_grpo_outcome_advantage"),
    "`dr_grpo`": group_case("dr_grpo", "compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=False),
    "`rloo`": group_case("rloo", "compute_rloo_outcome_advantage"),
    "`gae`": gae_case({"lambd": 0.9}, 0.9, 0.9),
    "`gae` with `--policy_lambd`": gae_case({"lambd": 1.0, "policy_lambd": 0.9}, 0.9, 1.0),
    "`reinforce`": reinforce,
    "`reinforce_baseline`": reinforce_baseline,
    "`gdpo`": gdpo,
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
