"""Tensor parallelism: how each module is cut over the tp axis. Only `apply_tp_plan` changes a model.

A plan maps module patterns to transformers' style strings, `{"model.layers.*.self_attn.q_proj": "colwise", ...}`.
`resolve_tp_plan` chooses a plan and completes it: the result names every module that holds a parameter. A module that
the first plan leaves out becomes a replica where that is known to be right. Otherwise it is an error.

A replica can be right for this reason: between two blocks (attention, MLP), every tp rank holds the same full
activations and gradients. A norm there has the right gradient on every rank. A norm inside a block sees only this
rank's heads. Its gradient is a part of a sum over tp, so it needs `replicated_with_grad_allreduce`.
"""

import re
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from trainer.errors import UserError
from trainer.metrics import layer_configs

FLAG = "--tensor_parallel_size"


class ReplicatedParallel(ParallelStyle):
    """Every tp rank runs the module on the same full input. Its parameters become replicated DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def as_replica(module, inputs, mesh):
            if isinstance(inputs[0], DTensor):  # the input of a block is a DTensor already
                return inputs[0]
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        return distribute_module(module, device_mesh, None, as_replica, lambda module, output, mesh: output.to_local())


class BlockInput(ParallelStyle):
    """The input of a block becomes one replicated DTensor for all column-parallel layers in it.

    Backward sums their input gradients and makes one reduction over tp, instead of one per layer. An input that is
    sharded over the sequence (--sequence_parallel) is gathered here, and its gradient is reduce-scattered.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(tensor):
            if isinstance(tensor, DTensor):
                return tensor.redistribute(placements=[Replicate()])
            return DTensor.from_local(tensor, device_mesh, [Replicate()], run_check=False)

        def hook(module, args, kwargs):
            if args:
                return (replicate(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": replicate(kwargs["hidden_states"])}

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


# the style strings of transformers' plans, and the ones that `resolve_tp_plan` adds
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # heads are dimension 1 or 2; for a norm over the last dimension, both are equal
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "replicated": ReplicatedParallel,
    "replicated_in_block": ReplicatedParallel,  # sees whole sequences, even with --sequence_parallel
    "block_input": BlockInput,
    "colwise_vocab": lambda: ColwiseParallel(use_local_output=False),  # logits stay sharded over the vocabulary
    # --sequence_parallel: between blocks, activations are DTensors sharded over the sequence (dimension 1)
    "sequence_parallel": SequenceParallel,
    "embedding_rowwise_to_sequence": lambda: RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    ),
    "rowwise_to_sequence": lambda: RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "rowwise_split_input_to_sequence": lambda: RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    ),
    "colwise_vocab_from_sequence": lambda: ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}
# --sequence_parallel form of styles with input or output between blocks; all others work in blocks, on full sequences
SEQUENCE_FORMS = {
    "embedding_rowwise": "embedding_rowwise_to_sequence",
    "rowwise": "rowwise_to_sequence",
    "rowwise_split_input": "rowwise_split_input_to_sequence",
    "rowwise_rep": "rowwise_split_input_to_sequence",
    "replicated": "sequence_parallel",
    "colwise_vocab": "colwise_vocab_from_sequence",
}
# style of a layer -> styles of its own weight, of A and of B. In a column-parallel layer, A is a replica: every tp rank
# has its output. B is cut like the layer. In a row-parallel layer, A is cut like the layer and B is a replica.
LORA_STYLES = {
    "colwise": ("colwise", "replicated_in_block", "colwise"),
    "rowwise": ("rowwise", "rowwise", "replicated"),
}
COLWISE = ("colwise", "colwise_gather_output", "colwise_rep")


# --- validation of sizes


def validate_tp_sizes(config, tp: int, fsdp: int) -> None:
    """Raise UserError unless a model of this config can be cut over `tp` ranks, and each part over `fsdp` ranks.

    `tp` must divide the query heads, the KV heads and the MLP width. The vocabulary may be cut unevenly if `fsdp`
    divides the hidden size (see `fsdp_placement`).
    """
    text = config.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    # layers may differ; dict.fromkeys keeps the order of the names
    sizes = list(dict.fromkeys((n, getattr(layer, n, None)) for n in names for layer in layer_configs(text)))
    sizes = [(name, size) for name, size in sizes if size]
    fits = [n for n in range(1, min(size for _, size in sizes) + 1) if all(size % n == 0 for _, size in sizes)]
    if tp not in fits:
        found = ", ".join(f"{name} {size}" for name, size in sizes)
        raise UserError(FLAG, f"{tp} does not divide every one of {found}", ", ".join(map(str, fits)))
    if text.vocab_size % tp and text.hidden_size % fsdp:
        even = [n for n in fits if text.vocab_size % n == 0]
        found = f"{tp} does not divide vocab_size {text.vocab_size}; {fsdp} sharding ranks do not divide hidden_size"
        raise UserError(FLAG, f"{found} {text.hidden_size}", ", ".join(map(str, even)))


