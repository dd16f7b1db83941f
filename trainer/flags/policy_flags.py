"""Flags of `train_ppo` that make the loss: advantages, policy, distance to a reference, critic."""

from dataclasses import dataclass
from typing import Literal, Optional

from trainer.flags.groups import arg


@dataclass
class AdvantageArguments:
    """Advantages and policy"""

    preset: Optional[str] = arg(
        None,
        "grpo, dr_grpo, dapo, gspo, luspo, cispo, scalerl, sapo, maxrl, rloo, reinforce++, vapo, opd or ppo: the algorithm of a "
        "paper as default values of other flags, see docs/algorithms.md; flags that you give win",
    )
    advantage_estimator: Literal[
        "gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "maxrl", "gdpo", "scalerl", "distill"
    ] = arg(
        "gae",
        "gae trains a critic; group_norm is the estimator of GRPO; gdpo normalises each function of --reward_func by itself; "
        "distill is that of --teacher",
    )
    gamma: float = arg(1.0, "discount factor", type="ClosedUnitInterval")
    lambd: float = arg(1.0, "gae: lambda", type="ClosedUnitInterval")
    policy_lambd: Optional[float] = arg(
        None,
        "gae: lambda of the policy's advantages (default: --lambd, which the critic keeps)",
        type="ClosedUnitInterval",
    )
    policy_lambd_alpha: Optional[float] = arg(
        None, "gae: in place of --policy_lambd, 1 - 1 / (this x tokens of the response)", type="PositiveFloat"
    )
    no_advantage_std_norm: bool = arg(False, "do not divide advantages by a standard deviation")
    advantage_batch_std: bool = arg(
        False, "group_norm: divide by the deviation of all scores of the rollout, not by that of each prompt"
    )
    policy_loss: str = arg(
        "ppo",
        "ppo, reinforce, gspo, gspo_token, cispo, sapo, dppo_tv, dppo_kl, clip_cov, kl_cov, or your own: "
        "trainer/models/losses/policy_loss.py",
    )
    sapo_temperatures: list[float] = arg(
        [1.0, 1.05], "sapo: temperatures of its gate for positive and other advantages", type=float, nargs=2
    )
    cov_share: float = arg(
        2e-4,
        "clip_cov, kl_cov: share of a rollout's tokens that they choose by the covariance of log-prob and advantage",
        type="OpenUnitInterval",
    )
    cov_range: list[float] = arg(
        [1.0, 5.0], "clip_cov: it chooses among covariances in this range", type=float, nargs=2
    )
    kl_cov_coef: float = arg(1.0, "kl_cov: weight of the KL of the chosen tokens", type="NonNegativeFloat")
    loss_agg: Literal["token", "sequence", "prompt", "fixed_length", "sum"] = arg(
        "token",
        "token: mean over tokens; sequence: mean over responses of token means; prompt: mean over prompts of token means; "
        "fixed_length: mean over responses of token sums / --generate_max_len; sum: the same without a division",
    )
    mask_truncated: bool = arg(False, "no loss for responses that --generate_max_len cut; their scores still count")
    eps_clip: float = arg(
        0.2, "lower clip of the policy ratio: 1 - this; dppo: bound of the divergence", type="PositiveFloat"
    )
    eps_clip_high: Optional[float] = arg(None, "upper clip: 1 + this (default: --eps_clip)", type="PositiveFloat")
    dual_clip: Optional[float] = arg(None, "bound on the loss of negative advantages; above 1", type="PositiveFloat")
    bypass_mode: bool = arg(
        False,
        "take the log-probs of the rollout engine as those of the old policy, which training then does not compute: the ratio "
        "of --policy_loss corrects for the engine and for older weights",
    )
    tis_cap: Optional[float] = arg(
        None,
        "weight tokens by pi_train / pi_rollout, at most this (truncated importance sampling)",
        type="PositiveFloat",
    )
    tis_level: Literal["token", "sequence", "geometric"] = arg(
        "token", "ratio that --tis_cap bounds: of a token, of a whole response, or the geometric mean of a response's"
    )
    tis_floor: float = arg(0.0, "weights of --tis_cap are at least this", type="NonNegativeFloat")
    tis_mask: bool = arg(False, "reject tokens whose ratio is not in --tis_mask_range: their weight is 0")
    tis_mask_range: Optional[list[float]] = arg(
        None, "--tis_mask: least and largest ratio (default: 1 / --tis_cap and --tis_cap)", type=float, nargs=2
    )
    tis_mask_level: Optional[Literal["token", "sequence", "geometric"]] = arg(
        None, "--tis_mask: ratio that it tests (default: --tis_level)"
    )
    rollout_kl_max: Optional[float] = arg(
        None,
        "no loss for responses whose mean KL(rollout engine || training) per token is above this",
        type="PositiveFloat",
    )
    rollout_kl_estimator: Literal["k1", "k2", "k3"] = arg("k3", "--rollout_kl_max: estimator of the KL")
    rejected_tokens: Literal["count", "leave"] = arg(
        "count",
        "tokens that --tis_mask or --rollout_kl_max reject: count in the mean of the loss with loss 0, as in the papers, or "
        "leave it, as in verl",
    )
    off_policy_mask_threshold: Optional[float] = arg(
        None,
        "no loss where the advantage is negative and the response has drifted from the policy that generated it: its mean of "
        "log pi_rollout - log pi is above this; such tokens count in the mean of the loss",
        type="NonNegativeFloat",
    )
    top_entropy_quantile: Optional[float] = arg(
        None, "no loss except for this share of a rollout's tokens, those of largest entropy", type="OpenUnitInterval"
    )
    ema_beta: Optional[float] = arg(
        None,
        "keep an exponential moving average of the policy's weights, with this decay per step; saved as model_ema",
        type="ClosedUnitInterval",
    )
    positive_nll_coef: float = arg(
        0.0, "weight in the loss of the mean -log p of the tokens of right responses", type="NonNegativeFloat"
    )
    turn_rewards: bool = arg(
        False,
        "with --env: each turn has its own reward, at its last token, instead of the sum of all at the last token of the episode",
    )
    entropy_loss_coef: float = arg(0.0, "weight of an entropy bonus in the loss", type="NonNegativeFloat")
    entropy_target: Optional[float] = arg(
        None,
        "adapt the weight of the entropy bonus: it grows after a step whose mean entropy is at most this, in nats, and counts "
        "only then; else it shrinks; --entropy_loss_coef is its start",
        type="PositiveFloat",
    )
    entropy_coef_delta: float = arg(0.005, "--entropy_target: the change of the weight in a step", type="PositiveFloat")
    entropy_coef_max: float = arg(1.0, "--entropy_target: the largest weight", type="PositiveFloat")


