"""Micro-batches with images: token rows, and what the model needs for their images."""

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F

from trainer.datasets.batches.packing import IGNORE, collate_packed, collate_padded
from trainer.datasets.files.image_files import COLUMN
from trainer.datasets.images.image_processor import blank_image, image_token_ids, process_images

WORKERS = 2  # threads that make batches ahead: with one, steps wait for images (docs/benchmarks.md)
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # which tokens are images; Gemma 3 has the second name


class ImageCollate:
    """`collate_padded` or `collate_packed` for samples with images.

    Every micro-batch has an image, so all ranks run the vision tower equally often: a micro-batch of texts gets one
    more sample, a blank image without loss. `use` must get the model before the first batch. `split`: rows will be
    sharded over sp ranks.
    """

    def __init__(self, processor, packed: bool = False, split: bool = False):
        self.processor, self._collate = processor, collate_packed if packed else collate_padded
        self._split, self._image_token = split, None
        self.tensors_of = lambda nested: process_images(processor, nested)[0]
        [blank], [text] = [[blank_image()]], process_images(processor, [[blank_image()]])[1]
        input_ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.blank = {"input_ids": input_ids, "loss_mask": [0] * len(input_ids), COLUMN: blank}
        self._takes: list[str] = []
        self._positions: Callable | None = None

    def use(self, model) -> None:
        """Find out which arguments the model takes, and how it counts positions."""
        inner = getattr(model, "model", None)
        arguments = {name for part in (model, inner or model) for name in inspect.signature(part.forward).parameters}
        self._takes = [name for name in TOKEN_TYPES if name in arguments]
        self._image_token = model.config.image_token_id
        self._positions = getattr(inner, "get_rope_index", None)  # Qwen: three positions for each token (M-RoPE)

    def __call__(self, samples: list[dict], pad_token_id: int) -> dict:
        """Collate samples to a micro-batch whose `images` are further arguments of the model's call.

        Of n images: `pixel_values` and other tensors of the processor, in its shapes. Per token (rows, tokens): token
        types, and with `split` image_places, the number of the token among all image tokens (-1: no image token).
        With M-RoPE also position_ids (3, rows, tokens).
        """
        if not any(sample.get(COLUMN) for sample in samples):
            samples = [*samples, self.blank]
        batch = self._collate(samples, pad_token_id)
        tensors = self._tensors([sample[COLUMN] for sample in samples if sample.get(COLUMN)])
        # an image token that a policy generated has no image: it stays a label, and the input is a pad token
        is_target = F.pad(batch["labels"][:, :-1] != IGNORE, (1, 0))
        generated = is_target & self._types(batch["input_ids"]).bool()
        batch["input_ids"] = batch["input_ids"].masked_fill(generated, pad_token_id)
        types = self._types(batch["input_ids"])
        batch["images"] = {**tensors, **dict.fromkeys(self._takes, types)}
        if self._split:
            of_image = batch["input_ids"] == self._image_token
            places = of_image.flatten().cumsum(0).view(of_image.shape) - 1
            batch["images"]["image_places"] = places.where(of_image, -1)
        if self._positions is not None:
            batch["images"]["position_ids"] = self._grid_positions(samples, batch, types, tensors["image_grid_thw"])
        return batch

    def prompt_arguments(self, input_ids: torch.Tensor, mask: torch.Tensor, nested: list[list]) -> dict:
        """The further arguments of a model's call that reads whole prompts: `input_ids` and `mask` (rows, tokens).

        `nested` has the images of each row.
        """
        nested = [images for images in nested if images]
        tensors, types = self._tensors(nested) if nested else {}, self._types(input_ids)
        found = {**tensors, **dict.fromkeys(self._takes, types)}
        if self._positions is not None:
            grids = tensors.get("image_grid_thw")
            own = {"mm_token_type_ids": types, "image_grid_thw": grids, "attention_mask": mask}
            found["position_ids"] = self._positions(input_ids, **own)[0]
        return found

    def _types(self, input_ids: torch.Tensor) -> torch.Tensor:
        """1 at image tokens, else 0: (rows, tokens)."""
        return torch.isin(input_ids, torch.tensor(image_token_ids(self.processor))).long()

    def _tensors(self, nested: list[list]) -> dict:
        """The tensors of all images. The two answers of a pair have the same images, which are processed once."""
        half = len(nested) // 2
        if half and list(map(id, nested[:half])) == list(map(id, nested[half:])):
            once = self.tensors_of(nested[:half])
            return {name: torch.cat([tensor, tensor]) for name, tensor in once.items()}
        return self.tensors_of(nested)

    def _grid_positions(
        self, samples: list[dict], batch: dict, types: torch.Tensor, grids: torch.Tensor
    ) -> torch.Tensor:
        """Time, height and width of each token: (3, rows, tokens). They start at 0 in each document of a packed row."""
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
