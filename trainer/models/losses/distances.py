"""Distances of a model's distribution of the next token, q, from its teacher's, p.

One function for each formula, and one entry in `DISTANCES`. Each takes log-probs of p and q (rows, columns), and returns terms of
the same shape. Their sum over columns is the distance. Columns are tokens, or the buckets of `buckets`.
"""

import math
from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist

from trainer.distributed.gradient_collectives import Sum
from trainer.models.losses.vocab_parallel import vocab_parallel_log_softmax, vocab_parallel_sum

Group = Optional[dist.ProcessGroup]  # its ranks hold different columns of the vocabulary


@dataclass(frozen=True)
class Distance:
    """Which distance: its name in DISTANCES, the beta of `jsd`, and how many tokens of the teacher have a column of their own."""

    name: str = "kl"
    beta: float = 0.5
    top_k: Optional[int] = None


def kl(log_p: torch.Tensor, log_q: torch.Tensor, beta: float = 0.0) -> torch.Tensor:
    """KL(p || q), forward: q covers all that p does (Hinton et al. 2015)."""
    return log_p.exp() * (log_p - log_q)


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor, beta: float = 0.0) -> torch.Tensor:
    """KL(q || p): q keeps to the likeliest tokens of p (Gu et al. 2024, MiniLLM)."""
    return kl(log_q, log_p)


def jsd(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), with m = beta p + (1 - beta) q: Agarwal et al. 2024 (GKD), equation 1.

    With beta 0 it is KL(p || q), and with beta 1 KL(q || p): the limits of its quotients by beta and by 1 - beta.
    """
    if beta in (0, 1):
        return (reverse_kl if beta else kl)(log_p, log_q)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


DISTANCES = {"kl": kl, "reverse_kl": reverse_kl, "jsd": jsd}


def distances(
    model: torch.Tensor, teacher: torch.Tensor, distance: Distance, first: int = 0, group: Group = None
) -> torch.Tensor:
    """The distance of each row (rows,) of logits (rows, columns), in their dtype. The teacher has no gradient.

    With a `group`, the columns are those from `first` on of the whole vocabulary (all-reduces; with top_k, all-gathers).
    A token that a model rules out with -inf has the least finite log-prob.
    """
    lowest = torch.finfo(model.dtype).min
    log_p, log_q = (log_softmax(logits, group).clamp(min=lowest) for logits in (teacher, model))
    if distance.top_k is not None:
        log_p, log_q = buckets(log_p, log_q, distance.top_k, first, group)
    terms = DISTANCES[distance.name](log_p, log_q, distance.beta)
    return _sum_columns(terms, None if distance.top_k is not None else group).squeeze(1)


def buckets(
    log_p: torch.Tensor, log_q: torch.Tensor, top_k: int, first: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs (rows, top_k + 1) of the teacher's `top_k` likeliest tokens, and of all other tokens together.

    It is the "ghost token" of Anshumann et al. 2025, *Sparse Logit Sampling*: nothing is scaled up to a sum of 1.
    All ranks of `group` get the same.
    """
    here = torch.arange(log_p.shape[1], device=log_p.device) + first
    total = len(here) if group is None else int(_gathered(here.new_tensor([[len(here)]]), group).sum())
    top_k = min(top_k, total - 1)  # so that the last bucket is not empty
    likeliest, places = log_p.topk(min(top_k, len(here)), 1)
    ids = here[places]
    if group is not None:
        missing = (0, top_k - likeliest.shape[1])  # a rank may hold few columns
        pad = torch.nn.functional.pad
        likeliest, ids = (_gathered(pad(x, missing, value=v), group) for x, v in ((likeliest, -math.inf), (ids, -1)))
        likeliest, places = likeliest.topk(top_k, 1)
        ids = ids.gather(1, places)
    is_here = (ids >= first) & (ids < first + len(here))
    columns = torch.where(is_here, ids - first, len(here))  # one more column, for ids of other ranks
    padded = torch.cat([log_q, log_q.new_zeros(len(log_q), 1)], 1)
    of_model = _sum(padded.gather(1, columns), group)
    taken = torch.zeros_like(padded, dtype=torch.bool).scatter_(1, columns, True)[:, : len(here)]
    rests = [_logsumexp(x.masked_fill(taken, -math.inf), group) for x in (log_p, log_q)]
    return torch.cat([likeliest, rests[0]], 1), torch.cat([of_model, rests[1]], 1)


def log_softmax(logits: torch.Tensor, group: Group) -> torch.Tensor:
    """Log-probs of logits (rows, columns). The columns of all ranks of `group` are one distribution."""
    return logits.log_softmax(1) if group is None else vocab_parallel_log_softmax(logits, group)


def _logsumexp(values: torch.Tensor, group: Group) -> torch.Tensor:
    """(rows, 1): over the columns of all ranks. One of them is finite."""
    maximum = _maximum(values, group)
    return _sum_columns((values - maximum).exp(), group).log() + maximum


def _sum_columns(values: torch.Tensor, group: Group) -> torch.Tensor:
    """(rows, 1)"""
    return values.sum(1, keepdim=True) if group is None else vocab_parallel_sum(values, group)


def _maximum(values: torch.Tensor, group: Group) -> torch.Tensor:
    """(rows, 1), without a gradient."""
    values = values.detach()
    maximum = values.amax(1, keepdim=True) if values.shape[1] else values.new_full((len(values), 1), -math.inf)
    if group is not None:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    return maximum


def _gathered(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, 1)


def _sum(values: torch.Tensor, group: Group) -> torch.Tensor:
    return values if group is None else Sum.apply(values, group)
