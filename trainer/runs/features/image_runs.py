"""Rows with images: what they change in a run. Tokens, micro-batches, the kind of model, and what trains."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from trainer.datasets.files.image_files import decode, has_images
from trainer.datasets.images.image_batches import ImageCollate
from trainer.datasets.images.image_processor import PixelLimits, image_token_ids
from trainer.datasets.images.pixel_cache import PixelCache
from trainer.errors import UserError
from trainer.models.layers.vision import check_tower, freeze_tower, hide_documents, take_own_images
from trainer.runs.feature import Feature

KINDS = {AutoModelForCausalLM: AutoModelForImageTextToText}  # other classes stay


class ImageRun:
    """The parts of a run with images."""

    def __init__(self, setup, sets: list, cache_pixels: bool, pixels: PixelLimits):
        """`sets` are the training and the evaluation samples; some have images. `pixels` are in their processor."""
        sizes = setup.strategy.sizes
        with_images = [found for found in sets if has_images(found)]
        self.folder, self.is_packed, self.sp, self.tp = setup.folder, setup.is_packed, sizes.sp, sizes.tp
        self.collate = ImageCollate(with_images[0].processor, self.is_packed, split=self.sp > 1)
        self.prompts, self._decode, self._pixels = sets[0], decode, pixels  # prompts: of train_ppo
        if cache_pixels:
            self.collate.tensors_of = PixelCache(self.collate.processor).tensors
            self._decode = lambda source: source  # the cache decodes what it does not hold
            for found in with_images:
                found.decode = self._decode

    def check_kind(self, folder: str, flag: str) -> None:
        """Raise UserError if the model of `folder`, which `flag` named, is of another kind than that of --pretrain."""
        own, other = (
            AutoConfig.from_pretrained(path, trust_remote_code=False).model_type for path in (self.folder, folder)
        )
        if own != other:
            raise UserError(flag, f"a {other}, and rows have images", f"a {own}, as --pretrain")

    def fit(self, model) -> None:
        """Check that the model's tower works with the layout, and let the micro-batches know the model."""
        check_tower(model, self.is_packed, self.sp, self.tp)
        if self.is_packed or self.sp > 1:
            hide_documents(model)
        if self.sp > 1:
            take_own_images(model)
        self.collate.use(model)
        model.image_pixels = self._pixels.given()  # for the files of its processor in a saved folder

    def image_tokens(self) -> tuple[int, ...]:
        """Tokens that stand for an image. A policy that draws one has no image to show: its response ends there."""
        return tuple(image_token_ids(self.collate.processor))

    def rows_of_rollout(self, samples: list[dict], pad_token_id: int) -> dict:
        """The micro-batch of samples of a rollout, with the images of their prompts."""
        trained = has_images(self.prompts)  # else only --eval_dataset has images
        images = [self.prompts.images_of(sample["row"]) if trained else [] for sample in samples]
        samples = [{**sample, "images": own} for sample, own in zip(samples, images, strict=True)]
        return self.collate(samples, pad_token_id)

    def read_prompts(self, input_ids, mask, sources: list[tuple]) -> dict:
        """What the rollout engine's model gets to read prompts; see `CachedRows`. `sources`: the images of each."""
        found = self.collate.prompt_arguments(
            input_ids.cpu(), mask.cpu(), [list(map(self._decode, s)) for s in sources]
        )
        return {name: value.to(input_ids.device) for name, value in found.items()}

    def tensors_of_prompt(self, sources: tuple) -> dict:
        """The processor's tensors of the images of one prompt."""
        return self.collate.tensors_of([list(map(self._decode, sources))])


def freeze_parts(strategy, model, is_adapter: bool, freeze_vision: bool) -> None:
    """Freeze what does not train in a model of images, and print it."""
    if is_adapter:
        strategy.print("images: the adapter trains; the vision tower and its projector are frozen")
    elif freeze_vision:
        frozen = freeze_tower(model)
        strategy.print(
            f"images: the vision tower is frozen ({frozen:,} parameters); its projector and the language model train "
            "(--freeze_vision false trains it too)"
        )
    else:
        strategy.print("images: the vision tower, its projector and the language model train")


def images_of(run) -> ImageRun:
    """The parts of a run with images. Prints the limits of pixels that are not those of the model folder."""
    vision = run.args.vision
    pixels = PixelLimits(vision.image_min_pixels, vision.image_max_pixels)
    if given := pixels.given():
        limits = ", ".join(f"{name} {value:,}" for name, value in given.items())
        kept = "an adapter folder has no processor: give them again" if run.args.lora.lora_rank else "model/ has them"
        run.setup.strategy.print(f"images: {limits} ({kept})")
    return ImageRun(run.setup, [run.samples, run.eval_samples], vision.cache_pixels, pixels)


def read_images(run) -> None:
    """Let micro-batches hold images, and every model of the run be one that reads them."""
    images = images_of(run)
    run.collate_rows = images.collate
    use_images(run, images)


def use_images(run, images: ImageRun) -> None:
    """Let every model of the run be one that reads images."""
    run.auto_class = KINDS.get(run.auto_class, run.auto_class)
    run.folder_checks.append(images.check_kind)
    run.model_changes.append(images.fit)


def freeze_vision(run) -> None:
    freeze_parts(run.setup.strategy, run.model, bool(run.args.lora.lora_rank), run.args.vision.freeze_vision)


IMAGES = Feature("images", lambda run: run.has_images, with_data=read_images, with_model=freeze_vision)
