"""LoRA (Hu et al. 2021) by peft: low-rank matrices next to frozen linear layers, equal at the start on all layouts."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from transformers.pytorch_utils import Conv1D

from trainer.errors import UserError, one_line
from trainer.model_folders.adapter_folder import read_adapter
from trainer.model_folders.adapter_tensors import start_from
from trainer.model_parallel.expert_parallel import are_experts

# layers whose own forward pass computes what nn.Linear does: in Falcon, in 4-bit models, and with --fp8
SAME_AS_LINEAR = ("FalconLinear", "Linear4bit", "Float8Linear")
START = "--lora_adapter"
HEADS = ("score",)  # the head of a reward model is new: it is trained whole and saved with the adapter


@dataclass(frozen=True)
class LoraOptions:
    """Rank and scale (alpha / rank) of the update, dropout before it, and the layers that get it (None: all linear)."""

    rank: int
    alpha: int
    dropout: float = 0.0
    target_modules: Optional[tuple[str, ...]] = None
    experts: bool = False  # also the stacked experts of mixtures, each with matrices of its own
    dora: bool = False  # DoRA (Liu et al. 2024): also the length of each row of the weight is trained
    rslora: bool = False  # rsLoRA (Kalajdzievski 2023): the scale is alpha / square root of the rank
    start: Optional[str] = None  # the folder of an adapter to go on from: its config decides all but the dropout


def add_adapter(model, options: LoraOptions, base: str) -> None:
    """Put LoRA layers into `model`, in place, and freeze all other weights except a reward head.

    The adapter records `base` as its base model. Call this before a strategy prepares the model. The model may be on
    the meta device: `prepare` gives the adapter its values.

    Raises:
        UserError: target modules do not exist in the model, or are not linear layers inside it. Or the adapter to go on
            from does not fit.
    """
    from peft import LoraConfig, inject_adapter_in_model  # an extra, `.[lora]`, that may be absent

    if not options.start:
        _refuse_unused(options.target_modules or (), model)
    heads = [name for name, _ in model.named_children() if name in HEADS]
    layers = {
        "r": options.rank,
        "lora_alpha": options.alpha,
        "target_modules": None if options.start else list(options.target_modules or default_targets(model)),
        "target_parameters": _stacked_experts(model) if options.experts else None,
        "exclude_modules": heads or None,
        "use_dora": options.dora,
        "use_rslora": options.rslora,
    }
    if options.start:
        layers = read_adapter(options.start, START).config
        heads = sorted({*heads, *(layers.pop("modules_to_save", None) or ())})
    config = LoraConfig(
        **layers,
        lora_dropout=options.dropout,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2: weights are transposed
        task_type="SEQ_CLS" if set(heads) & set(HEADS) else "CAUSAL_LM",
        base_model_name_or_path=base,
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        if options.start:
            found = f"{options.start} does not fit: {one_line(error)}"
            raise UserError(START, found, "an adapter of this model") from None
        raise UserError("--target_modules", one_line(error), _linear_names(model)) from None
    _validate_targets(model)
    # set only after peft's injection: the head itself is trained, not a copy of it
    config.modules_to_save = heads or None
    for name, parameter in model.named_parameters():
        if not any(f".{head}." in f".{name}" for head in heads):
            continue
        if name in _tied(model):
            raise UserError(START, f"{options.start} trains {name}, which shares its weight", "another adapter")
        parameter.requires_grad_(True)
    if options.start:
        start_from(model, options.start, START)


@contextlib.contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Make `model` the base model, without dropout, inside this context.

    peft's own switch would also freeze the adapter's parameters. Sharded models do not survive that.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer  # an extra, `.[lora]`, that may be absent

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    was_training = model.training
    model.eval()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        model.train(was_training)


@contextlib.contextmanager
def fixed_model(policy, reference) -> Iterator:
    """Yield the reference model, without gradients. If `reference` is None, it is the policy with its adapter off."""
    with torch.no_grad(), contextlib.nullcontext() if reference is not None else adapter_off(policy):
        yield policy if reference is None else reference


def default_targets(model) -> list[str]:
    """The names of all linear layers between embedding and head that an adapter fits, of the text part of a model.

    A router of experts has its own forward pass. The kernels of Mamba read the weight of `out_proj`, so they would
    ignore its adapter. Layers that share a weight (Zamba) cannot be tied again behind adapters. peft takes some names
    (`gate_proj`) for the stacked experts of mixtures, also in paths. A name is the last part of the path, unless it
    would also mean another module.
    """
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    heads = {model.get_submodule(name) for name, _ in model.named_children() if name in HEADS}
    tied = _tied(model)
    mixers = {name for name, module in model.named_modules() if hasattr(module, "A_log") and hasattr(module, "D")}

    def fits(name: str, module: torch.nn.Module) -> bool:
        parent, _, leaf = name.rpartition(".")
        is_plain = type(module).forward in (torch.nn.Linear.forward, Conv1D.forward)
        is_plain = is_plain or type(module).__name__ in SAME_AS_LINEAR
        is_read_elsewhere = (leaf == "out_proj" and parent in mixers) or f"{name}.weight" in tied
        return is_plain and module not in outer and module not in heads and not is_read_elsewhere

    text = model.get_decoder() if model.config.get_text_config() is not model.config else model  # not a vision tower
    in_text = set(text.modules())
    paths = {name: module in in_text and fits(name, module) for name, module in model.named_modules() if name}
    ambiguous = {name.rpartition(".")[2] for name, is_target in paths.items() if not is_target}
    experts = {leaf for leaf in {name.rpartition(".")[2] for name in paths} if _means_experts(leaf, model)}
    targets = [name for name, is_target in paths.items() if is_target and name.rpartition(".")[2] not in experts]
    if not targets:
        raise UserError("--lora_rank", f"{type(model).__name__} has no linear layer for an adapter", "another model")
    leaves = ((name, name.rpartition(".")[2]) for name in targets)
    return sorted({name if leaf in ambiguous else leaf for name, leaf in leaves})


def _stacked_experts(model) -> list[str]:
    """The ends of the names of all tensors (experts, rows, columns). Raises UserError if there are none."""
    names = set()
    for path, module in model.named_modules():
        if are_experts(module):
            own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
            names |= {f"{path.rpartition('.')[2]}.{name}" for name in own}
    if not names:
        found = f"{type(model).__name__} has no experts that transformers stacks in one tensor"
        raise UserError("--lora_experts", found, "leave it out")
    return sorted(names)


def _tied(model) -> set[str]:
    """Names of weights that belong to several layers."""
    return {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}


def _means_experts(name: str, model) -> bool:
    """Whether peft gives the experts an adapter if `name` is a target: they had layers of that name in transformers 4."""
    from peft import LoraConfig  # an extra, `.[lora]`, that may be absent
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # a part of what transformers 5 has stacked
        return True
    return bool(config.target_parameters)


def _refuse_unused(names: tuple[str, ...], model) -> None:
    """Raise UserError for names that no module has. peft asks only that one of them has."""
    paths = [f".{path}" for path, _ in model.named_modules()]
    unused = [name for name in names if not any(path.endswith(f".{name}") for path in paths)]
    if unused := [name for name in unused if not _means_experts(name.rpartition(".")[2], model)]:
        raise UserError("--target_modules", f"no layer is named {', '.join(unused)}", _linear_names(model))


def _validate_targets(model) -> None:
    from peft.tuners.lora import LoraLayer  # an extra, `.[lora]`, that may be absent

    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if hasattr(module, "parameter_name"):  # peft's wrapper of experts
            continue
        if isinstance(module, LoraLayer) and (
            module in outer or not isinstance(module.base_layer, torch.nn.Linear | Conv1D)
        ):
            raise UserError("--target_modules", f"{name} is not a linear layer between embedding and head")
        if isinstance(module, LoraLayer) and f"{name}.weight" in _tied(model):
            raise UserError("--target_modules", f"{name} shares its weight with another layer")


def _linear_names(model) -> str:
    outer = (model.get_output_embeddings(), *(model.get_submodule(n) for n, _ in model.named_children() if n in HEADS))
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module not in outer
    }
    return ", ".join(sorted(names))
