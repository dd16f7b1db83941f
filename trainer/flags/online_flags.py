"""Flags of `train_dpo --online`: those of a preference loss, with the rollouts and rewards of `train_ppo`."""

from dataclasses import dataclass

from trainer.flags.common_flags import (
    BatchArguments,
    CheckpointArguments,
    DataArguments,
    LayoutArguments,
    LoraArguments,
    ModelArguments,
    OptimizerArguments,
    OutputArguments,
)
from trainer.flags.preference_flags import PreferenceArguments
from trainer.flags.rl_flags import EnvironmentArguments, PromptArguments, RolloutArguments, ScoreArguments


@dataclass
class OnlineDPOArguments(
    CheckpointArguments,
    OutputArguments,
    LayoutArguments,
    OptimizerArguments,
    BatchArguments,
    PreferenceArguments,
    EnvironmentArguments,
    ScoreArguments,
    RolloutArguments,
    PromptArguments,
    DataArguments,
    LoraArguments,
    ModelArguments,
):
    """Preference optimization of a causal language model on pairs of its own answers."""
