"""`--cache_pixels`: the tensors of an image are made once. A cache file keeps them for later epochs and runs."""

import hashlib
import json
import os
import threading

import datasets
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from trainer.datasets.files.image_files import content_of, decode
from trainer.datasets.images.image_processor import process_images, processor_state
from trainer.errors import UserError

PROBES = (((32, 32), (96, 64)), ((200, 16),))  # sizes of the images of two samples


class PixelCache:
    """`process_images` with a file for each image. Images are given by their sources, and decoded only if needed."""

    def __init__(self, processor):
        """Raises UserError if the tensors of an image depend on the other images of its micro-batch."""
        self._processor = processor
        state = json.dumps([transformers.__version__, processor_state(processor)])
        name = hashlib.blake2b(state.encode(), digest_size=16).hexdigest()
        self._folder = os.path.join(datasets.config.HF_DATASETS_CACHE, "trainer_pixels", name)
        images = [[Image.new("RGB", size, (9, 99, 200)) for size in sizes] for sizes in PROBES]
        together = process_images(processor, images)[0]
        single = _joined([self._made(image) for own in images for image in own])
        if single is None or any(not torch.equal(value, together[name]) for name, value in single.items()):
            found = (
                f"with {type(processor).__name__}, whose tensors of an image depend on the images of its micro-batch"
            )
            raise UserError("--cache_pixels", found, "leave it out")
        os.makedirs(self._folder, exist_ok=True)

    def tensors(self, nested: list[list]) -> dict:
        """The tensors of all images, as `process_images` makes them."""
        return _joined([self._of(image) for images in nested for image in images])

    def _of(self, image) -> dict:
        if not isinstance(image, (str, bytes)):
            return self._made(image)  # the white image of a micro-batch without images
        content = content_of(image)
        path = os.path.join(self._folder, f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.safetensors")
        if not os.path.exists(path):
            made = {name: value.contiguous() for name, value in self._made(decode(image, content)).items()}
            unfinished = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
            save_file(made, unfinished)
            os.replace(unfinished, path)  # another rank may have made the same
        return load_file(path)

    def _made(self, image) -> dict:
        return process_images(self._processor, [[image]])[0]


def _joined(parts: list[dict]) -> dict | None:
    """The tensors of several images, one after the other. None if they do not fit together."""
    try:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    except (RuntimeError, TypeError):
        return None
