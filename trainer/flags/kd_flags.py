"""Flags that only `train_kd` has, beside those of `train_sft`."""

from dataclasses import dataclass
from typing import Optional

from trainer.flags.common_flags import (
    BatchArguments,
    CheckpointArguments,
    FixedDataArguments,
    LayoutArguments,
    OptimizerArguments,
    OutputArguments,
    SFTDataArguments,
)
from trainer.flags.groups import arg, group


@dataclass
class TeacherArguments:
    """Teacher"""

    teacher: Optional[str] = arg(None, "model or adapter folder to learn from; it needs the vocabulary of --pretrain")
    teacher_answers: int = arg(
        0,
        "learn from this many answers of the teacher to each prompt; 0: from the answers in --dataset",
        type="NonNegativeInt",
    )
    generate_max_len: int = arg(512, "largest number of tokens in an answer of the teacher", type="PositiveInt")
    temperature: float = arg(1.0, "temperature of its answers; 0: the most likely tokens", type="NonNegativeFloat")
    micro_rollout_batch_size: int = arg(32, "answers that one rank generates at a time", type="PositiveInt")
    kd_coef: Optional[float] = arg(
        None,
        "loss: this times the KL from teacher to model over the vocabulary, plus 1 - this times -log p of the answer "
        "(default: 1 with answers of --dataset, 0 with answers of the teacher)",
        type="ClosedUnitInterval",
    )
    kd_temperature: float = arg(
        1.0, "temperature of both models in the KL, which is multiplied by its square", type="PositiveFloat"
    )
    teacher_offload: bool = arg(False, "keep the teacher's weights in host memory while they are not in use")


@dataclass
class KDArguments(FixedDataArguments):
    """Knowledge distillation: a causal language model learns from the answers and probabilities of a teacher."""

    sft: SFTDataArguments = group(SFTDataArguments)
    teacher: TeacherArguments = group(TeacherArguments)
    batch: BatchArguments = group(BatchArguments)
    optimizer: OptimizerArguments = group(OptimizerArguments)
    layout: LayoutArguments = group(LayoutArguments)
    output: OutputArguments = group(OutputArguments)
    checkpoint: CheckpointArguments = group(CheckpointArguments)