def fsdp_placement(parameter: torch.Tensor) -> Shard | None:
    """Return the dimension that fully_shard cuts: the first (None), or the second if tp cuts the first unevenly.

    7 rows over tp 2 are 4 and 3. Over fsdp 3, these become 2, 2, 0 and 1, 1, 1. A DTensor cannot describe this layout:
    its strided shard assigns the single row of the third fsdp rank to tp rank 0.
    """
    if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
        return None
    return Shard(1) if parameter.ndim > 1 and parameter.shape[0] % parameter.device_mesh.size() else None


# --- plans by source


def get_hf_tp_plan(model) -> dict[str, str]:
    """Return the model's own plan, `model.tp_plan`: `_tp_plan` of its class and `base_model_tp_plan` of its config."""
    return dict(model.tp_plan)


def get_llama_tp_plan(model) -> dict[str, str]:
    """Return Megatron-LM's plan (Shoeybi et al. 2019): heads and MLP columns over tp, a reduction after each block."""
    return _plan_of(model, norms=("input_layernorm", "post_attention_layernorm"))


def get_qwen_tp_plan(model) -> dict[str, str]:
    """Return the LLaMA plan with Qwen3's norms over the dimensions of a head. These norms see only local heads."""
    return _plan_of(model, norms=("input_layernorm", "post_attention_layernorm"), head_norms=True)


def get_gemma_tp_plan(model) -> dict[str, str]:
    """Return the LLaMA plan with Gemma's norms before and after each block, and Gemma3's norms of heads."""
    blocks = ("attention", "feedforward")
    norms = ("input_layernorm", *(f"{side}_{block}_layernorm" for side in ("pre", "post") for block in blocks))
    return _plan_of(model, norms=norms, head_norms=True)


def get_optimized_tp_plan(model, sequence_parallel: bool = False) -> dict[str, str]:
    """Return our plan for the architecture of `model`, or {}. `sequence_parallel` selects the form for that flag."""
    get_plan = OUR_PLANS.get(model.config.get_text_config().model_type)
    plan = get_plan(model) if get_plan else {}
    return shard_sequence(plan) if sequence_parallel else plan


OUR_PLANS = {
    "llama": get_llama_tp_plan,
    "mistral": get_llama_tp_plan,
    "qwen2": get_qwen_tp_plan,
    "qwen3": get_qwen_tp_plan,
    "gemma": get_gemma_tp_plan,
    "gemma2": get_gemma_tp_plan,
    "gemma3_text": get_gemma_tp_plan,
}


def _plan_of(model, norms: tuple[str, ...], head_norms: bool = False) -> dict[str, str]:
    """Return the LLaMA layout with these norms, without entries for modules that the model does not have."""
    layer = {f"self_attn.{name}_proj": "colwise" for name in "qkv"}
    layer |= {"self_attn.o_proj": "rowwise"}
    layer |= {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
    layer |= dict.fromkeys(norms, "replicated")
    if head_norms:
        layer |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), "replicated_with_grad_allreduce")
    base = {"embed_tokens": "embedding_rowwise", "norm": "replicated"}
    base |= {f"layers.*.{name}": style for name, style in layer.items()}
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    plan = {f"{prefix}{name}": style for name, style in base.items()} | {"lm_head": "colwise_vocab"}
    present = {_pattern(name) for name, _ in model.named_modules()}
    return {pattern: style for pattern, style in plan.items() if pattern in present}


# --- the plan that is applied


def resolve_tp_plan(model, *, use_hf_tp_plan: bool = False, sequence_parallel: bool = False) -> dict[str, str]:
    """Return the complete plan of a model that is not sharded yet: ours, the model's own, or the LLaMA layout.

    Raises:
        UserError: there is no plan, a style is unknown, or the plan does not cover a parameter that it must cut.
    """
    plan = {} if use_hf_tp_plan else get_optimized_tp_plan(model)
    plan = plan or get_hf_tp_plan(model)
    if not plan and not use_hf_tp_plan and _has_llama_layout(model):
        plan = get_llama_tp_plan(model)
    if not plan:
        flag = "--use_hf_tp_plan" if use_hf_tp_plan else FLAG
        raise UserError(flag, f"no tensor-parallel plan for {type(model).__name__}", f"{FLAG} 1")
    for pattern, style in plan.items():
        if style not in STYLES or (style in SEQUENCE_FORMS.values() and not sequence_parallel):
            raise UserError(FLAG, f"the plan of {type(model).__name__} gives {pattern} the style {style}", "1")
    plan = complete_plan(model, plan)
    return shard_sequence(plan) if sequence_parallel else plan


