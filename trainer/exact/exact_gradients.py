"""The exact gradient of a global batch, from the gradients of single samples.

A sample is run alone, without padding. So its gradient does not depend on the layout. Gradients are added up as whole
numbers (int64), so neither their order nor the number of ranks changes a bit.
"""

import math
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.distributed.sharded_tensors import to_local_if_dtensor
from trainer.exact.exact_reduction import Cut, flat_cut, gather_parts, sum_parts, sums_of_squares
from trainer.exact.exact_sums import GRADIENT_LIMIT, add_to, from_grid, power_of_two_above, to_grid
from trainer.exact.split_rows import SplitRows


class ExactGradients:
    """Sums of gradients over samples, then over ranks. It serves one model.

    An element of the mean gradient is a multiple of 2^-48, up to 2^15. If a sum could be larger, the norm is infinite,
    as with a gradient that is not finite. Then no weight changes.
    """

    def __init__(self, group: dist.ProcessGroup, tp_group: dist.ProcessGroup, sp_group: dist.ProcessGroup):
        """`group` are the ranks that share out the tokens of a global batch. Those of `tp_group` have the same ones.

        Those of `sp_group` share out the tokens of each sample.
        """
        self.group, self.tp_group, self.split = group, tp_group, SplitRows(sp_group)
        self.reached: set[str] = set()  # parameters that got a gradient in any sample
        self.norm = math.nan  # of the last complete gradient
        self.watch: Callable[[str, torch.Tensor], None] | None = None  # gets each gradient of a sample on the grid
        self._sums: dict[str, torch.Tensor] = {}
        self._largest: list[float] = []  # for each micro-batch, the largest absolute value of this rank's gradients

    def add(self, loss_sum: torch.Tensor, leaves: dict[str, torch.Tensor], num_targets: int) -> None:
        """Backward of one sample. `leaves` are the trainable tensors of its graph, by name, in one order on all ranks.

        Autograd returns the gradients, so a backend's hooks neither see nor reduce them.
        """
        self._largest.append(0.0)
        scale = 1.0 / power_of_two_above(num_targets)  # exact, and near the mean
        gradients = torch.autograd.grad(loss_sum * scale, list(leaves.values()), allow_unused=True)
        with torch.no_grad():
            for (name, leaf), gradient in zip(leaves.items(), gradients):
                if isinstance(gradient, DTensor):  # of an embedding, it may be sums with zeros on other tp ranks
                    gradient = gradient.redistribute(placements=leaf.placements).to_local()
                if name not in self._sums:
                    shape = to_local_if_dtensor(leaf).shape if gradient is None else gradient.shape
                    self._sums[name] = torch.zeros(shape, dtype=torch.int64, device=leaf.device)
                if gradient is None:
                    continue
                self.reached.add(name)
                if not self.split.counts(name):
                    continue
                self._largest[-1] = max(self._largest[-1], add_to(self._sums[name], gradient))
                if self.watch:
                    self.watch(name, to_grid(gradient))

    @torch.no_grad()
    def reduce(
        self,
        num_targets: int,
        place: Callable[[str, torch.Tensor], None],
        cut: Cut | None = None,
        split: Collection[str] = (),
    ) -> None:
        """Add up over the ranks, and give each mean gradient to `place`: (name, fp32 tensor). Sets `norm`.

        Each sum is exact, then divided and rounded once. With `cut`, `place` gets this rank's part, else the whole.
        `split` are the names whose tensors are parts that tp split. The others are the same on all tp ranks.
        """
        fits = self._bound() < GRADIENT_LIMIT
        divisor = num_targets / power_of_two_above(num_targets)
        shapes = {name: sums.shape for name, sums in self._sums.items()}
        summed = sum_parts(self._sums, cut or flat_cut, self.group)
        parts = {name: from_grid(sums, divisor) for name, sums in summed}
        copies = {name: 1 if name in split else self.tp_group.size() for name in parts}
        sizes = [shape.numel() * self.tp_group.size() // copies[name] for name, shape in shapes.items()]
        counted = [part if copies[name] == 1 or self.tp_group.rank() == 0 else part[:0] for name, part in parts.items()]
        squares = sums_of_squares(counted, sizes, (self.group, self.tp_group))
        self.norm = math.sqrt(math.fsum(squares)) if fits else math.inf
        for name, gradient in parts.items() if cut else gather_parts(parts, shapes, self.group):
            place(name, gradient)

    def _bound(self) -> float:
        """Return a bound of all sums, the same on every layout: the largest value times the samples with a gradient.

        Ranks add empty micro-batches, so that all have equally many. Their gradient is zero, and they do not count.
        """
        largest = torch.tensor(self._largest, dtype=torch.float64)
        for group in (self.tp_group, self.split.group):  # their ranks have parts of the same samples
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        count, most = (largest > 0).sum() * (self.split.rank == 0), largest.max()
        dist.all_reduce(count, group=self.group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        self._largest = []
        return most.item() * count.item()


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return min(1, max_norm / (norm + 1e-6)), the coefficient of torch and of DeepSpeed. Without `max_norm`, 1."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def add_within_modules_first(model: torch.nn.Module) -> None:
    """Let every module see aliases of its inputs. Of a tensor, uses in one module are then added up before others.

    Autograd adds gradients in the order in which they arrive. Backends put nodes of their own at the borders of modules:
    then all that arrives from within a module is added first, else not. So here each module has such nodes, on every layout.
    """
    for module in model.modules():
        module.register_forward_pre_hook(_aliases, with_kwargs=True)


def _aliases(_module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return tuple(map(_alias, args)), {name: _alias(value) for name, value in kwargs.items()}


def _alias(value):
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return value.view_as(value)
    return tuple(map(_alias, value)) if type(value) is tuple else value
