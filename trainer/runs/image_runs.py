"""What rows with images change in a training command: the tokens, the micro-batches, the model, and what trains."""

import functools
from collections.abc import Callable

from trainer.errors import UserError
from trainer.flags.common_flags import VisionArguments


def tokenizer_of_rows(args, rows, tokenize: Callable) -> Callable:
    """`tokenize`, or its form for rows with images and the model of --pretrain. See `tokenize_with_images`."""
    from trainer.datasets.files.image_files import has_images
    from trainer.datasets.images.image_samples import tokenize_with_images
    from trainer.models.model_loading import resolve_model_folder

    if not has_images(rows):
        return tokenize
    return functools.partial(
        tokenize_with_images,
        tokenize=tokenize,
        folder=resolve_model_folder(args.pretrain),
        remote_code=args.trust_remote_code,
        own_template=bool(args.tokenizer_chat_template),
    )


class ImageRun:
    """The parts of a run with images. Raises UserError for flags that do not work with images."""

    def __init__(self, args, setup, *sets):
        from transformers import AutoModelForImageTextToText

        from trainer.datasets.files.image_files import decode
        from trainer.datasets.images.image_batches import ImageCollate

        with_images = [found for found in sets if found and "images" in found.column_names]
        _refuse_flags(args, bool(with_images))
        self.args, self.strategy, self.folder = args, setup.strategy, setup.folder
        self.auto_class = AutoModelForImageTextToText
        self.collate = ImageCollate(with_images[0].processor, args.packing_samples, split=args.ring_attn_size > 1)
        self.prompts, self._decode = sets[0], decode  # of train_ppo
        if args.cache_pixels:
            from trainer.datasets.images.pixel_cache import PixelCache

            self.collate.tensors_of = PixelCache(self.collate.processor).tensors
            self._decode = lambda source: source  # the cache decodes what it has not
            for found in with_images:
                found.decode = self._decode

    def check_kind(self, folder: str, flag: str) -> None:
        """Raise UserError if the model of `folder`, which `flag` named, is of another kind than that of --pretrain."""
        from transformers import AutoConfig

        own, other = (AutoConfig.from_pretrained(path).model_type for path in (self.folder, folder))
        if own != other:
            raise UserError(flag, f"a {other}, and rows have images", f"a {own}, as --pretrain")

    def fit(self, model) -> None:
        """Check that the model's tower works with the flags, and let the micro-batches know the model."""
        from trainer.models.layers.vision import check_tower, hide_documents, take_own_images

        args, is_split = self.args, self.args.ring_attn_size > 1
        check_tower(model, args.packing_samples, args.ring_attn_size, args.tensor_parallel_size)
        if args.packing_samples or is_split:
            hide_documents(model)
        if is_split:
            take_own_images(model)
        self.collate.use(model)

    def use(self, model) -> None:
        """`fit` the model that trains, freeze what does not train, and say so."""
        from trainer.models.layers.vision import freeze_tower

        self.fit(model)
        if self.args.lora_rank:
            self.strategy.print("images: the adapter trains; the vision tower and its projector are frozen")
        elif self.args.freeze_vision:
            frozen = freeze_tower(model)
            self.strategy.print(
                f"images: the vision tower is frozen ({frozen:,} parameters); its projector and the language model train "
                "(--freeze_vision false trains it too)"
            )
        else:
            self.strategy.print("images: the vision tower, its projector and the language model train")

    def image_tokens(self) -> tuple[int, ...]:
        """Tokens that stand for an image. A policy that draws one has no image to show: its response ends there."""
        from trainer.datasets.images.image_processor import image_token_ids

        return tuple(image_token_ids(self.collate.processor))

    def rows_of_rollout(self, samples: list[dict], pad_token_id: int) -> dict:
        """The micro-batch of samples of a rollout, with the images of their prompts."""
        has_images = "images" in self.prompts.column_names  # else only those of --eval_dataset have
        images = [self.prompts.images_of(sample["row"]) if has_images else [] for sample in samples]
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


def _refuse_flags(args, any_images: bool) -> None:
    if not any_images:
        flag = next(name for name, usual in vars(VisionArguments()).items() if vars(args)[name] != usual)
        raise UserError(f"--{flag}", "would do nothing here: no row has an image", "rows with images, or leave it out")
    flags = vars(args)
    refused = [
        ("--sequence_parallel", args.sequence_parallel, "leave it out"),
        ("--expert_parallel_size", args.expert_parallel_size > 1, "1"),
        ("--load_in_4bit", args.load_in_4bit, "leave it out"),
        ("--compile", args.compile, "leave it out"),
        ("--aux_loss_coef", bool(flags.get("aux_loss_coef")), "0"),
        ("--expert_bias_update_rate", bool(flags.get("expert_bias_update_rate")), "0"),
        ("--parity_trace", bool(flags.get("parity_trace")), "leave it out"),
    ]
    for flag, used, allowed in refused:
        if used:
            raise UserError(flag, "with rows that have images", allowed)
    if args.lora_rank and not args.freeze_vision:
        raise UserError("--freeze_vision", "false with --lora_rank", "an adapter of the language model only")
    if args.vision_learning_rate and (args.freeze_vision or args.lora_rank):
        raise UserError("--vision_learning_rate", "with a frozen vision tower", "--freeze_vision false")
    if args.vision_learning_rate and args.optim == "muon":
        raise UserError("--vision_learning_rate", "with --optim muon", "another --optim")