def complete_plan(model, plan: dict[str, str]) -> dict[str, str]:
    """Return `plan` with an entry for every module that holds parameters, and one for the input of each block.

    Head and embedding are cut over the vocabulary. Otherwise full logits would be gathered, and a tied weight can be
    cut in only one way. Other missing modules become replicas where all activations are full: between blocks, and in
    blocks whose column-parallel layers gather their output. A missing module is an error in a block that works on this
    rank's columns. A missing matrix is also an error in a decoder layer that other entries cut.
    """
    plan = dict(plan)
    patterns = {module: _pattern(name) for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None:
        plan[patterns[head]] = "colwise_vocab"
    if patterns[embedding] not in plan or model.config.get_text_config().tie_word_embeddings:
        plan[patterns[embedding]] = "embedding_rowwise"
    blocks = {pattern.rpartition(".")[0] for pattern, style in plan.items() if style in COLWISE}
    split_blocks = {pattern.rpartition(".")[0] for pattern, style in plan.items() if style == "colwise"}
    layers = {pattern.rpartition("*")[0] for pattern in plan if "*" in pattern}
    for name, pattern, parameter in _parameters_with_owner(model):
        if pattern in plan:
            continue
        in_layer = any(pattern.startswith(layer) for layer in layers)
        if _is_within(pattern, split_blocks) or (in_layer and parameter.ndim > 1):
            kind = type(model).__name__
            raise UserError(FLAG, f"the tensor-parallel plan of {kind} does not cover the parameter {name}", "1")
        plan[pattern] = "replicated_in_block" if _is_within(pattern, blocks) else "replicated"
    return plan | dict.fromkeys(blocks & set(patterns.values()), "block_input")


def plan_with_lora(plan: dict[str, str], model: torch.nn.Module) -> dict[str, str]:
    """Extend a complete plan of the base model to the LoRA layers of `model`.

    Raises:
        UserError: the plan cuts an adapted layer in a way that its matrices cannot follow.
    """
    adapted = {_pattern(name) for name, module in model.named_modules() if hasattr(module, "base_layer")}
    result = {pattern: style for pattern, style in plan.items() if pattern not in adapted}
    for pattern in sorted(adapted):
        if plan[pattern] not in LORA_STYLES:
            raise UserError(FLAG, f"the --target_modules layer {pattern} is {plan[pattern]} in the plan", f"{FLAG} 1")
        names = ("base_layer", "lora_A.default", "lora_B.default")  # peft's names; the adapter is called "default"
        result |= {f"{pattern}.{name}": style for name, style in zip(names, LORA_STYLES[plan[pattern]])}
    return result


def shard_sequence(plan: dict[str, str]) -> dict[str, str]:
    """Shard norms and residuals of a plan over the sequence, for --sequence_parallel (Korthikanti et al. 2022)."""
    return {pattern: SEQUENCE_FORMS.get(style, style) for pattern, style in plan.items()}


def format_plan(plan: dict[str, str]) -> str:
    """Format a plan for --print_tp_plan, one line per entry."""
    width = max(map(len, plan))
    return "\n".join(f"{pattern:<{width}}  {plan[pattern]}" for pattern in sorted(plan))


def apply_tp_plan(model, plan: dict[str, str], tp_mesh: DeviceMesh) -> None:
    """Cut `model`, which is on the meta device, over `tp_mesh`. Every parameter becomes a DTensor. No communication."""
    for name, _ in list(model.named_modules()):
        style = plan.get(_pattern(name))
        if style is not None:
            parallelize_module(model.get_submodule(name), tp_mesh, STYLES[style]())
    model.tie_weights(recompute_mapping=False)  # two tied modules have each got their own parameter
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not plain, f"{plain[0]} is in no module of the plan"


def _pattern(name: str) -> str:
    """model.layers.3.mlp -> model.layers.*.mlp"""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _is_within(pattern: str, blocks: set[str]) -> bool:
    return any(pattern == block or pattern.startswith(f"{block}.") for block in blocks)


def _parameters_with_owner(model) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (parameter name, pattern of its module, parameter). A tied parameter comes once, under its first name."""
    for name, parameter in model.named_parameters():
        yield name, _pattern(name.rpartition(".")[0]), parameter


def _has_llama_layout(model) -> bool:
    layer = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    present = {_pattern(name).rpartition("*.")[2] for name, _ in model.named_modules()}
    return set(layer) <= present
