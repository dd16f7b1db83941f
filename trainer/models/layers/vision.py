"""The vision tower of a model of images and text: what trains in it, how fast, and images in packed or split rows."""

import inspect

import torch

from trainer.errors import UserError
from trainer.metrics import full_size

PLACES = "image_places"  # an argument of the model's call, see `take_own_images`
# modules between the tower and the language model; in Qwen's models they are inside the module of the tower
PROJECTORS = ("merger", "deepstack_merger_list", "projector", "connector", "embed_vision", "aligner", "adapter")


def tower_parameters(model) -> list[str]:
    """Names of the parameters of the vision tower, without its projector.

    Raises:
        UserError: transformers does not say which module is the tower.
    """
    tower = model.get_encoder(modality="image")
    prefix = next((name for name, module in model.named_modules() if module is tower), "")
    if not prefix or tower is model:
        raise UserError("--pretrain", f"{type(model).__name__} of transformers names no vision tower", "another model")
    names = [name for name, _ in model.named_parameters() if name.startswith(f"{prefix}.")]
    return [name for name in names if not any(part in PROJECTORS for part in name[len(prefix) :].split("."))]


def freeze_tower(model) -> int:
    """Freeze the tower, in place. Returns the number of frozen parameters (elements)."""
    tower = set(tower_parameters(model))
    frozen = [parameter for name, parameter in model.named_parameters() if name in tower]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(map(full_size, frozen))


def check_tower(model, packed: bool, sp_size: int, tp_size: int) -> None:
    """Raise UserError if packed rows, split rows or tensor parallelism do not work with this model's images."""
    kind = model.config.model_type
    for flag, used, allowed in (("--packing_samples", packed, "leave it out"), ("--ring_attn_size", sp_size > 1, "1")):
        if used and _sees_images_both_ways(model):
            raise UserError(flag, f"in {kind}, a token of an image sees later ones", allowed)
    if tp_size > 1 and any(isinstance(module, torch.nn.MultiheadAttention) for module in model.modules()):
        raise UserError("--tensor_parallel_size", f"the vision tower of {kind} has torch's own attention", "1")


def _sees_images_both_ways(model) -> bool:
    text = model.config.get_text_config()
    own = getattr(text, "use_bidirectional_attention", None)
    return bool(own) or "token_type_ids" in inspect.signature(model.forward).parameters  # Gemma 3, PaliGemma


def hide_documents(model) -> None:
    """Hide the documents and the splitting of rows from the vision tower, in place. The tower packs images instead."""
    if model.config.get_text_config()._attn_implementation in ("varlen", "ring", "ulysses", "ring_package"):
        model.set_attn_implementation({"vision_config": "sdpa"})
    names = ("cu_seqlens", "cu_seqlens_host", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    model.get_encoder(modality="image").register_forward_pre_hook(
        lambda module, args, kwargs: (args, {name: kwargs[name] for name in kwargs if name not in names}),
        with_kwargs=True,
    )


def take_own_images(model) -> None:
    """Let `model` put the right embeddings at the image tokens of this rank's part of each row, in place.

    Every rank embeds all images of its rows, and keeps the embeddings of its own tokens. transformers puts the
    embeddings of all images at the image tokens that it sees, in order. The model call now needs `image_places`, (rows,
    tokens): the token's number among the image tokens of all whole rows, -1 for other tokens. Gradients of the
    embeddings are summed over the ranks, like the gradients of all weights.
    """
    held: dict[str, torch.Tensor] = {}
    inner = model.base_model

    def remember(module, args, kwargs):
        held[PLACES] = kwargs.pop(PLACES)
        return args, kwargs

    def own(features) -> torch.Tensor:
        features = features if isinstance(features, torch.Tensor) else torch.cat(list(features))  # (..., width)
        places = held[PLACES]
        return features.flatten(0, -2)[places[places >= 0]]

    inner.register_forward_pre_hook(remember, with_kwargs=True)
    if hasattr(inner, "inputs_merger"):  # Idefics3, SmolVLM: it counts the blocks of whole images

        def merge(input_ids, inputs_embeds, image_hidden_states):
            mask = (held[PLACES] >= 0)[..., None]
            return inputs_embeds.masked_scatter(mask, own(image_hidden_states).to(inputs_embeds.dtype))

        inner.inputs_merger = merge
        return
    embed = inner.get_image_features

    def own_features(*args, **kwargs):
        output = embed(*args, **kwargs)
        output.pooler_output = [own(output.pooler_output)]
        if output.get("deepstack_features") is not None:  # Qwen3-VL adds more embeddings in its first layers
            output.deepstack_features = [[own(features)] for features in output.deepstack_features]
        return output

    inner.get_image_features = own_features


def set_learning_rate(optimizer: torch.optim.Optimizer, model, lr: float) -> None:
    """Give the tower's parameters their own groups with the peak learning rate `lr`. Call it before any step."""
    named, tower = dict(model.named_parameters()), set(tower_parameters(model))
    own = {named[name] for name in tower}
    for group in list(optimizer.param_groups):
        apart = [parameter for parameter in group["params"] if parameter in own]
        group["params"] = [parameter for parameter in group["params"] if parameter not in own]
        if apart:
            optimizer.add_param_group({**group, "params": apart, "lr": lr})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
