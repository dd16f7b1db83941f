"""Flags that only `train_rm` and `train_dpo` have. The flags of all training commands are in trainer.flags.common_flags."""

from dataclasses import dataclass
from typing import Literal, Optional

from trainer.flags.common_flags import (
    BatchArguments,
    CheckpointArguments,
    ExpertArguments,
    FixedDataArguments,
    LayoutArguments,
    OptimizerArguments,
    OutputArguments,
    VisionArguments,
)
from trainer.flags.groups import arg, group


@dataclass
class PreferenceDataArguments:
    """What is preferred"""

    prompt_key: Optional[str] = arg(
        None,
        "column of the prompt, a text or messages (default: `prompt` if it exists, else the answers are whole "
        "conversations or texts). simpo, orpo and --nll_loss_coef refuse whole texts: they need means over the answer",
    )
    chosen_key: str = arg("chosen", "column of the better answer, a text or messages")
    rejected_key: str = arg("rejected", "column of the worse answer")


@dataclass
class RewardArguments:
    """Reward model"""

    loss: str = arg(
        "sigmoid", "sigmoid: -log sigmoid(chosen - rejected - margin); logexp: log(1 + exp(rejected - chosen))"
    )
    center_rewards_coef: float = arg(
        0.0,
        "add this times the square of the sum of both scores, so that their mean stays near 0",
        type="NonNegativeFloat",
    )
    compute_fp32_loss: bool = arg(False, "fp32 reward head with any --param_dtype (the loss is always fp32)")
    value_head_prefix: str = arg("score", "name of the reward head in --pretrain, if there is one; saved as `score`")
    margin_key: Optional[str] = arg(None, "column with the score margin of the chosen answer (--loss sigmoid)")


@dataclass
class PreferenceArguments:
    """Preference optimization"""

    online: bool = arg(
        False,
        "train on pairs of the model's own answers, ranked by a reward: rollouts and rewards as in train_ppo, no pairs in "
        "--dataset; see docs/preference.md",
    )
    loss: str = arg(
        "dpo",
        "dpo, cdpo, robust, ipo, hinge, apo_zero, apo_down, sppo, nca, bco, simpo, orpo, kto, or your own: "
        "trainer/models/losses/preference_loss.py; or a sum of several (comma-separated)",
    )
    loss_weights: Optional[list[float]] = arg(
        None, "weights of a sum of losses (default: 1 each)", type=float, nargs="+"
    )
    beta: float = arg(0.1, "strength of the preference; ipo: tau, orpo: lambda", type="PositiveFloat")
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = arg(
        "reverse_kl", "divergence from the reference of dpo, cdpo, robust, ipo and hinge"
    )
    f_alpha: float = arg(
        0.5, "--f_divergence alpha: its alpha; 1 is reverse_kl, 0 is forward_kl", type="NonNegativeFloat"
    )
    label_smoothing: float = arg(0.0, "cdpo, robust: probability that a label is wrong", type="ClosedUnitInterval")
    simpo_gamma: float = arg(0.5, "simpo: target margin", type="NonNegativeFloat")
    nll_loss_coef: float = arg(0.0, "add this times -log p per token of the chosen answer", type="NonNegativeFloat")
    ref_model: Optional[str] = arg(None, "reference model, or adapter folder (default: --pretrain)")
    ref_offload: bool = arg(
        False, "keep the reference's weights in host memory while they are not in use", "offload_ref"
    )
    precompute_ref_logps: bool = arg(
        False, "compute the reference's log-probs once, keep them on disk, and train without a reference (not with kto)"
    )
    allow_no_stop: bool = arg(False, "train though the chat template ends no answer with a stop token")


@dataclass
class SingleAnswerArguments:
    """Single answers"""

    desirable_weight: float = arg(1.0, "kto: weight of the losses of desirable answers", type="PositiveFloat")
    undesirable_weight: float = arg(1.0, "kto: weight of the losses of undesirable answers", type="PositiveFloat")
    completion_key: str = arg("completion", "kto: column of the answer; a row that is a pair becomes two answers")
    label_key: str = arg("label", "kto: column that says whether the answer is desirable")


@dataclass
class RMArguments(FixedDataArguments):
    """Training of a reward model on pairs of answers."""

    pairs: PreferenceDataArguments = group(PreferenceDataArguments)
    reward: RewardArguments = group(RewardArguments)
    vision: VisionArguments = group(VisionArguments)
    batch: BatchArguments = group(BatchArguments)
    optimizer: OptimizerArguments = group(OptimizerArguments)
    layout: LayoutArguments = group(LayoutArguments)
    output: OutputArguments = group(OutputArguments)
    checkpoint: CheckpointArguments = group(CheckpointArguments)


@dataclass
class DPOArguments(FixedDataArguments):
    """Preference optimization of a causal language model with DPO or a related loss."""

    pairs: PreferenceDataArguments = group(PreferenceDataArguments)
    preference: PreferenceArguments = group(PreferenceArguments)
    answers: SingleAnswerArguments = group(SingleAnswerArguments)
    experts: ExpertArguments = group(ExpertArguments)
    vision: VisionArguments = group(VisionArguments)
    batch: BatchArguments = group(BatchArguments)
    optimizer: OptimizerArguments = group(OptimizerArguments)
    layout: LayoutArguments = group(LayoutArguments)
    output: OutputArguments = group(OutputArguments)
    checkpoint: CheckpointArguments = group(CheckpointArguments)
