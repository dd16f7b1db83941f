"""Log-probs, cross-entropy and entropy of logits that are sharded by vocabulary over tp. Full logits are never gathered."""

import torch
import torch.distributed as dist

from trainer.exact.fixed_tree import num_pieces, tree_sum


def _minus_maximum(logits: torch.Tensor, group) -> torch.Tensor:
    """Logits (rows, local vocab) minus the maximum of each row over all ranks of `group` (all-reduce)."""
    maximum = logits.amax(1) if logits.shape[1] else logits.new_full((logits.shape[0],), float("-inf"))
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    return logits - maximum[:, None]


def _num_pieces(logits: torch.Tensor, group) -> int:
    """A GPU has no --exact, and one piece is faster there."""
    return 1 if logits.is_cuda else num_pieces(logits.shape[1], group.size())


class _VocabParallelNLL(torch.autograd.Function):
    """-log p(target) of each row. Forward: two collectives over `group` (max, then two sums). Backward is local.

    The sums follow a tree of fixed pieces of the vocabulary. So 1, 2, 4 and 8 ranks give the same bits.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, vocab_start: int, group) -> torch.Tensor:
        shifted = _minus_maximum(logits, group)
        local_targets = targets - vocab_start
        is_local = (local_targets >= 0) & (local_targets < logits.shape[1])
        rows = is_local.nonzero().squeeze(1)
        columns = local_targets[rows]
        target_logits = shifted.new_zeros(shifted.shape[0])
        target_logits[rows] = shifted[rows, columns]
        count = _num_pieces(shifted, group)
        pieces = [piece.contiguous().exp_() for piece in shifted.chunk(count, 1)]
        exponentials = pieces[0] if count == 1 else torch.cat(pieces, 1)
        totals = [piece.sum(1) for piece in pieces]
        # the logit of the target is on one rank, and zero on the others
        rest = [target_logits, *[torch.zeros_like(target_logits)] * (count - 1)]
        sums = tree_sum([torch.stack(pair) for pair in zip(totals, rest)], group)  # (2, rows)
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), rows, columns)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        probabilities, rows, columns = ctx.saved_tensors
        grad_logits = probabilities * grad[:, None]
        grad_logits[rows, columns] -= grad[rows]
        return grad_logits, None, None, None


class _VocabParallelEntropy(torch.autograd.Function):
    """Entropy of each row. Forward: two collectives over `group` (max, then two sums). Backward is local."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, group) -> torch.Tensor:
        shifted = _minus_maximum(logits, group)
        pieces = [piece.contiguous() for piece in shifted.chunk(_num_pieces(shifted, group), 1)]
        powers = [piece.exp() for piece in pieces]
        both = [torch.stack([e.sum(1), (e * piece).sum(1)]) for e, piece in zip(powers, pieces)]
        sums = tree_sum(both, group)  # (2, rows)
        entropies = sums[0].log() - sums[1] / sums[0]
        ctx.save_for_backward(shifted - sums[0].log()[:, None], entropies)
        return entropies

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        log_probabilities, entropies = ctx.saved_tensors
        return -log_probabilities.exp() * (log_probabilities + entropies[:, None]) * grad[:, None], None


class _VocabParallelLogSoftmax(torch.autograd.Function):
    """Log-probs of each row. Forward: two collectives over `group` (max, then a sum). Backward: one sum."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, group) -> torch.Tensor:
        shifted = _minus_maximum(logits, group)
        ctx.group, log_probs = group, shifted - _sum_columns(shifted, group, torch.exp).log()
        ctx.save_for_backward(log_probs)
        return log_probs

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (log_probs,) = ctx.saved_tensors
        return grad - log_probs.exp() * _sum_columns(grad, ctx.group), None


class _SumColumns(torch.autograd.Function):
    """The sum of each row over the columns of all ranks of `group`. Backward: the same gradient for each column."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, group) -> torch.Tensor:
        ctx.columns = values.shape[1]
        return _sum_columns(values, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.expand(-1, ctx.columns), None


def _sum_columns(values: torch.Tensor, group, function=lambda piece: piece) -> torch.Tensor:
    """(rows, 1): the sum of `function` of the values, by the tree of fixed pieces of the vocabulary."""
    pieces = values.chunk(_num_pieces(values, group), 1)
    return tree_sum([function(piece.contiguous()).sum(1, keepdim=True) for piece in pieces], group)


def vocab_parallel_log_softmax(logits: torch.Tensor, group) -> torch.Tensor:
    """Return the log-probs of logits (rows, local vocab). Other ranks of `group` hold other columns of the distribution."""
    return _VocabParallelLogSoftmax.apply(logits, group)


def vocab_parallel_sum(values: torch.Tensor, group) -> torch.Tensor:
    """Return the sum (rows, 1) of values (rows, local vocab) over all columns. Other ranks of `group` hold other ones."""
    return _SumColumns.apply(values, group)


def vocab_parallel_entropy(logits: torch.Tensor, group) -> torch.Tensor:
    """Return -sum p log p of each row of fp32 logits (rows, local vocab). Other ranks hold other columns."""
    return _VocabParallelEntropy.apply(logits, group)


def vocab_parallel_nll(logits: torch.Tensor, targets: torch.Tensor, vocab_start: int, group) -> torch.Tensor:
    """Return -log p(target) of each row of fp32 logits (rows, local vocab): the columns from vocab_start of all logits.

    Targets are ids of the whole vocabulary. Targets and result are the same on every rank of the tp `group`. With 5
    words on 2 ranks, rank 0 holds columns 0 to 2. Rank 1 has vocab_start 3 and holds columns 3 and 4. All-reduces over
    `group`. The formula is from Megatron-LM (Shoeybi et al. 2019, section 3).
    """
    return _VocabParallelNLL.apply(logits, targets, vocab_start, group)
