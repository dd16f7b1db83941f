"""Flags of `train_ppo` beside those that all training commands share (trainer.arguments)."""

from dataclasses import dataclass
from typing import Literal, Optional

from trainer.arguments import (
    BatchArguments,
    CheckpointArguments,
    DataArguments,
    LayoutArguments,
    LoraArguments,
    ModelArguments,
    OptimizerArguments,
    OutputArguments,
    arg,
)


@dataclass
class PromptArguments:
    """Prompts"""

    input_key: Optional[str] = arg(None, "column of the prompt, a text or messages (default: messages)")
    label_key: Optional[str] = arg(None, "column of the reference answer, handed to the reward as its label")
    prompt_max_len: int = arg(1024, "longer prompts are left out, and counted", type="PositiveInt")


@dataclass
class RolloutArguments:
    """Rollouts"""

    rollout_engine: Literal["hf", "vllm"] = arg(
        "hf", "hf: a replica of the policy on every rank; vllm: an engine per tp group (extra: vllm)"
    )
    vllm_gpu_memory_utilization: Optional[float] = arg(
        None, "vllm on CUDA: the share of a GPU's memory for its weights and cache (default: 0.5)", type="PositiveFloat"
    )
    rollout_batch_size: int = arg(128, "prompts per rollout, over all ranks", type="PositiveInt")
    micro_rollout_batch_size: int = arg(32, "responses that one rank generates at a time", type="PositiveInt")
    n_samples_per_prompt: int = arg(1, "responses to each prompt", type="PositiveInt")
    num_episodes: int = arg(1, "passes over the prompts", type="PositiveInt")
    generate_max_len: int = arg(1024, "at most this many tokens in a response", type="PositiveInt")
    temperature: float = arg(1.0, "of sampling, and of the log-probs in training", type="PositiveFloat")
    top_p: float = arg(1.0, "only 1: log-probs of a truncated distribution would not be the policy's")
    top_k: int = arg(0, "only 0 (off), for the same reason")
    min_p: float = arg(0.0, "only 0 (off), for the same reason")
    stop: Optional[list[str]] = arg(
        None, "texts that end a response, beside the end-of-sequence token", type=str, nargs="+"
    )
    offload_actor_optimizer: bool = arg(
        False, "while responses are generated, keep the optimizer states of the policy in host memory"
    )
    rollouts_from: Optional[str] = arg(
        None,
        "take responses and scores from this rollouts.jsonl; what generates and scores is for evaluation alone then",
    )
    dynamic_filtering: bool = arg(False, "replace prompts whose mean score is outside --dynamic_filtering_range")
    dynamic_filtering_range: list[float] = arg([0.0, 1.0], "bounds, both excluded", type=float, nargs=2)


@dataclass
class ScoreArguments:
    """Rewards"""

    reward_func: Optional[str] = arg(
        None, "math (last number, #### or boxed, against the label), exact_match, or a Python file with reward_func"
    )
    reward_timeout: float = arg(60.0, "seconds that a call of --reward_func may take", type="PositiveFloat")
    reward_pretrain: Optional[str] = arg(None, "reward model folders (comma-separated), as train_rm writes them")
    offload_reward: bool = arg(False, "keep the reward models' weights in host memory while they are not in use")
    reward_weights: Optional[list[float]] = arg(
        None, "weights of the reward models (default: 1 each)", type=float, nargs="+"
    )
    remote_rm_url: Optional[str] = arg(None, "HTTP endpoint that scores, see python -m trainer.cli.serve_rm")
    remote_rm_timeout: float = arg(60.0, "seconds until an answer of --remote_rm_url is given up", type="PositiveFloat")
    remote_rm_retries: int = arg(
        3, "further tries, each after twice the pause of the one before", type="NonNegativeInt"
    )
    reward_clip_range: Optional[list[float]] = arg(None, "scores are held within these bounds", type=float, nargs=2)
    normalize_reward: bool = arg(False, "scores less their running mean, divided by their running deviation")
    overlong_buffer_len: int = arg(0, "responses in the last N tokens of their limit lose score", type="NonNegativeInt")
    overlong_penalty_factor: float = arg(1.0, "what a response at its limit loses", type="NonNegativeFloat")


