"""Micro-batches with images: token rows, and what the model needs for their images."""

import inspect
from collections.abc import Callable

import torch

from trainer.datasets.image_files import COLUMN
from trainer.datasets.image_processor import blank_image, process_images
from trainer.datasets.packing import collate_padded

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # which tokens are images; Gemma 3 has the second name


class ImageCollate:
    """`collate_padded` with images. Every micro-batch has an image: the ranks then run the vision tower equally often.

    A micro-batch without images gets one more row, a blank image without loss. `use` must know the model before the
    first batch.
    """

    def __init__(self, processor):
        self.processor = processor
        [blank], [text] = [[blank_image()]], process_images(processor, [[blank_image()]])[1]
        input_ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.blank = {"input_ids": input_ids, "loss_mask": [0] * len(input_ids), COLUMN: blank}
        self._takes: list[str] = []
        self._positions: Callable | None = None

    def use(self, model) -> None:
        """Note which arguments the model takes, and how it counts positions."""
        arguments = inspect.signature(model.forward).parameters
        self._takes = [name for name in TOKEN_TYPES if name in arguments]
        inner = getattr(model, "model", None)
        self._positions = getattr(inner, "get_rope_index", None)  # Qwen: three positions for each token (M-RoPE)

    def __call__(self, samples: list[dict], pad_token_id: int) -> dict:
        """The micro-batch of `collate_padded`, and its `images`: further arguments of the model's call."""
        if not any(sample.get(COLUMN) for sample in samples):
            samples = [*samples, self.blank]
        batch = collate_padded(samples, pad_token_id)
        tensors, _ = process_images(self.processor, [sample[COLUMN] for sample in samples if sample.get(COLUMN)])
        types = self._token_types(batch["input_ids"], batch["attention_mask"])
        batch["images"] = {**tensors, **dict.fromkeys(self._takes, types)}
        if self._positions is not None:
            grids = {name: value for name, value in tensors.items() if name.endswith("grid_thw")}
            found = self._positions(
                batch["input_ids"], mm_token_type_ids=types, attention_mask=batch["attention_mask"], **grids
            )
            batch["images"]["position_ids"] = found[0]
        return batch

    def _token_types(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """1 for each token of an image, else 0."""
        own = torch.tensor([token for token in self.processor.image_token_ids if token is not None])
        return (torch.isin(input_ids, own) & attention_mask.bool()).long()
