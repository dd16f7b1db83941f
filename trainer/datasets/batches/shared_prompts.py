"""Micro-batches whose rows hold a prompt and all its answers, so that the prompt is computed once (--share_prompts).

A row is the prompt without its last token, and then for each answer that last token and the answer's tokens:

    prompt   a b c        row        a b | c x y | c z
    answers  x y, z       positions  0 1 | 2 3 4 | 2 3

A token attends to the prompt, and to earlier tokens of its own part. So its hidden state is the same as in a separate
row, and the gradient of the prompt is the sum over its answers.
"""

import inspect

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from trainer.datasets.batches.packing import IGNORE, collate_padded, shifted_labels
from trainer.errors import UserError

FLAG = "--share_prompts"


def collate_shared(samples: list[dict], pad_token_id: int) -> dict:
    """input_ids, position_ids and shifted labels, each (rows, longest), and the attention mask of `seen_tokens`.

    Samples have input_ids, loss_mask and prompt_length. `places` has (row, first, skipped) for each sample: from token
    `skipped` on, its token i is at place `first + i` of the row. Earlier tokens are in the shared prompt. In the
    example above, the places are (0, 0, 2) and (0, 3, 2).
    """
    if not samples:
        return collate_padded(samples, pad_token_id)
    rows: list[dict[str, list[int]]] = []
    numbers: dict[tuple, int] = {}  # prompt -> number of its row
    places = []
    for part, sample in enumerate(samples, start=1):
        ids, shared = list(sample["input_ids"]), sample["prompt_length"] - 1
        number = numbers.setdefault(tuple(ids[: shared + 1]), len(rows))
        if number == len(rows):
            none = [IGNORE] * shared
            rows.append({"ids": ids[:shared], "positions": [*range(shared)], "labels": none, "part": [0] * shared})
        row = rows[number]
        places.append((number, len(row["ids"]) - shared, shared))
        row["ids"] += ids[shared:]
        row["positions"] += range(shared, len(ids))
        row["labels"] += shifted_labels(ids, sample["loss_mask"])[shared:]
        row["part"] += [part] * (len(ids) - shared)
    longest = max(len(row["ids"]) for row in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    return {
        "input_ids": padded("ids", pad_token_id),
        "position_ids": padded("positions", 0),
        "labels": padded("labels", IGNORE),
        "more_inputs": {"attention_mask": seen_tokens(padded("part", -1))},
        "places": places,
    }


def seen_tokens(parts: torch.Tensor) -> torch.Tensor:
    """The attention mask (rows, 1, tokens, tokens): True where the first token sees the second.

    `parts` (rows, tokens) is 0 in the prompt, 1, 2, ... in the answers and -1 in the padding. Padding sees itself,
    because attention to nothing would be NaN. Parts [0, 1, 2] give [[1, 0, 0], [1, 1, 0], [1, 0, 1]].
    """
    same = parts[:, :, None] == parts[:, None, :]
    return (same | (parts == 0)[:, None, :]).tril()[:, None]


def sizes_to_plan(samples: list) -> np.ndarray:
    """The length of the longest sample of the same prompt, for each sample: (samples,).

    A plan of batches by these sizes keeps the samples of a prompt together.
    """
    longest: dict[int, int] = {}
    for sample in samples:
        longest[sample.row] = max(longest.get(sample.row, 0), sample.size().tokens)
    return np.array([longest[sample.row] for sample in samples], dtype=np.int32)


def refuse_model(model) -> None:
    """Raise UserError if a layer of `model` takes no attention mask of our own, or the model no positions."""
    layers = DynamicCache(config=model.config).layers
    is_plain = layers and all(type(layer) is DynamicLayer for layer in layers)
    is_plain = is_plain and model.config._attn_implementation == "sdpa"
    if not (is_plain and "position_ids" in inspect.signature(model.forward).parameters):
        found = f"the layers of {type(model).__name__} cannot share a prompt"
        raise UserError(FLAG, found, "models whose layers all have full attention")
