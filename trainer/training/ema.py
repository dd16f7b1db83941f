"""An exponential moving average of a model's weights, kept beside them: each rank averages the parts that it holds."""

import contextlib
import dataclasses
from dataclasses import dataclass

import torch

from trainer.strategies.checkpoint_pieces import Piece
from trainer.strategies.run_state import of_role

ROLE = "ema"  # of its tensors in a checkpoint: ema:weight/...


@dataclass
class WeightAverage:
    """beta * average + (1 - beta) * weights after each step, in fp32 like the masters (Polyak and Juditsky 1992)."""

    strategy: object
    model: object  # prepared, with its optimizer
    optimizer: object
    beta: float

    def __post_init__(self):
        self.parts = [dataclasses.replace(piece, tensor=piece.tensor.clone()) for piece in self._live()]

    def _live(self) -> list[Piece]:
        """The weights as they are now; parts in the same order."""
        return list(self.strategy.weight_pieces(self.model, self.optimizer))

    @torch.no_grad()
    def update(self) -> None:
        for average, piece in zip(self.parts, self._live(), strict=True):
            if average.tensor.is_floating_point():
                average.tensor.lerp_(piece.tensor.to(average.tensor.dtype), 1 - self.beta)

    def pieces(self) -> list[Piece]:
        """To save with a checkpoint, and to load from it."""
        return list(of_role(ROLE, self.parts))

    @contextlib.contextmanager
    def in_place(self):
        """Inside, the model's masters hold the average, to be saved."""
        self._swap()
        yield
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, piece in zip(self.parts, self._live(), strict=True):
            weight = piece.tensor.clone()
            piece.tensor.copy_(average.tensor)
            average.tensor.copy_(weight)
