"""The dynamic loss scale of fp16 (Micikevicius et al. 2018). DeepSpeed has its own loss scale."""

from collections.abc import Iterable

import torch

from trainer.distributed.sharded_tensors import to_local_if_dtensor


class DynamicLossScale:
    """A factor on the loss. It is halved when a gradient overflows, and doubled after `growth_interval` good steps."""

    def __init__(self, initial: float = 2.0**16, growth_interval: int = 2000):
        self.scale, self.growth_interval, self.good_steps = initial, growth_interval, 0

    @torch.no_grad()
    def unscale_(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Divide all gradients by the scale, in place."""
        for parameter in parameters:
            if parameter.grad is not None:
                to_local_if_dtensor(parameter.grad).mul_(1.0 / self.scale)

    def update(self, overflow: bool) -> None:
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.growth_interval == 0:
            self.scale *= 2

    def state_dict(self) -> dict:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict) -> None:
        self.scale, self.good_steps = state["scale"], state["good_steps"]
