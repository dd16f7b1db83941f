"""Tensor parallelism: which module is cut how over the tp axis. Pure helpers; `apply_tp_plan` alone touches a model.

A plan maps module patterns to style strings, `{"model.layers.*.self_attn.q_proj": "colwise", ...}`, in the words of
transformers. `resolve_tp_plan` picks one and completes it, so that it names every module that holds a parameter: what a
plan leaves out is either known to be right as a replica, or an error.

Why a replica can be right: between two blocks (attention, MLP) every tp rank holds the same full activations, and the
same full gradients of them. A norm there has the right gradient on every rank. A norm inside a block sees this rank's
heads only: its gradient is a part of a sum over tp, and it needs `replicated_with_grad_allreduce`.
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

FLAG = "--tensor_parallel_size"


class ReplicatedParallel(ParallelStyle):
    """A module that every tp rank runs on the same full input; its parameters become replicated DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def as_replica(module, inputs, mesh):
            if isinstance(inputs[0], DTensor):  # already, where it is the input of a block
                return inputs[0]
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        return distribute_module(module, device_mesh, None, as_replica, lambda module, output, mesh: output.to_local())


class BlockInput(ParallelStyle):
    """The input of a block becomes one replicated DTensor for all column-parallel layers in it.

    Backward: one reduction over tp of their summed input gradients, instead of one per layer. An input sharded over the
    sequence (--sequence_parallel) is gathered here, and its gradient reduce-scattered.
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


# style strings of transformers' plans, and those that `resolve_tp_plan` adds
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # heads stand at dimension 1 or 2; which one is all the same to a norm over the last dimension
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "replicated": ReplicatedParallel,
    "replicated_in_block": ReplicatedParallel,  # on whole sequences, even with --sequence_parallel
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
# the form of a style whose input or output lies between blocks; every other style works inside a block, on full sequences
SEQUENCE_FORMS = {
    "embedding_rowwise": "embedding_rowwise_to_sequence",
    "rowwise": "rowwise_to_sequence",
    "rowwise_split_input": "rowwise_split_input_to_sequence",
    "rowwise_rep": "rowwise_split_input_to_sequence",
    "replicated": "sequence_parallel",
    "colwise_vocab": "colwise_vocab_from_sequence",
}
# style of a layer -> styles of its own weight, of A and of B. Behind a column-parallel layer, A is a replica whose output
# every tp rank has, and B is cut as the layer. Before a row-parallel layer, A is cut as the layer and B is a replica.
LORA_STYLES = {
    "colwise": ("colwise", "replicated_in_block", "colwise"),
    "rowwise": ("rowwise", "rowwise", "replicated"),
}
COLWISE = ("colwise", "colwise_gather_output", "colwise_rep")


# --- validation of sizes


def validate_tp_sizes(config, tp: int, fsdp: int) -> None:
    """Raises UserError unless a model of this configuration can be cut over `tp` ranks, and those parts over `fsdp`.

    `tp` has to divide the query heads, the KV heads and the MLP width. The vocabulary may be cut unevenly, if `fsdp`
    divides the hidden size (see `fsdp_placement`).
    """
    text = config.get_text_config()
    sizes = {
        name: getattr(text, name)
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        if getattr(text, name, None)
    }
    fits = [n for n in range(1, min(sizes.values()) + 1) if all(size % n == 0 for size in sizes.values())]
    if tp not in fits:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(FLAG, f"{tp} does not divide every one of {found}", ", ".join(map(str, fits)))
    if text.vocab_size % tp and text.hidden_size % fsdp:
        even = [n for n in fits if text.vocab_size % n == 0]
        found = f"{tp} does not divide vocab_size {text.vocab_size}, nor {fsdp} sharding ranks hidden_size"
        raise UserError(FLAG, f"{found} {text.hidden_size}", ", ".join(map(str, even)))


def fsdp_placement(parameter: torch.Tensor) -> Shard | None:
    """The dimension that fully_shard cuts: the first (None), but the second where tp cuts the first unevenly.

    7 rows over tp 2 are 4 and 3, and over fsdp 3 then 2, 2, 0 and 1, 1, 1. A DTensor has no word for that layout: its
    strided shard takes the third fsdp rank's single row for one of tp rank 0.
    """
    if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
        return None
    return Shard(1) if parameter.ndim > 1 and parameter.shape[0] % parameter.device_mesh.size() else None


# --- plans by source


def get_hf_tp_plan(model) -> dict[str, str]:
    """The plan that the model ships, `model.tp_plan`: `_tp_plan` of its class and `base_model_tp_plan` of its config."""
    return dict(model.tp_plan)


def get_llama_tp_plan(model) -> dict[str, str]:
    """Megatron-LM's plan (Shoeybi et al. 2019): heads and MLP columns over tp, one reduction behind each block."""
    return _plan_of(model, norms=("input_layernorm", "post_attention_layernorm"))


