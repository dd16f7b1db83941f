"""Rotary embeddings whose frequencies depend on the length of the text: `longrope` and `dynamic`.

transformers uses the longest text of a micro-batch for all of its rows. The loss of a text then depends on the other
texts of the micro-batch, and so on the layout. Texts up to the length of pre-training all have the same frequencies.
"""

import inspect

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainer.errors import UserError


def fit_rotary(model, *, longest: int, rolls_out: bool, packed: bool, is_split: bool) -> None:
    """Give each packed document of `model` the long or short rotary frequencies of its own length.

    `longest` is the largest number of tokens in a text. `rolls_out`: the texts are prompts and generated responses.
    `packed`: a row holds documents, whose lengths are known. `is_split`: sequences are split over ranks.

    Raises:
        UserError: texts may be longer than in pre-training, and the length of each one is not known: in padded rows,
            in split sequences, in a rollout. `dynamic` frequencies also depend on all earlier texts.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        for found in sorted(kinds & {"dynamic", "longrope"}):
            original = _original_length(module)
            if longest <= original:
                continue
            is_known = packed and not is_split and not rolls_out
            if found == "dynamic" or kind != found or not is_known:
                flag = "--prompt_max_len + --generate_max_len" if rolls_out else "--max_len"
                can_pack = found == "longrope" and not rolls_out
                packed = ", or --packing_samples without --ring_attn_size and --exact" if can_pack else ""
                problem = f"{longest} with {found} rotary embeddings, which change with the longest text of a batch"
                raise UserError(flag, problem, f"up to {original}{packed}")
            module.forward = _of_each_document(module, original)


def _original_length(module: torch.nn.Module) -> int:
    """The length of pre-training: the smallest one of all kinds of layers."""
    parameters = module.config.rope_parameters
    entries = [entry for entry in (parameters, *parameters.values()) if isinstance(entry, dict)]
    known = [entry["original_max_position_embeddings"] for entry in entries if entry.get("rope_type") == "longrope"]
    return min(known or [module.config.max_position_embeddings])


def _of_each_document(module: torch.nn.Module, original: int):
    """Return the forward of a longrope module: a document has the long frequencies if it is longer than `original`."""
    plain = inspect.unwrap(type(module).forward)  # without the check of the longest text

    @torch.no_grad()
    def forward(x: torch.Tensor, position_ids: torch.Tensor):
        tables = []
        for length in (original, original + 1):
            module.inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, x.device, seq_len=length)
            tables.append(plain(module, x, position_ids))
        is_long = (document_lengths(position_ids) > original)[..., None]
        return tuple(torch.where(is_long, long, short) for short, long in zip(*tables))

    return forward


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Positions (rows, tokens) that restart at 0 in each document -> length of the document of each token.

    [0, 1, 2, 0, 1] gives [3, 3, 3, 2, 2].
    """
    documents = (position_ids == 0).cumsum(1) - 1
    ends = torch.zeros_like(position_ids).scatter_reduce(1, documents, position_ids + 1, "amax")
    return ends.gather(1, documents)