@dataclass
class AdvantageArguments:
    """Advantages and policy"""

    advantage_estimator: Literal["gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"] = arg(
        "gae", "gae trains a critic; group_norm is GRPO's"
    )
    gamma: float = arg(1.0, "discount", type="ClosedUnitInterval")
    lambd: float = arg(1.0, "gae: lambda", type="ClosedUnitInterval")
    no_advantage_std_norm: bool = arg(False, "do not divide advantages by a standard deviation")
    policy_loss: str = arg("ppo", "ppo, reinforce, gspo, cispo, or your own: trainer/models/policy_loss.py")
    loss_agg: Literal["token", "sequence", "fixed_length"] = arg(
        "token", "mean over tokens; over responses of their means; over responses of their sums / --generate_max_len"
    )
    eps_clip: float = arg(0.2, "the ratio is held above 1 - this", type="PositiveFloat")
    eps_clip_high: Optional[float] = arg(None, "and below 1 + this (default: --eps_clip)", type="PositiveFloat")
    dual_clip: Optional[float] = arg(None, "bound on the loss of negative advantages, above 1", type="PositiveFloat")
    tis_cap: Optional[float] = arg(
        None,
        "weigh tokens by pi_train / pi_rollout, at most this (truncated importance sampling)",
        type="PositiveFloat",
    )
    ema_beta: Optional[float] = arg(
        None,
        "keep the moving average of the policy's weights, this times itself after each step; saved as model_ema",
        type="ClosedUnitInterval",
    )
    entropy_loss_coef: float = arg(0.0, "reward entropy by this much", type="NonNegativeFloat")


@dataclass
class KLArguments:
    """Distance to the reference"""

    ref_model: Optional[str] = arg(None, "reference model (default: --pretrain)")
    offload_ref: bool = arg(
        False, "keep the reference's weights in host memory while they are not in use", "ref_offload"
    )
    init_kl_coef: float = arg(0.0, "weight of the KL to the reference; 0: no reference", type="NonNegativeFloat")
    use_kl_loss: bool = arg(False, "the KL as a term of the loss instead of a penalty in the rewards")
    kl_estimator: Literal["k1", "k2", "k3"] = arg(
        "k1", "see trainer/training/advantages.py; k2 or k3 with --use_kl_loss"
    )
    kl_target: Optional[float] = arg(None, "adapt the coefficient towards this KL per response", type="PositiveFloat")
    kl_horizon: int = arg(10000, "--kl_target: the larger, the slower (in responses)", type="PositiveInt")


@dataclass
class CriticArguments:
    """Critic"""

    critic_pretrain: Optional[str] = arg(None, "gae: model folder that the critic starts from (default: --pretrain)")
    critic_learning_rate: float = arg(9e-6, "peak learning rate of the critic", type="NonNegativeFloat")
    offload_critic: bool = arg(
        False, "while responses are generated, keep weights, masters and optimizer states of the critic in host memory"
    )
    value_clip: Optional[float] = arg(None, "values may move this far in a rollout", type="PositiveFloat")
    freezing_actor_steps: int = arg(
        0, "gae: so many first optimizer steps train the critic alone", type="NonNegativeInt"
    )


@dataclass
class PPOArguments(
    CheckpointArguments,
    OutputArguments,
    LayoutArguments,
    OptimizerArguments,
    BatchArguments,
    CriticArguments,
    KLArguments,
    AdvantageArguments,
    ScoreArguments,
    RolloutArguments,
    PromptArguments,
    DataArguments,
    LoraArguments,
    ModelArguments,
):
    """Reinforcement learning of a causal language model: PPO, GRPO and their relatives."""
