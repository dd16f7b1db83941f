"""Rows of tokens that --ring_attn_size splits: what needs a whole sample gets it, on every rank of sp.

Products of forward, activations and losses of tokens work on the tokens of a rank. A norm, an embedding and the gradient
of a weight add up over tokens. So they see all tokens of the sample, in their order, as on one rank. Small products do so
too: the head of a reward model, and those of an adapter that tp does not split.
"""

import functools

import torch
import torch.distributed as dist

from trainer.datasets.batches.sequence_split import natural_order, zigzag_shard
from trainer.errors import UserError

WHOLE = ("Norm", "Embedding")  # ends of the names of classes whose modules see whole samples
SMALL = (".score", ".lora_A.default", ".lora_B.default")  # ends of the paths of small products that do so too


class SplitRows:
    """The ranks of `group` hold zigzag shards of the rows of a micro-batch. One rank holds whole rows."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.num_tokens = 0  # of each row of the micro-batch that runs now, without the padding of the split
        self.shared: set[str] = set()  # parameters whose gradient is on one rank, and zero on the others

    def whole(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The shard (..., tokens / sp, ...) of each rank -> (..., tokens, ...), without padding (all-gather)."""
        if self.size == 1:
            return tensor
        own = tensor.movedim(dim, 0).contiguous()
        gathered = own.new_empty(self.size * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own, group=self.group)
        tokens_first = natural_order(gathered, self.size, 0)[: self.num_tokens]
        return tokens_first.movedim(0, 1).contiguous().movedim(1, dim)

    def own(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """(..., tokens, ...) -> this rank's shard (..., tokens / sp, ...). Its padding is zero."""
        padding = -tensor.shape[dim] % (2 * self.size)
        zeros = tensor.new_zeros(*tensor.shape[:dim], padding, *tensor.shape[dim + 1 :])
        return zigzag_shard(torch.cat([tensor, zeros], dim), self.rank, self.size, dim)

    def counts(self, name: str) -> bool:
        """Whether this rank's gradient of a parameter is added up. Without sharing, all ranks of sp have the same."""
        return self.rank == 0 or name in self.shared


class Whole(torch.autograd.Function):
    """A whole row from the shards. Every rank computes the same from it, so backward takes this rank's part."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, rows: SplitRows, dim: int) -> torch.Tensor:
        ctx.rows, ctx.dim = rows, dim
        return rows.whole(tensor, dim)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.rows.own(grad, ctx.dim), None, None


class Own(torch.autograd.Function):
    """This rank's shard of a row that every rank has. Backward gathers the gradients of all shards."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, rows: SplitRows, dim: int) -> torch.Tensor:
        ctx.rows, ctx.dim = rows, dim
        return rows.own(tensor, dim)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.rows.whole(grad, ctx.dim), None, None


def give_whole_rows(model: torch.nn.Module, rows: SplitRows, token_dims: dict[str, int], others: set[str]) -> None:
    """Let the modules of a model that add up over tokens see whole rows, if sp splits them.

    `token_dims` has norms of heads, and where their inputs have the tokens. `others` are products, which need nothing.

    Raises:
        UserError: a module with parameters is of an unknown kind.
    """
    if rows.size == 1:
        return
    model.register_forward_pre_hook(functools.partial(_count_tokens, rows), with_kwargs=True)
    for name, module in model.named_modules():
        kind = type(module).__name__
        has_own = name not in others and next(module.parameters(recurse=False), None) is not None
        if has_own and not (kind.endswith(WHOLE) or f".{name}".endswith(SMALL)):
            found = f"the layer {name}, {kind}, may add up the tokens of split samples in another order"
            raise UserError("--exact", found, "--ring_attn_size 1")
        if has_own or "Rotary" in kind:  # sines of positions are vector code
            _see_whole_rows(module, rows, token_dims.get(name, 1))


def _count_tokens(rows: SplitRows, _model, _args: tuple, kwargs: dict) -> None:
    """Note the length of the sample whose parts the ranks hold, or of its longest row. Positions of padding begin at 0 again."""
    positions = kwargs["position_ids"]
    places = zigzag_shard(torch.arange(rows.size * positions.shape[1])[None], rows.rank, rows.size)
    counts = (positions == places).sum(1)  # the two sides of a pair are two rows
    dist.all_reduce(counts, group=rows.group)
    rows.num_tokens = int(counts.max())


def _see_whole_rows(module: torch.nn.Module, rows: SplitRows, dim: int) -> None:
    """Around all other hooks of the module: those of a backend see whole rows too."""

    def gather(_module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}

    def whole(value):
        return Whole.apply(value, rows, dim) if isinstance(value, torch.Tensor) else value

    def own(value: torch.Tensor) -> torch.Tensor:
        return Own.apply(value, rows, dim)

    def split(_module, _args: tuple, output):
        return own(output) if isinstance(output, torch.Tensor) else tuple(map(own, output))

    module.register_forward_pre_hook(gather, prepend=True, with_kwargs=True)
    module.register_forward_hook(split)
