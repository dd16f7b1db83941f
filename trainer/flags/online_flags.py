"""Flags of `train_dpo --online`: those of a preference loss, with the rollouts and rewards of `train_ppo`."""

from dataclasses import dataclass

from trainer.flags.common_flags import (
    BatchArguments,
    CheckpointArguments,
    DataArguments,
    ExpertArguments,
    LayoutArguments,
    LoraArguments,
    ModelArguments,
    OptimizerArguments,
    OutputArguments,
)
from trainer.flags.groups import group
from trainer.flags.preference_flags import PreferenceArguments
from trainer.flags.rl_flags import (
    EnvironmentArguments,
    EvaluationArguments,
    PromptArguments,
    RolloutArguments,
    ScoreArguments,
)


@dataclass
class OnlineDPOArguments:
    """Preference optimization of a causal language model on pairs of its own answers."""

    model: ModelArguments = group(ModelArguments)
    lora: LoraArguments = group(LoraArguments)
    data: DataArguments = group(DataArguments)
    prompts: PromptArguments = group(PromptArguments)
    rollout: RolloutArguments = group(RolloutArguments)
    scores: ScoreArguments = group(ScoreArguments)
    environment: EnvironmentArguments = group(EnvironmentArguments)
    evaluation: EvaluationArguments = group(EvaluationArguments)
    preference: PreferenceArguments = group(PreferenceArguments)
    experts: ExpertArguments = group(ExpertArguments)
    batch: BatchArguments = group(BatchArguments)
    optimizer: OptimizerArguments = group(OptimizerArguments)
    layout: LayoutArguments = group(LayoutArguments)
    output: OutputArguments = group(OutputArguments)
    checkpoint: CheckpointArguments = group(CheckpointArguments)
