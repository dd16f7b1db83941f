"""Flags that only `train_kd` has, beside those of `train_sft`."""

from dataclasses import dataclass
from typing import Literal, Optional

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

    teacher: Optional[str] = arg(
        None,
        "model or adapter folder to learn from, or several, comma-separated; they need the vocabulary of --pretrain. With "
        "--kd_top_k also http://HOST:PORT of a vLLM server",
    )
    teacher_weights: Optional[list[float]] = arg(
        None,
        "a weight in the loss for each of several teachers (default: equal ones with sum 1)",
        type=float,
        nargs="+",
    )
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
        "loss: this times the distance from the teacher, plus 1 - this times -log p of the answer "
        "(default: 1 with answers of --dataset, 0 with answers of the teacher)",
        type="ClosedUnitInterval",
    )
    kd_loss: Literal["kl", "reverse_kl", "jsd"] = arg(
        "kl",
        "distance from the teacher's distribution: kl is KL(teacher || model), reverse_kl KL(model || teacher), and jsd the "
        "generalised Jensen-Shannon divergence of GKD",
    )
    kd_beta: float = arg(
        0.5, "--kd_loss jsd: the teacher's share of the mixture; 0 is kl, 1 is reverse_kl", type="ClosedUnitInterval"
    )
    kd_top_k: Optional[int] = arg(
        None, "compare only the teacher's this many likeliest tokens, and all others together", type="PositiveInt"
    )
    kd_temperature: float = arg(
        1.0, "temperature of both models in the distance, which is multiplied by its square", type="PositiveFloat"
    )
    teacher_api_key: Optional[str] = arg(None, "file that holds the key that a server of --teacher asks for")
    teacher_timeout: float = arg(60.0, "seconds to wait for an answer of a server of --teacher", type="PositiveFloat")
    teacher_retries: int = arg(
        3, "number of retries at a server of --teacher; the pause before each one doubles", type="NonNegativeInt"
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