def get_qwen_tp_plan(model) -> dict[str, str]:
    """The LLaMA plan, and Qwen3's norms over the dimensions of a head, which see local heads only."""
    return _plan_of(model, norms=("input_layernorm", "post_attention_layernorm"), head_norms=True)


def get_gemma_tp_plan(model) -> dict[str, str]:
    """The LLaMA plan with Gemma's norms before and behind each block, and Gemma3's norms of heads."""
    blocks = ("attention", "feedforward")
    norms = ("input_layernorm", *(f"{side}_{block}_layernorm" for side in ("pre", "post") for block in blocks))
    return _plan_of(model, norms=norms, head_norms=True)


def get_optimized_tp_plan(model, sequence_parallel: bool = False) -> dict[str, str]:
    """Our plan for the architecture of `model`, {} where we have none; for --sequence_parallel in that form."""
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
    """The LLaMA layout with these norms; entries for modules that the model lacks are left out."""
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
    """The complete plan of a model that is not sharded yet: the model's own, or ours, or the LLaMA layout.

    Raises:
        UserError: there is no plan, a style is unknown, or a parameter that tensor parallelism concerns is not covered.
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
    """`plan` with an entry for every module that holds parameters, and one for the input of each block.

    Head and embedding are cut over the vocabulary: full logits would be gathered otherwise, and a tied weight can be cut
    in one way only. Anything else that the plan leaves out becomes a replica where all activations are full (between
    blocks, and in blocks whose column-parallel layers gather their output). It is an error in a block that works on this
    rank's columns, or where it is a matrix of a decoder layer that other entries cut.
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
    """A complete plan of the base model, extended to the LoRA layers of `model`.

    Raises:
        UserError: the plan cuts an adapted layer in a way that its matrices cannot follow.
    """
    adapted = {_pattern(name) for name, module in model.named_modules() if hasattr(module, "base_layer")}
    result = {pattern: style for pattern, style in plan.items() if pattern not in adapted}
    for pattern in sorted(adapted):
        if plan[pattern] not in LORA_STYLES:
            raise UserError(FLAG, f"--target_modules {pattern}, which the plan treats as {plan[pattern]}", f"{FLAG} 1")
        names = ("base_layer", "lora_A.default", "lora_B.default")  # peft's; "default" is its name of the adapter
        result |= {f"{pattern}.{name}": style for name, style in zip(names, LORA_STYLES[plan[pattern]])}
    return result


def shard_sequence(plan: dict[str, str]) -> dict[str, str]:
    """The plan in the form of --sequence_parallel (Korthikanti et al. 2022): norms and residuals sharded over the sequence."""
    return {pattern: SEQUENCE_FORMS.get(style, style) for pattern, style in plan.items()}


def format_plan(plan: dict[str, str]) -> str:
    """One line per entry, for --print_tp_plan."""
    width = max(map(len, plan))
    return "\n".join(f"{pattern:<{width}}  {plan[pattern]}" for pattern in sorted(plan))


def apply_tp_plan(model, plan: dict[str, str], tp_mesh: DeviceMesh) -> None:
    """Cut `model`, which is on the meta device, over `tp_mesh`; every parameter becomes a DTensor. No communication."""
    for name, _ in list(model.named_modules()):
        style = plan.get(_pattern(name))
        if style is not None:
            parallelize_module(model.get_submodule(name), tp_mesh, STYLES[style]())
    model.tie_weights(recompute_mapping=False)  # each of two tied modules was given a parameter of its own
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not plain, f"{plain[0]} is in no module of the plan"


def _pattern(name: str) -> str:
    """model.layers.3.mlp -> model.layers.*.mlp"""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _is_within(pattern: str, blocks: set[str]) -> bool:
    return any(pattern == block or pattern.startswith(f"{block}.") for block in blocks)


def _parameters_with_owner(model) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(parameter name, pattern of the module that holds it, parameter), tied ones under their first name."""
    for name, parameter in model.named_parameters():
        yield name, _pattern(name.rpartition(".")[0]), parameter


def _has_llama_layout(model) -> bool:
    layer = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    present = {_pattern(name).rpartition("*.")[2] for name, _ in model.named_modules()}
    return set(layer) <= present
