"""`--fp8`: the matrix products of decoder layers in 8-bit floating point, by torchao.

Weights, gradients and states keep their dtypes. A product scales its two operands, rounds them to float8, and scales the
result back. `tensorwise` has one scale per tensor, `rowwise` one per row of an operand. Scales come from the operands of
each product, so losses depend a little on which samples share a micro-batch.
"""

import dataclasses

import torch

from trainer.distributed.decoder_layers import decoder_layers
from trainer.errors import UserError

FLAG = "--fp8"
MULTIPLE = 16  # the hardware multiplies matrices with sizes that are multiples of this
CAPABILITY = (8, 9)  # of Ada and Hopper, the first GPUs with float8 products
ROUTERS = ("gate", "router")  # of experts: a small error of their scores is another choice


def use_float8(model: torch.nn.Module, recipe: str, device: torch.device) -> None:
    """Replace the linear layers inside the decoder layers of `model`, in place, before it is sharded.

    `recipe` is one of torchao. The names of weights do not change. Routers stay, and layers with other sizes. On a CPU,
    float8 is emulated: operands are rounded as on a GPU, and multiplied in fp32.

    Raises:
        UserError: the GPU has no float8, or no layer fits.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # an optional package, slow to import

    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        found = f"{recipe} on {torch.cuda.get_device_name(device)}, which has no float8"
        raise UserError(FLAG, found, "a GPU such as H100, L40 or newer")
    inside = {part for layer in decoder_layers(model).values() for part in layer.modules() if fits(part)}
    if not inside:
        raise UserError(FLAG, f"{recipe}, but no linear layer of {type(model).__name__} fits", "another model")
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=device.type == "cpu", pad_inner_dim=True
    )

    def chosen(module: torch.nn.Module, name: str) -> bool:
        return module in inside and name.rpartition(".")[2] not in ROUTERS

    convert_to_float8_training(model, config=config, module_filter_fn=chosen)


def fits(module: torch.nn.Module) -> bool:
    """Whether `module` is a linear layer with a size that float8 products have."""
    is_linear = type(module) is torch.nn.Linear
    return is_linear and module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
