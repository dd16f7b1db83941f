"""What rows with images change in `train_sft`: the tokens, the micro-batches, the model, and what trains."""

import functools
from collections.abc import Callable

from trainer.errors import UserError


def tokenizer_of_images(args) -> Callable:
    """`tokenize_images` for the model of --pretrain. It has the parameters of `tokenize_sft`."""
    from trainer.datasets.image_samples import tokenize_images
    from trainer.models.model_loading import resolve_model_folder

    return functools.partial(
        tokenize_images,
        folder=resolve_model_folder(args.pretrain),
        remote_code=args.trust_remote_code,
        own_template=bool(args.tokenizer_chat_template),
    )


class ImageRun:
    """The parts of a run with images. Raises UserError for flags that do not work with images."""

    def __init__(self, args, setup, *sets):
        from transformers import AutoModelForImageTextToText

        from trainer.datasets.image_batches import ImageCollate

        with_images = [found for found in sets if found and "images" in found.column_names]
        _refuse_flags(args, bool(with_images))
        self.args, self.strategy, self.auto_class = args, setup.strategy, AutoModelForImageTextToText
        self.collate = ImageCollate(with_images[0].processor, packed=args.packing_samples)

    def use(self, model) -> None:
        """Freeze what does not train, say so, and let the micro-batches know the model."""
        from trainer.models.vision_tower import check_tower, freeze_tower, hide_documents

        check_tower(model, self.args.packing_samples, self.args.tensor_parallel_size)
        if self.args.packing_samples:
            hide_documents(model)
        self.collate.use(model)
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


def refuse_images(rows, flag: str) -> None:
    """Raise UserError if a row has an image."""
    from trainer.datasets.image_samples import rows_with_images

    if numbers := rows_with_images(rows):
        raise UserError(f"{flag} row {numbers[0]}", "it has images", "rows without images; train_sft takes images")


def _refuse_flags(args, any_images: bool) -> None:
    if not any_images:
        flag = "--vision_learning_rate" if args.freeze_vision else "--freeze_vision"
        raise UserError(flag, "would do nothing here: no row has an image", "rows with images, or leave it out")
    refused = [
        ("--ring_attn_size", args.ring_attn_size > 1, "1"),
        ("--sequence_parallel", args.sequence_parallel, "leave it out"),
        ("--expert_parallel_size", args.expert_parallel_size > 1, "1"),
        ("--load_in_4bit", args.load_in_4bit, "leave it out"),
        ("--compile", args.compile, "leave it out"),
        ("--aux_loss_coef", bool(args.aux_loss_coef), "0"),
        ("--expert_bias_update_rate", bool(args.expert_bias_update_rate), "0"),
        ("--parity_trace", bool(args.parity_trace), "leave it out"),
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
