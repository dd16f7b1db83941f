"""Flags of `train_dpo --online`: those of a preference loss, with the rollouts and rewards of `train_ppo`."""

from dataclasses import dataclass

from trainer.flags.common_flags import (
    BatchArguments,
    CheckpointArguments,
    ExpertArguments,
    LayoutArguments,
    OptimizerArguments,
    OutputArguments,
)
from trainer.flags.groups import group
from trainer.flags.preference_flags import PreferenceArguments
from trainer.flags.rl_flags import RolloutRunArguments


@dataclass
class OnlineDPOArguments(RolloutRunArguments):
    """Preference optimization of a causal language model on pairs of its own answers."""

    preference: PreferenceArguments = group(PreferenceArguments)
    experts: ExpertArguments = group(ExpertArguments)
    batch: BatchArguments = group(BatchArguments)
    optimizer: OptimizerArguments = group(OptimizerArguments)
    layout: LayoutArguments = group(LayoutArguments)
    output: OutputArguments = group(OutputArguments)
    checkpoint: CheckpointArguments = group(CheckpointArguments)
