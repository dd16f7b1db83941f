"""Truncated sampling: the tokens that --top_p, --top_k and --min_p keep, and logits of the distribution over them."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

OUTSIDE = -1e9  # finite: the entropy has terms p log p, and 0 times -inf is NaN


def truncate(log_probs: torch.Tensor, top_p: float, top_k: int, min_p: float) -> torch.Tensor:
    """Log-probs (rows, vocab) of the distribution over the kept tokens of each row, and -inf for all other tokens.

    In this order, which is vLLM's: `min_p` keeps tokens of at least min_p times the largest probability. `top_k` (0: off)
    keeps the k most likely tokens, and more if their probabilities are equal. `top_p` keeps the most likely tokens of the
    rest, up to the first with which they reach this share of the rest (Holtzman et al. 2020, section 3.1).
    """
    if min_p:
        limit = log_probs.amax(-1, keepdim=True) + torch.tensor(min_p).log().to(log_probs.device)
        log_probs = log_probs.masked_fill(log_probs < limit, float("-inf"))
    if 0 < top_k < log_probs.shape[-1]:
        limit = log_probs.topk(top_k).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < limit, float("-inf"))
    if top_p < 1:
        ordered, places = log_probs.double().softmax(-1).sort(descending=True, stable=True)
        is_over = ordered.cumsum(-1) - ordered >= top_p  # the tokens before this one are enough
        is_over[:, 0] = False
        log_probs = log_probs.masked_fill(torch.zeros_like(is_over).scatter(-1, places, is_over), float("-inf"))
    return log_probs.log_softmax(-1)


def within_sets(logits: torch.Tensor, kept_sets: torch.Tensor) -> torch.Tensor:
    """Logits (rows, tokens, vocab) of the distributions over the kept tokens. All others get a logit of -1e9.

    `kept_sets` (2, n) holds pairs of a place in all rows of tokens, and of a token that is kept there. A place without
    a pair is unchanged. A DTensor is sharded over the vocabulary, and stays so.
    """
    local, start = logits, 0
    if isinstance(logits, DTensor):
        start = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, logits.placements)[1][-1]
        local = logits.to_local()
    flat, (places, tokens) = local.flatten(0, -2), kept_sets
    size = flat.shape[1]
    # tokens of other ranks go to one more column: to leave them out, the host would wait for the GPU
    columns = torch.where((tokens >= start) & (tokens < start + size), tokens - start, size)
    outside = flat.new_zeros(len(flat), size + 1, dtype=torch.bool).index_fill_(0, places, True)
    outside[places, columns] = False
    local = flat.masked_fill(outside[:, :size], OUTSIDE).view(local.shape)
    if not isinstance(logits, DTensor):
        return local
    shape = {"shape": logits.shape, "stride": logits.stride()}
    return DTensor.from_local(local, logits.device_mesh, logits.placements, run_check=False, **shape)
