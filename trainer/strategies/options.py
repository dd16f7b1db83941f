"""The settings of a strategy, and what a backend refuses of them, from the table of rules. Neither backend is imported here."""

import dataclasses
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Optional

from trainer.distributed.mesh_sizes import MeshSizes, resolve_mesh_sizes
from trainer.errors import UserError
from trainer.flags.layout_rules import DEEPSPEED_RULES, FSDP2_RULES
from trainer.flags.rule import UNKNOWN, Rule, excluded, first_broken
from trainer.flags.rules import BACKEND_RULES


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

    def mesh_sizes(self) -> MeshSizes:
        """The mesh of the ranks that torchrun started. Raises UserError if the sizes do not divide their number."""
        axes = {"dp_replicate": self.dp_replicate_size, "sp": self.ring_attn_size, "tp": self.tensor_parallel_size}
        return resolve_mesh_sizes(int(os.environ.get("WORLD_SIZE", 1)), **axes)


def bucket_elements(num_params: float) -> int:
    """Gradients that ZeRO 1 to 3 reduce at a time: a sixteenth of the model, at most 50 million.

    ZeRO 3 holds three such buckets in fp32. With DeepSpeed's default, 500 million, they take up to 6 GB of each rank.
    """
    return int(min(max(num_params / 16, 1_000_000), 50_000_000))


# --- refusals


def _refuse(rules: tuple[Rule, ...], options: StrategyOptions, **facts: Any) -> None:
    values = dataclasses.asdict(options)
    known = SimpleNamespace(**{**UNKNOWN, **values, **facts})
    error = first_broken(rules, values, dataclasses.asdict(StrategyOptions()), known)
    if error:
        raise error


def refuse_on_fsdp2(options: StrategyOptions) -> None:
    """Raise UserError for what the FSDP2 strategy cannot do."""
    _refuse(FSDP2_RULES, options)


def excluded_flags(backend: str, options: StrategyOptions, on_cpu: bool = False) -> list[str]:
    """What the rows of a backend would refuse beside these options, a line for each row."""
    values, defaults = dataclasses.asdict(options), dataclasses.asdict(StrategyOptions())
    known = SimpleNamespace(**{**UNKNOWN, **values, "on_cpu": on_cpu})
    return excluded(BACKEND_RULES[backend], values, defaults, known)


def refuse_on_deepspeed(options: StrategyOptions, on_cpu: bool = False) -> None:
    """Raise UserError for what the DeepSpeed strategy cannot do."""
    if options.zero_stage not in (None, 0, 1, 2, 3):
        raise UserError("--zero_stage", str(options.zero_stage), "0, 1, 2 (the default), 3")
    _refuse(DEEPSPEED_RULES, options, on_cpu=on_cpu)