@dataclass
class KLArguments:
    """Distance to the reference"""

    teacher: Optional[str] = arg(
        None,
        "distill this model on the policy's own responses: each token's advantage is log p of the teacher minus that of the "
        "policy; --advantage_estimator or --preset adds the advantage of scores, which are else only logged. "
        "Of several models, comma-separated, the mean by --teacher_weights counts",
    )
    teacher_key: Optional[str] = arg(
        None,
        "column whose values choose the teacher of a row; then --teacher is NAME=MODEL, or several (comma-separated)",
    )
    teacher_weights: Optional[list[float]] = arg(
        None,
        "a weight for each of several teachers, with sum 1 (default: equal ones)",
        type=float,
        nargs="+",
    )
    kd_loss: Optional[Literal["kl", "reverse_kl", "jsd"]] = arg(
        None,
        "with --teacher: the loss is this distance between whole distributions at each token of the policy's responses, in "
        "place of advantages; the distances are those of train_kd",
    )
    kd_beta: float = arg(
        0.5, "--kd_loss jsd: the teacher's share of the mixture; 0 is kl, 1 is reverse_kl", type="ClosedUnitInterval"
    )
    kd_top_k: Optional[int] = arg(
        None, "compare only the teacher's this many likeliest tokens, and all others together", type="PositiveInt"
    )
    ref_model: Optional[str] = arg(None, "reference model, or adapter folder (default: --pretrain)")
    offload_ref: bool = arg(
        False, "keep the reference's weights in host memory while they are not in use", "ref_offload"
    )
    init_kl_coef: float = arg(0.0, "weight of the KL to the reference; 0: no reference", type="NonNegativeFloat")
    use_kl_loss: bool = arg(False, "use the KL as a term of the loss instead of a penalty in the rewards")
    kl_unbiased: bool = arg(
        False, "--use_kl_loss with k3: multiply it by the ratio of policies, so that its gradient is that of the KL"
    )
    kl_in_score: bool = arg(
        False, "subtract the KL of a response from its score, before scores are compared, instead of token by token"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = arg(
        "k1", "see trainer/methods/advantages.py; --use_kl_loss needs k2 or k3"
    )
    kl_target: Optional[float] = arg(None, "adapt the KL weight towards this KL per response", type="PositiveFloat")
    kl_horizon: int = arg(10000, "with --kl_target: horizon in responses; larger is slower", type="PositiveInt")


@dataclass
class CriticArguments:
    """Critic"""

    critic_pretrain: Optional[str] = arg(
        None, "gae: model or adapter folder that the critic starts from (default: --pretrain)"
    )
    critic_learning_rate: float = arg(9e-6, "peak learning rate of the critic", type="NonNegativeFloat")
    offload_critic: bool = arg(
        False, "keep weights, master weights and optimizer states of the critic in host memory during generation"
    )
    value_clip: Optional[float] = arg(None, "clip the change of a value in one rollout to this", type="PositiveFloat")
    freezing_actor_steps: int = arg(0, "gae: the first N optimizer steps train only the critic", type="NonNegativeInt")
