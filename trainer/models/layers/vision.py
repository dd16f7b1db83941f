"""The vision tower of a model of images and text: which of its parameters train, and how fast."""

import inspect

import torch

from trainer.errors import UserError

# what stands between the tower and the language model; in Qwen's models it is inside the module of the tower
PROJECTORS = ("merger", "deepstack_merger_list", "projector", "connector", "embed_vision", "aligner", "adapter")


def tower_parameters(model) -> list[str]:
    """Names of the parameters of the vision tower, without those of its projector.

    Raises: UserError if transformers does not say which module is the tower.
    """
    tower = model.get_encoder(modality="image")
    prefix = next((name for name, module in model.named_modules() if module is tower), "")
    if not prefix or tower is model:
        raise UserError("--pretrain", f"{type(model).__name__} of transformers names no vision tower", "another model")
    names = [name for name, _ in model.named_parameters() if name.startswith(f"{prefix}.")]
    return [name for name in names if not any(part in PROJECTORS for part in name[len(prefix) :].split("."))]


def freeze_tower(model) -> int:
    """Freeze the tower, in place. Returns the number of frozen parameters (elements)."""
    from trainer.metrics import full_size

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
    """Keep the documents and the splitting of rows from the vision tower, in place. What it packs are images."""
    if model.config.get_text_config()._attn_implementation in ("varlen", "ring", "ulysses", "ring_package"):
        model.set_attn_implementation({"vision_config": "sdpa"})
    names = ("cu_seqlens", "cu_seqlens_host", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    model.get_encoder(modality="image").register_forward_pre_hook(
        lambda module, args, kwargs: (args, {name: kwargs[name] for name in kwargs if name not in names}),
        with_kwargs=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, model, lr: float) -> None:
    """Give the tower's parameters a peak learning rate of their own: groups of their own, before any step."""
    named, tower = dict(model.named_parameters()), set(tower_parameters(model))
    own = {named[name] for name in tower}
    for group in list(optimizer.param_groups):
        apart = [parameter for parameter in group["params"] if parameter in own]
        group["params"] = [parameter for parameter in group["params"] if parameter not in own]
        if apart:
            optimizer.add_param_group({**group, "params": apart, "lr": lr})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
