"""Micro-batches with images: token rows, and what the model needs for their images."""

import inspect
from collections.abc import Callable

import torch

from trainer.datasets.image_files import COLUMN
from trainer.datasets.image_processor import blank_image, image_token_ids, process_images
from trainer.datasets.packing import collate_packed, collate_padded

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # which tokens are images; Gemma 3 has the second name


class ImageCollate:
    """`collate_padded` or `collate_packed` with images. Every micro-batch has an image, so ranks run the tower equally often.

    A micro-batch without images gets one more sample, a blank image without loss. `use` must know the model before the
    first batch.
    """

    def __init__(self, processor, packed: bool = False):
        self.processor, self._collate = processor, collate_packed if packed else collate_padded
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
        """The micro-batch without images, and its `images`: further arguments of the model's call."""
        if not any(sample.get(COLUMN) for sample in samples):
            samples = [*samples, self.blank]
        batch = self._collate(samples, pad_token_id)
        tensors, _ = process_images(self.processor, [sample[COLUMN] for sample in samples if sample.get(COLUMN)])
        types = torch.isin(batch["input_ids"], torch.tensor(image_token_ids(self.processor))).long()
        batch["images"] = {**tensors, **dict.fromkeys(self._takes, types)}
        if self._positions is not None:
            batch["images"]["position_ids"] = self._grid_positions(samples, batch, types, tensors["image_grid_thw"])
        return batch

    def _grid_positions(
        self, samples: list[dict], batch: dict, types: torch.Tensor, grids: torch.Tensor
    ) -> torch.Tensor:
        """Time, height and width of each token: (3, rows, tokens). They begin at 0 in each document of a packed row."""
        mask = batch.get("attention_mask")
        if mask is not None:
            return self._positions(
                batch["input_ids"], mm_token_type_ids=types, image_grid_thw=grids, attention_mask=mask
            )[0]
        lengths = [len(sample["input_ids"]) for sample in samples]
        counts = [len(sample.get(COLUMN, ())) for sample in samples]
        documents = zip(batch["input_ids"].split(lengths, 1), types.split(lengths, 1), grids.split(counts), strict=True)
        return torch.cat(
            [self._positions(ids, mm_token_type_ids=kinds, image_grid_thw=own)[0] for ids, kinds, own in documents],
            dim=2,
        )
