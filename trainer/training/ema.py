"""An exponential moving average of a model's weights. Each rank averages the parts that it holds."""

import contextlib
import dataclasses
from dataclasses import dataclass

import torch

from trainer.checkpoints.run_state import of_role
from trainer.checkpoints.shards import TensorShard

ROLE = "ema"  # the prefix of its tensors in a checkpoint: ema:weight/...


@dataclass
class WeightAverage:
    """After each step: beta * average + (1 - beta) * weights, in fp32 like the masters (Polyak and Juditsky 1992)."""

    strategy: object
    model: object  # prepared, with its optimizer
    optimizer: object
    beta: float

    def __post_init__(self):
        self.parts = [dataclasses.replace(shard, tensor=shard.tensor.clone()) for shard in self._live()]

    def _live(self) -> list[TensorShard]:
        """The weights as they are now, in the order of `parts`."""
        return list(self.strategy.weight_shards(self.model, self.optimizer))

    @torch.no_grad()
    def update(self) -> None:
        for average, shard in zip(self.parts, self._live(), strict=True):
            if average.tensor.is_floating_point():
                average.tensor.lerp_(shard.tensor.to(average.tensor.dtype), 1 - self.beta)

    def shards(self) -> list[TensorShard]:
        """The shards to save in a checkpoint and to load from it."""
        return list(of_role(ROLE, self.parts))

    @contextlib.contextmanager
    def in_place(self):
        """Inside, the model's masters hold the average, so that it can be saved."""
        self._swap()
        yield
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, shard in zip(self.parts, self._live(), strict=True):
            weight = shard.tensor.clone()
            shard.tensor.copy_(average.tensor)
            average.tensor.copy_(weight)
