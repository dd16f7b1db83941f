"""Micro-batches of one row in which each prompt comes once, followed by its answers (--share_prompts).

A prompt stands without its last token. Each answer begins with that last token:

    prompt   a b c        row        a b | c x y | c z
    answers  x y, z       positions  0 1 | 2 3 4 | 2 3

A token attends to its prompt, and to earlier tokens of its own part, see `models.attention.prompt_tree`. So its
hidden state is the same as in a separate row, and the gradient of the prompt is the sum over its answers.
"""

import numpy as np
import torch

from trainer.datasets.batches.packing import HostBounds, collate_padded, shifted_labels


def collate_shared(samples: list[dict], pad_token_id: int) -> dict:
    """input_ids, position_ids and shifted labels, each (1, tokens), and for each prompt the bounds of its parts.

    Samples have input_ids, loss_mask and prompt_length. `prompt_bounds` has (start, end of the prompt, end of each of
    its answers) in the row. `places` has (0, first, skipped) for each sample: from token `skipped` on, its token i is at
    place `first + i` of the row. Earlier tokens are in the shared prompt. In the example above, the bounds are
    (0, 2, 5, 7) and the places (0, 0, 2) and (0, 3, 2).
    """
    if not samples:
        return collate_padded(samples, pad_token_id) | {"more_inputs": {"prompt_bounds": HostBounds([[0, 1]])}}
    numbers: dict[tuple, list[int]] = {}  # prompt -> its samples
    for number, sample in enumerate(samples):
        numbers.setdefault(tuple(sample["input_ids"][: sample["prompt_length"]]), []).append(number)
    row: dict[str, list[int]] = {"input_ids": [], "position_ids": [], "labels": []}
    places, bounds = {}, []

    def append(sample: dict, first: int, last: int) -> None:
        ids = list(sample["input_ids"])
        row["input_ids"] += ids[first:last]
        row["position_ids"] += range(first, last)
        row["labels"] += shifted_labels(ids, sample["loss_mask"])[first:last]
        bounds[-1].append(len(row["input_ids"]))

    for prompt, answers in numbers.items():
        shared = len(prompt) - 1
        bounds.append([len(row["input_ids"])])
        append(samples[answers[0]], 0, shared)  # no label here is a loss token
        for number in answers:
            places[number] = (0, len(row["input_ids"]) - shared, shared)
            append(samples[number], shared, len(samples[number]["input_ids"]))
    tensors = {name: torch.tensor([values]) for name, values in row.items()}
    more = {"more_inputs": {"prompt_bounds": HostBounds(bounds)}}
    return tensors | more | {"places": [places[number] for number in range(len(samples))]}


def sizes_to_plan(samples: list) -> np.ndarray:
    """The length of the longest sample of the same prompt, for each sample: (samples,).

    A plan of batches by these sizes keeps the samples of a prompt together.
    """
    longest: dict[int, int] = {}
    for sample in samples:
        longest[sample.row] = max(longest.get(sample.row, 0), sample.size().tokens)
    return np.array([longest[sample.row] for sample in samples], dtype=np.int32)
