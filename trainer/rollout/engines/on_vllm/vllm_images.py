"""Prompts with images for vLLM. It gets the tensors of training's own processor, and the places of their tokens.

So vLLM processes no image and expands no token: it reads the same ids as training.
"""

import copy
import hashlib
import importlib
import itertools
import sys
from collections.abc import Callable, Sequence

import torch

from trainer.errors import UserError
from trainer.model_folders.model_folder import read_config

# test/rollout/test_vllm_images.py compares tokens and log-probs of these kinds of model with the hf engine
KINDS = ("qwen3_vl",)


def image_options(folder: str, trust_remote_code: bool, processor) -> dict:
    """What vLLM also needs to run the model of `folder` with images. `processor` is the one that training uses.

    Raises UserError for a kind that is not tested.
    """
    kind = read_config(folder, trust_remote_code).model_type
    if kind not in KINDS:
        found = f"vllm with images and a {kind}, which is not compared with the hf engine yet"
        raise UserError("--rollout_engine", found, f"hf, or a model of kind {', '.join(KINDS)}")
    import_without_torchvision()
    use_processor(processor)
    return {
        "hf_overrides": as_transformers_rotates,
        "limit_mm_per_prompt": {"image": 1, "video": 0},  # what vLLM tries while it starts; it is no limit of prompts
        "mm_processor_cache_gb": 0,  # there is nothing to process
        "mm_encoder_tp_mode": "data",  # each rank holds the whole tower, as in training
    }


def use_processor(processor) -> None:
    """Make vLLM use this processor for its questions about images, such as the largest size. vLLM's own processor would load
    parts for videos, which need torchvision."""
    from vllm.multimodal.processing.context import InputProcessingContext  # vllm is an extra

    own = copy.copy(processor)
    own.video_processor = (
        own.video_processor or own.image_processor
    )  # vLLM only reads names of options from it: no video comes
    InputProcessingContext.get_hf_processor = lambda self, *args, **options: own


def import_without_torchvision() -> None:
    """Import vLLM's Qwen3-VL if torchvision is missing. It needs one function of a module that imports torchvision, and
    PIL's module has the function too."""
    if importlib.util.find_spec("torchvision"):
        return
    from vllm.model_executor.models.registry import ModelRegistry  # vllm is an extra

    path = "transformers.models.qwen2_vl.image_processing"
    sys.modules[f"{path}_qwen2_vl"] = importlib.import_module(f"{path}_pil_qwen2_vl")
    try:
        model_class = importlib.import_module("vllm.model_executor.models.qwen3_vl").Qwen3VLForConditionalGeneration
        ModelRegistry.register_model(model_class.__name__, model_class)
    finally:
        del sys.modules[f"{path}_qwen2_vl"]


def as_transformers_rotates(config):
    """`config` for vLLM: positions of time, height and width are interleaved in a head, whether or not the file says so.

    transformers always interleaves them in these kinds. vLLM puts them in blocks if `mrope_interleaved` is missing.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None)  # vLLM also asks about an empty config
    if rope is not None:
        rope["mrope_interleaved"] = True
    return config


class ImagePrompts:
    """Makes vLLM's form of prompts. `tensors_of` gives the processor's tensors of the images of a prompt."""

    def __init__(self, llm, tensors_of: Callable[[Sequence], dict]):
        from vllm.multimodal import MULTIMODAL_REGISTRY  # vllm is an extra

        self._tensors_of, self._config = tensors_of, llm.model_config.hf_config
        self._fields = MULTIMODAL_REGISTRY.create_processor(llm.model_config)._get_mm_fields_config

    def engine_input(self, ids: list[int], sources: Sequence) -> dict:
        """The input of a prompt with these images. Raises UserError if its image tokens do not fit the images."""
        # vllm is an extra
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        if not sources:
            return tokens_input(ids)
        tensors = self._tensors_of(sources)
        sizes = (tensors["image_grid_thw"].prod(-1) // self._config.vision_config.spatial_merge_size**2).tolist()
        places = runs_of(ids, self._config.image_token_id)
        if [length for _, length in places] != sizes:
            found = f"a prompt with runs of {[length for _, length in places]} image tokens for images of {sizes}"
            raise UserError("--rollout_engine", f"vllm: {found}", "one run of image tokens for each image")
        items = MultiModalKwargsItems.from_hf_inputs(tensors, self._fields(tensors, {}))
        hashes = [content_hash(item.get_data()) for item in items["image"]]
        ranges = [PlaceholderRange(offset=start, length=length) for start, length in places]
        return mm_input(ids, items, {"image": hashes}, {"image": ranges})


def runs_of(ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    """(start, length) of each longest run of `token`. In 7 5 5 7 5, the runs of 5 are (1, 2) and (4, 1)."""
    runs, start = [], 0
    for found, members in itertools.groupby(ids):
        length = len(list(members))
        if found == token:
            runs.append((start, length))
        start += length
    return runs


def content_hash(tensors: dict[str, torch.Tensor]) -> str:
    """Key under which vLLM caches an image's embedding."""
    whole = hashlib.blake2b(digest_size=16)
    for name, value in sorted(tensors.items()):
        whole.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        whole.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()
