"""Tensor parallelism: how each module is sharded over tp. Only `apply_tp_plan` changes a model.

A plan maps module patterns to transformers' style strings, `{"model.layers.*.self_attn.q_proj": "colwise", ...}`.
`resolve_tp_plan` chooses a plan, completes it and tries it: the result names every module that holds a parameter. A
module that the first plan leaves out becomes a replica where that is known to be right. Otherwise it is an error.

A replica can be right for this reason: between two blocks (attention, MLP), every tp rank holds the same full
activations and gradients. A norm there has the right gradient on every rank. A norm inside a block sees only this
rank's heads. Its gradient is a part of a sum over tp, so it needs `replicated_with_grad_allreduce`.
"""

import copy
import re

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.errors import UserError
from trainer.metrics import counted, layer_configs
from trainer.model_parallel.expert_parallel import are_experts
from trainer.model_parallel.tp_plans import (
    OUR_PLANS,
    get_gathered_tp_plan,
    get_hf_tp_plan,
    get_llama_tp_plan,
    get_optimized_tp_plan,
    has_llama_layout,
    heads_divide,
    is_within,
    parent_of,
    paths_of,
    pattern_of,
    plans_with_all_heads,
    shard_sequence,
)
from trainer.model_parallel.tp_styles import COLWISE, EXACT_FORMS, LORA_STYLES, SEQUENCE_FORMS, STYLES

FLAG = "--tensor_parallel_size"


# --- validation of sizes


