"""One order in which backward adds the gradients of a tensor that is used several times.

Autograd adds them in the order in which they arrive. Backends put nodes of their own at the borders of modules: then all
that arrives from within a module is added first, else not. So here each module has such nodes, on every layout.
"""

import torch


def add_within_modules_first(model: torch.nn.Module) -> None:
    """Let every module see aliases of its inputs. Of a tensor, uses in one module are then added up before others."""
    for module in model.modules():
        module.register_forward_pre_hook(_aliases, with_kwargs=True)


def _aliases(_module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return tuple(map(_alias, args)), {name: _alias(value) for name, value in kwargs.items()}


def _alias(value):
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return value.view_as(value)
    return tuple(map(_alias, value)) if type(value) is tuple else value
