"""The settings of a strategy."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Optional

from trainer.distributed.mesh_sizes import MeshSizes, resolve_mesh_sizes


@dataclass(frozen=True)
class StrategyOptions:
    """What a strategy is built from. Every field is the value of the flag with the same name."""

    seed: int = 42
    param_dtype: str = "bf16"
    max_norm: float = 1.0
    zero_stage: Optional[int] = None
    adam_offload: bool = False
    tensor_parallel_size: int = 1
    use_hf_tp_plan: bool = False
    sequence_parallel: bool = False
    print_tp_plan: bool = False
    expert_parallel_size: int = 1
    ring_attn_size: int = 1
    dp_replicate_size: int = 1
    device: str = "auto"
    deterministic: bool = True
    lora_rank: Optional[int] = None
    lora_experts: bool = False
    use_dora: bool = False
    load_in_4bit: bool = False
    compile: bool = False
    fp8: Optional[str] = None
    reduce_once: bool = False
    reduce_dtype: str = "fp32"
    optim: str = "adamw"
    exact: bool = False

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> "StrategyOptions":
        """The options from a mapping of flags. It holds all fields above; other flags are ignored."""
        return cls(**{field.name: flags[field.name] for field in fields(cls)})

    def mesh_sizes(self) -> MeshSizes:
        """The mesh of the ranks that torchrun started. Raises UserError if the sizes do not divide their number."""
        axes = {"dp_replicate": self.dp_replicate_size, "sp": self.ring_attn_size, "tp": self.tensor_parallel_size}
        return resolve_mesh_sizes(int(os.environ.get("WORLD_SIZE", 1)), **axes)


def bucket_elements(num_params: float) -> int:
    """Gradients that ZeRO 1 to 3 reduce at a time: a sixteenth of the model, at most 50 million.

    ZeRO 3 holds three such buckets in fp32. With DeepSpeed's default, 500 million, they take up to 6 GB of each rank.
    """
    return int(min(max(num_params / 16, 1_000_000), 50_000_000))