def validate_tp_sizes(config, tp: int, fsdp: int) -> None:
    """Raise UserError unless a model of this config can be sharded over `tp` ranks, and each part over `fsdp` ranks.

    `tp` must divide the MLP width. Heads that it does not divide are computed in full by every tp rank. The vocabulary
    may be sharded unevenly if `fsdp` divides the hidden size (see `fsdp_placement`).
    """
    text = config.get_text_config()
    values = [getattr(layer, "intermediate_size", None) or text.hidden_size for layer in layer_configs(text)]
    # layers may differ, also by a list (Gemma 3n); dict.fromkeys keeps the order
    sizes = list(dict.fromkeys(size for value in values for size in (value if isinstance(value, list) else [value])))
    fits = [n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
    if tp not in fits:
        name = "intermediate_size" if getattr(text, "intermediate_size", None) else "hidden_size"
        found = f"{tp} does not divide {name} {', '.join(map(str, sizes))}"
        raise UserError(FLAG, found, ", ".join(map(str, fits)))
    if text.vocab_size % tp and text.hidden_size % fsdp:
        even = [n for n in fits if text.vocab_size % n == 0]
        found = f"{tp} does not divide vocab_size {text.vocab_size}; {counted(fsdp, 'sharding rank')} do not divide hidden_size"
        raise UserError(FLAG, f"{found} {text.hidden_size}", ", ".join(map(str, even)))


def fsdp_placement(parameter: torch.Tensor) -> Shard | None:
    """Return the dimension that fully_shard shards: the first (None), or the second if tp shards the first unevenly.

    7 rows over tp 2 are 4 and 3. Over fsdp 3, these become 2, 2, 0 and 1, 1, 1. A DTensor cannot describe this layout:
    its strided shard assigns the single row of the third fsdp rank to tp rank 0.
    """
    if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
        return None
    return Shard(1) if parameter.ndim > 1 and parameter.shape[0] % parameter.device_mesh.size() else None


# --- the plan that is applied


def resolve_tp_plan(
    model, tp_mesh: DeviceMesh | None = None, *, use_hf_tp_plan: bool = False, sequence_parallel: bool = False
) -> dict[str, str]:
    """Return the complete plan of a model that is not sharded yet: ours, the model's own, or one that fits any layer.

    With `tp_mesh`, two tokens go through a copy on the meta device that is sharded by the plan. Nothing is communicated.

    Raises:
        UserError: there is no plan, a style is unknown, the plan does not cover a parameter that it must shard, or the
            layers do not work with it.
    """
    plans = [get_hf_tp_plan(model)]
    if not use_hf_tp_plan:
        plans = [get_optimized_tp_plan(model) or plans[0], get_gathered_tp_plan(model)]
        if has_llama_layout(model):
            plans.insert(1, get_llama_tp_plan(model))
    if tp_mesh is not None and not heads_divide(model.config, tp_mesh.size()):
        plans = [whole for plan in plans for whole in plans_with_all_heads(model, plan)]
    first_error = None
    for plan in (plan for plan in plans if any("*" in pattern for pattern in plan)):
        try:
            return _checked_plan(model, plan, tp_mesh, sequence_parallel)
        except UserError as error:
            first_error = first_error or error
    if first_error is None:
        flag = "--use_hf_tp_plan" if use_hf_tp_plan else FLAG
        raise UserError(flag, f"no tensor-parallel plan for {type(model).__name__}", f"{FLAG} 1")
    raise first_error


def _checked_plan(model, plan: dict[str, str], tp_mesh: DeviceMesh | None, sequence_parallel: bool) -> dict[str, str]:
    present = {pattern_of(name) for named in (model.named_modules(), model.named_parameters()) for name, _ in named}
    text = _text_part(model)
    plan = {pattern: style for pattern, style in plan.items() if pattern in present and pattern.startswith(text)}
    kind = type(model).__name__
    if not any("*" in pattern for pattern in plan):
        raise UserError(FLAG, f"no tensor-parallel plan for {kind}", f"{FLAG} 1")
    # each tp rank holds some whole experts, where transformers' plans shard all of them inside
    experts = {pattern_of(name) for name, module in model.named_modules() if are_experts(module)}
    plan = {pattern: style for pattern, style in plan.items() if not is_within(pattern, experts)}
    plan |= dict.fromkeys(experts, "experts")
    if experts and sequence_parallel:
        raise UserError("--sequence_parallel", f"with {kind}: its routers see whole sequences", "leave it out")
    for pattern, style in plan.items():
        if style not in STYLES or (style in SEQUENCE_FORMS.values() and not sequence_parallel):
            raise UserError(FLAG, f"the plan of {kind} gives {pattern} the style {style}", "1")
    plan = complete_plan(model, plan)
    if sequence_parallel:
        whole = [pattern for pattern, style in plan.items() if style == "replicated_block"]
        if whole:
            raise UserError("--sequence_parallel", f"with {kind}: every tp rank computes all of {whole[0]}")
        plan = shard_sequence(plan)
    if tp_mesh is not None:
        _try_plan(model, plan, tp_mesh, "--sequence_parallel" if sequence_parallel else FLAG)
    return plan


def _text_part(model) -> str:
    """Return the path of the language model in a model of images and text, else "". No text reaches the other parts."""
    if model.config.get_text_config() is model.config:
        return ""
    return next(pattern_of(name) for name, module in model.named_modules() if module is model.get_decoder())


def complete_plan(model, plan: dict[str, str]) -> dict[str, str]:
    """Return `plan` with an entry for every module that holds parameters, and one for the input of each block.

    Head and embedding are sharded over the vocabulary. Otherwise full logits would be gathered, and a tied weight can
    be sharded in only one way. Other missing modules become replicas where all activations are full: between blocks,
    and in blocks whose column-parallel layers gather their output. A block without an entry becomes one replica: its
    input and output are full. In a mixture of experts, routers and shared experts become replicas. A missing module is
    an error in a block that works on this rank's columns, and in experts that are not stacked.
    """
    plan = dict(plan)
    patterns = {name: pattern_of(name) for name, _ in model.named_modules()}
    names = {module: name for name, module in model.named_modules()}
    embedding, head = patterns[names[model.get_input_embeddings()]], model.get_output_embeddings()
    if head is not None:
        plan[patterns[names[head]]] = "colwise_vocab"
    if embedding not in plan or model.config.get_text_config().tie_word_embeddings:
        plan[embedding] = "embedding_rowwise"
    layers = {pattern[: pattern.index("*") + 1] for pattern in plan if "*" in pattern}
    # by name: in some models, a module of the same name is attention in one layer and a scan in another. A layer is no
    # block, although OPT has linear layers directly in it.
    cut = [(parent_of(name), plan[pattern]) for name, pattern in patterns.items() if plan.get(pattern) in COLWISE]
    split = {block for block, style in cut if style == "colwise" and patterns[block] not in layers}
    gathered = {block for block, _ in cut if patterns[block] not in layers} - split
    with_experts = {parent_of(name) for name, pattern in patterns.items() if plan.get(pattern) == "experts"}
    mixtures = {name for name in with_experts if patterns[name] not in layers}  # in Gemma 4, it is the layer itself
    whole = set()  # blocks that each tp rank computes in full
    for name, parameter in model.named_parameters():
        owner = parent_of(name)
        if patterns[owner] in plan:
            continue
        if is_within(owner, mixtures) and not is_within(owner, split | gathered):
            plan[patterns[owner]] = "replicated"
            continue
        layer = next((at for at in paths_of(owner) if patterns[at] in layers), None)
        block = ".".join(owner.split(".")[: layer.count(".") + 2]) if layer else ""
        is_of_experts = layer not in {None, *with_experts} and re.search("expert|router", name)
        if is_within(owner, split) or any(is_within(at, {block}) for at in split) or is_of_experts:
            kind = type(model).__name__
            raise UserError(FLAG, f"the tensor-parallel plan of {kind} does not cover the parameter {name}", "1")
        is_norm = parameter.ndim == 1 and owner not in gathered
        if is_norm and is_within(owner, gathered):
            plan[patterns[owner]] = "replicated_in_block"
        elif layer is None or owner == layer or (is_norm and owner == block):
            plan[patterns[owner]] = "replicated"
        else:
            whole.add(block)
    styles = dict.fromkeys(split | gathered, "block_input") | dict.fromkeys(whole, "replicated_block")
    in_whole = {patterns[name] for name in patterns if is_within(name, whole)}
    plan = {at: style for at, style in plan.items() if not (at in in_whole and style == "replicated_in_block")}
    return plan | _by_pattern(styles, patterns)


def _by_pattern(styles: dict[str, str], patterns: dict[str, str]) -> dict[str, str]:
    """Return the styles of modules by pattern if all modules of a pattern have the same style, otherwise by name."""
    of_pattern = {}
    for name, pattern in patterns.items():
        of_pattern.setdefault(pattern, set()).add(styles.get(name))
    return {patterns[at] if len(of_pattern[patterns[at]]) == 1 else at: styles[at] for at in patterns if at in styles}


def _try_plan(model, plan: dict[str, str], tp_mesh: DeviceMesh, flag: str) -> None:
    """Raise UserError unless every part is even, and two tokens go through the sharded model on the meta device."""
    kind, sharded = type(model).__name__, copy_on_meta(model)
    try:
        apply_tp_plan(sharded, plan, tp_mesh)
        _check_even(sharded, tp_mesh.size())
        forward_on_meta(sharded)
    except UserError:
        raise
    except Exception as error:  # any: the code of the model meets a part of the shape that it expects
        try:
            forward_on_meta(copy_on_meta(model))
        except Exception:  # this model does not run on the meta device at all
            return
        reason = " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])
        if "mixed torch.Tensor and DTensor" in reason:  # Gemma 4 E2B in a folder with images
            reason = "their code reads a weight of another layer, and this weight is cut"
        raise UserError(flag, f"the layers of {kind} do not work with their plan ({reason})", f"{FLAG} 1") from None


def _check_even(sharded, tp: int) -> None:
    """Raise UserError if a part is uneven. Only the vocabulary may be."""
    outer = filter(None, (sharded.get_input_embeddings(), sharded.get_output_embeddings()))
    by_vocabulary = {parameter for module in outer for parameter in module.parameters()}
    for name, parameter in sharded.named_parameters():
        if not isinstance(parameter, DTensor):  # experts
            continue
        placement = parameter.placements[0]
        if placement.is_shard() and parameter.shape[placement.dim] % tp and parameter not in by_vocabulary:
            raise UserError(FLAG, f"{tp} does not divide the {parameter.shape[placement.dim]} of {name}", f"{FLAG} 1")


def copy_on_meta(model) -> nn.Module:
    """A model like `model` without weights, on the meta device. Its experts return their input."""
    with torch.device("meta"):
        copied = type(model)(copy.deepcopy(model.config))
    copied.set_attn_implementation("eager")
    for module in filter(are_experts, copied.modules()):  # their kernels do not run on the meta device
        module.forward = lambda hidden_states, *routing: hidden_states
    return copied


def forward_on_meta(model) -> None:
    """Run two tokens, input_ids (1, 2), through a model on the meta device."""
    runs = model if model.get_output_embeddings() is not None else model.base_model
    with torch.device("meta"), _NoValues():
        input_ids = torch.zeros(1, 2, dtype=torch.long)
        runs(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False)


class _NoValues(TorchDispatchMode):
    """Answers 0 where a model asks for the value of a meta tensor, for example whether its mask hides anything."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        return function(*args, **(kwargs or {}))


def plan_with_lora(plan: dict[str, str], model: torch.nn.Module) -> dict[str, str]:
    """Extend a complete plan of the base model to the LoRA layers of `model`.

    Raises:
        UserError: the plan shards an adapted layer in a way that its matrices cannot follow.
    """
    adapted = {pattern_of(name) for name, module in model.named_modules() if hasattr(module, "base_layer")}
    result = {pattern: style for pattern, style in plan.items() if pattern not in adapted}
    for pattern in sorted(adapted & set(plan)):  # the others are in a replicated block, with all that is in them
        if plan[pattern] not in LORA_STYLES:
            raise UserError(FLAG, f"the --target_modules layer {pattern} is {plan[pattern]} in the plan", f"{FLAG} 1")
        names = ("base_layer", "lora_A.default", "lora_B.default")  # peft's names; the adapter is called "default"
        result |= {f"{pattern}.{name}": style for name, style in zip(names, LORA_STYLES[plan[pattern]])}
    return result


def exact_plan(plan: dict[str, str]) -> dict[str, str]:
    """Return what is left of a complete plan with --exact. Raises UserError for a style that does not keep every bit."""
    for pattern, style in plan.items():
        if style not in EXACT_FORMS:
            raise UserError("--exact", f"with {FLAG}: the plan gives {pattern} the style {style}", f"{FLAG} 1")
    return {pattern: EXACT_FORMS[style] for pattern, style in plan.items() if EXACT_FORMS[style]}


def split_layers(model) -> dict[str, str]:
    """Return what tp may split in the products and norms of a model: {"model.layers.0.mlp.up_proj": "columns", ...}.

    It does not depend on the size of tp. An adapter has the same dimension: B of a layer by columns, A of one by rows. Of
    models without a plan of ours, nothing is named.
    """
    if model.config.get_text_config().model_type not in OUR_PLANS:
        return {}
    plan, head = get_optimized_tp_plan(model), model.get_output_embeddings()
    kinds = {"colwise": "columns", "rowwise": "rows", "replicated_with_grad_allreduce": "heads"}
    found = {name: kinds.get(plan.get(pattern_of(name))) for name, _ in model.named_modules()}
    found |= {name: "vocabulary" for name, module in model.named_modules() if head is not None and module is head}
    named = [(name, kind) for name, kind in found.items() if kind]
    return {part: kind for name, kind in named for part in _split_parts(model.get_submodule(name), name, kind)}


def _split_parts(module: nn.Module, name: str, kind: str) -> list[str]:
    """The products of a layer, of which tp splits the same dimension: one, or with an adapter two."""
    if not hasattr(module, "base_layer"):
        return [name]
    return [f"{name}.base_layer", f"{name}.lora_{'A' if kind == 'rows' else 'B'}.default"]


def format_plan(plan: dict[str, str]) -> str:
    """Format a plan for --print_tp_plan, one line per entry."""
    width = max(map(len, plan))
    return "\n".join(f"{pattern:<{width}}  {plan[pattern]}" for pattern in sorted(plan))


def apply_tp_plan(model, plan: dict[str, str], tp_mesh: DeviceMesh) -> None:
    """Shard `model`, which is on the meta device, over `tp_mesh`. Every parameter becomes a DTensor. No communication.

    Stacked experts stay as they are: `expert_parallel.shard_experts` shards them over ep and tp.
    """
    for name, _ in reversed(list(model.named_modules())):  # a block after the modules inside it
        style = plan.get(name) or plan.get(pattern_of(name))
        if style not in (None, "experts"):
            parallelize_module(model.get_submodule(name), tp_mesh, STYLES[style]())
    model.tie_weights(recompute_mapping=False)  # now two tied modules have separate parameters
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    plain = [name for name in plain if not are_experts(model.get_submodule(parent_of(name)))]
    assert not plain, f"{plain[0]} is in no module of the plan"
