"""The model's own processor. It turns images into tensors, and the mark of an image in the text into image tokens."""

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from trainer.errors import UserError
from trainer.limits import read_model_config

# kind of model -> module and class of its processor. A kind is added with a parity test in test/test_parity_vision.py.
PROCESSORS = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen3_vl.Qwen3VLProcessor"),
    "qwen2_vl": "qwen2_vl.Qwen2VLProcessor",
    "qwen2_5_vl": "qwen2_5_vl.Qwen2_5_VLProcessor",
    "gemma3": "gemma3.Gemma3Processor",
    "gemma4": "gemma4.Gemma4Processor",
    "mistral3": "pixtral.PixtralProcessor",
    "smolvlm": "smolvlm.SmolVLMProcessor",
    "idefics3": "idefics3.Idefics3Processor",
}
BLANK = (32, 32)  # width and height of the image for a micro-batch without images


class PixelLimits(NamedTuple):
    """--image_min_pixels and --image_max_pixels: the pixels of an image after it is resized. None: the model folder's."""

    min_pixels: int | None = None
    max_pixels: int | None = None

    def given(self) -> dict[str, int]:
        """Those that the user gave, by the names that processors have for them."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def check(self, images: Any, folder: str) -> None:
        """Raise UserError if the image processor of `folder`, with these limits in it, has none or cannot keep both."""
        if not self.given():
            return
        flags = " ".join(f"--image_{name}" for name in self.given())
        if not self.given().keys() <= images.valid_kwargs.__annotations__.keys():
            found = f"the {type(images).__name__} of {folder} has no limit of pixels"
            raise UserError(flags, found, instead="Remove the flag: the size is in its preprocessor_config.json.")
        lowest, highest = images.size["shortest_edge"], images.size["longest_edge"]
        if lowest > highest:
            found = f"images of at least {lowest} and at most {highest} pixels"
            raise UserError(flags, found, "--image_min_pixels below --image_max_pixels")


AS_IN_FOLDER = PixelLimits()


def load_processor(folder: str, tokenizer: Any, trust_remote_code: bool = False, pixels: PixelLimits = AS_IN_FOLDER):
    """The processor of a model folder, with this tokenizer, for text and images only.

    `pixels` replace the limits of the folder. Parts for video and sound are left out: they need further packages.
    Raises UserError if the model reads no images, or if its processor has no such limits.
    """
    kind = _processor_class(folder)
    try:
        images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code, **pixels.given())
    except Exception as error:  # of many types: a missing file, an unknown class, a broken value
        found = f"no image processor of {folder} can be loaded: {' '.join(str(error).split())[:200]}"
        raise UserError("--pretrain", found, "a model of images and text, with preprocessor_config.json") from None
    pixels.check(images, folder)
    parts = {"tokenizer": tokenizer, "image_processor": images}

    class Processor(kind):
        @classmethod
        def _get_arguments_from_pretrained(cls, *args, **kwargs) -> list:
            return [parts.get(name) for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, argument_name, argument):
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    Processor.__name__ = Processor.__qualname__ = kind.__name__
    try:
        return Processor.from_pretrained(folder)
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        found = f"the {kind.__name__} of {folder} cannot be made: {' '.join(str(error).split())[:200]}"
        raise UserError("--pretrain", found, "a folder with the files of its processor and tokenizer") from None


def _processor_class(folder: str) -> type:
    """The processor class for the model in a folder."""
    model_type = read_model_config(folder).get("model_type")
    if model_type in PROCESSORS:
        module, name = PROCESSORS[model_type].split(".")
        return getattr(_import_without_torchvision(module), name)
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        found = f"{folder} is a {model_type}, whose images are not checked against transformers yet"
        raise UserError("--pretrain", found, ", ".join(PROCESSORS))
    found = f"{folder} is a model of text ({model_type}), and rows have images"
    raise UserError("--pretrain", found, "a model of images and text, or rows without images")


def _import_without_torchvision(model_type: str):
    """The module of a processor. Some import functions that need torchvision; then PIL's version of them is used."""
    path = f"transformers.models.{model_type}"
    name, real = f"{path}.processing_{model_type}", f"{path}.image_processing_{model_type}"
    if name in sys.modules or importlib.util.find_spec("torchvision"):
        return importlib.import_module(name)
    with contextlib.suppress(ModuleNotFoundError):
        sys.modules[real] = importlib.import_module(f"{path}.image_processing_pil_{model_type}")
    try:
        module = importlib.import_module(name)
    finally:
        sys.modules.pop(real, None)
    if vars(module).get("num2words", str) is None:  # SmolVLM: a package that only texts about videos need
        module.num2words = str
    return module


def process_images(processor, nested: list[list]) -> tuple[dict, list[str]]:
    """The tensors that the model gets for all images, and the text that replaces each image's mark.

    `nested` has the PIL images of each sample. Every sample must have one.
    """
    images, *_ = processor.prepare_inputs_layout(images=nested, text=None)
    options = processor._merge_kwargs(
        processor.valid_processor_kwargs, tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="pt"
    )["images_kwargs"]
    tensors, replacements = processor._process_images(images, **options)
    unused = {"rows", "cols", *processor.unused_input_names}  # rows, cols: Idefics3 drops them in its own way
    return {name: value for name, value in tensors.items() if name not in unused}, replacements


def image_token_ids(processor) -> list[int]:
    """The ids of image tokens, without the line breaks and texts around them."""
    return [token for token in processor.image_token_ids if token is not None]


def blank_image():
    """A white image, not a black one: Idefics3 takes images of zeros for padding."""
    return Image.new("RGB", BLANK, (255, 255, 255))


def processor_state(processor) -> dict:
    """Everything besides the tokenizer that decides the tokens of an image, as JSON values."""
    own = {name: value for name, value in vars(processor).items() if isinstance(value, (int, float, str, bool))}
    images = json.loads(processor.image_processor.to_json_string())
    return {"class": type(processor).__name__, "own": own, "images": images}


@contextlib.contextmanager
def as_user_errors(where: str) -> Iterator[None]:
    """Turn the errors of an image processor, for an image that it cannot handle, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of many types: each processor has its own
        raise UserError(where, f"the image processor refuses it: {' '.join(str(error).split())[:200]}") from None
