"""Stacked experts under DeepSpeed's AutoTP: each tp rank holds some whole experts, as on FSDP2. AutoTP leaves them whole.

See `distributed.expert_parallel` for the mathematics. Routers are copies.
"""

import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.layers import DS_TENSOR_MODEL_PARALLEL, _build_param_uc_restore_meta

from trainer.errors import UserError
from trainer.model_parallel.expert_parallel import are_experts, forward_of_part


def validate_experts(model: torch.nn.Module, tp: int) -> None:
    """Raise UserError unless `tp` divides the experts of every layer of `model`. Its parameters may be partitioned."""
    for module in filter(are_experts, model.modules()):
        for parameter in module.parameters():
            number = getattr(parameter, "ds_shape", parameter.shape)[0]
            if number % tp:
                fits = ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
                found = f"{tp} does not divide the {number} experts of {type(model).__name__}"
                raise UserError("--tensor_parallel_size", found, fits)


def cut_experts(autotp: AutoTP, module: torch.nn.Module) -> None:
    """Keep this tp rank's experts of `module`, and let it compute only these."""
    tp, group = autotp.mp_size, autotp.mp_group
    autotp._gather_zero3_params(module)
    for parameter in module.parameters():
        shape, number = tuple(parameter.shape), parameter.shape[0] // tp
        parameter.data = parameter.data.narrow(0, group.rank() * number, number).clone()
        setattr(parameter, DS_TENSOR_MODEL_PARALLEL, True)  # DeepSpeed's gradient norm adds it up over tp
        facts = {"partition_dim": 0, "logical_shape": shape, "partition_sizes": (number,) * tp, "original_shape": shape}
        setattr(parameter, DS_AUTOTP_UC_META, _build_param_uc_restore_meta(partition_type="column", **facts))
    module.num_experts //= tp
    module.forward = forward_of_part(module, None, group)
