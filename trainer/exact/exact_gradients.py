"""The exact gradient of a global batch, from the gradients of single samples.

A sample is run alone, without padding. So its gradient does not depend on the layout. Gradients are added up as whole
numbers (int64), so neither their order nor the number of ranks changes a bit.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from trainer.exact.exact_reduction import Cut, flat_cut, gather_parts, sum_parts, sums_of_squares
from trainer.exact.exact_sums import GRADIENT_LIMIT, add_to, from_grid, power_of_two_above, to_grid


class ExactGradients:
    """Sums of gradients over samples, then over ranks. It serves one model.

    An element of the mean gradient is a multiple of 2^-48, up to 2^15. If a sum could be larger, the norm is infinite,
    as with a gradient that is not finite. Then no weight changes.
    """

    def __init__(self, group: dist.ProcessGroup):
        """`group` are the ranks that share out the samples of a global batch."""
        self.group = group
        self.reached: set[str] = set()  # parameters that got a gradient in any sample
        self.norm = math.nan  # of the last complete gradient
        self.watch: Callable[[str, torch.Tensor], None] | None = None  # gets each gradient of a sample on the grid
        self._sums: dict[str, torch.Tensor] = {}
        self._largest, self._num_samples = 0.0, 0

    def add(self, loss_sum: torch.Tensor, leaves: dict[str, torch.Tensor], num_targets: int) -> None:
        """Backward of one sample. `leaves` are the trainable tensors of its graph, by name, in one order on all ranks.

        Autograd returns the gradients, so a backend's hooks neither see nor reduce them.
        """
        scale = 1.0 / power_of_two_above(num_targets)  # exact, and near the mean
        gradients = torch.autograd.grad(loss_sum * scale, list(leaves.values()), allow_unused=True)
        with torch.no_grad():
            for (name, leaf), gradient in zip(leaves.items(), gradients):
                if name not in self._sums:
                    shape = leaf.shape if gradient is None else gradient.shape
                    self._sums[name] = torch.zeros(shape, dtype=torch.int64, device=leaf.device)
                if gradient is None:
                    continue
                self.reached.add(name)
                self._largest = max(self._largest, add_to(self._sums[name], gradient))
                if self.watch:
                    self.watch(name, to_grid(gradient))
        self._num_samples += 1

    @torch.no_grad()
    def reduce(self, num_targets: int, place: Callable[[str, torch.Tensor], None], cut: Cut | None = None) -> None:
        """Add up over the ranks, and give each mean gradient to `place`: (name, fp32 tensor). Sets `norm`.

        Each sum is exact, then divided and rounded once. With `cut`, `place` gets this rank's part, else the whole.
        """
        largest, count = torch.tensor(self._largest, dtype=torch.float64), torch.tensor(self._num_samples)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(count, group=self.group)
        fits = largest.item() * count.item() < GRADIENT_LIMIT
        divisor = num_targets / power_of_two_above(num_targets)
        shapes = {name: sums.shape for name, sums in self._sums.items()}
        summed = sum_parts(self._sums, cut or flat_cut, self.group)
        parts = {name: from_grid(sums, divisor) for name, sums in summed}
        squares = sums_of_squares(list(parts.values()), [shape.numel() for shape in shapes.values()], self.group)
        self.norm = math.sqrt(math.fsum(squares)) if fits else math.inf
        for name, gradient in parts.items() if cut else gather_parts(parts, shapes, self.group):
            place(name, gradient)
        self._largest, self._num_samples = 0.0, 0


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return min(1, max_norm / (norm + 1e-6)), the coefficient of torch and of DeepSpeed. Without `max_norm`, 1."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
