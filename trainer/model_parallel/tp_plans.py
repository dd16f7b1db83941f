"""Where tensor-parallel plans come from: the model's own, ours by architecture, and one that fits any decoder layer.

A plan maps module patterns to styles of `tp_styles`, `{"model.layers.*.self_attn.q_proj": "colwise", ...}`. Blocks
without an entry, such as Mamba-2 mixers and short convolutions, are stored in full on every tp rank.
`models/layers/head_shares.py` lets each rank compute its own heads of them.
"""

import re
from collections.abc import Iterator

from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.distributed.decoder_layers import decoder_layers
from trainer.metrics import layer_configs
from trainer.model_parallel.tp_styles import SEQUENCE_FORMS


def _of(block: str, **styles: str) -> dict[str, str]:
    return {f"{block}.{name}": style for name, style in styles.items()}


def _heads(block: str, output: str = "o_proj") -> dict[str, str]:
    return _of(block, q_proj="colwise", k_proj="colwise", v_proj="colwise", **{output: "rowwise"})


def _gathered_heads(block: str, output: str = "o_proj") -> dict[str, str]:
    """For attention that counts all its heads: the projections are sharded, and every tp rank sees all heads."""
    inputs = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise_gather_output")
    return _of(block, **inputs, **{output: "rowwise_split_input"})


def _gated_mlp(block: str) -> dict[str, str]:
    return _of(block, gate_proj="colwise", up_proj="colwise", down_proj="rowwise")


_ATTENTION = _heads("layers.*.self_attn")
_HEAD_NORMS = dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")

# Plans of model types for which transformers has none, or one that does not cover all parameters. They have the format of
# `base_model_tp_plan`: names relative to the base model, without its prefix.
PLANS: dict[str, dict[str, str]] = {
    "apertus": _ATTENTION
    | _of("layers.*.self_attn", **_HEAD_NORMS)
    # xIELU has two trained numbers, and each tp rank uses them on its own columns
    | _of("layers.*.mlp", up_proj="colwise", act_fn="replicated_with_grad_allreduce", down_proj="rowwise"),
    "bamba": _ATTENTION | _gated_mlp("layers.*.feed_forward"),
    "falcon": _of("h.*.self_attention", query_key_value="colwise_gather_output", dense="rowwise_split_input")
    | _of("h.*.mlp", dense_h_to_4h="colwise", dense_4h_to_h="rowwise_copy_output"),
    "falcon_h1": _ATTENTION | _gated_mlp("layers.*.feed_forward"),
    # query, key and value are one layer, one after the other: a part of its columns is not a number of heads
    "gpt2": _of("h.*.attn", c_attn="colwise_gather_output", c_proj="rowwise_split_input")
    | _of("h.*.mlp", c_fc="colwise", c_proj="rowwise"),
    "granitemoehybrid": _ATTENTION
    | _of("layers.*.shared_mlp", input_linear="colwise_gather_output", output_linear="rowwise_split_input"),
    "lfm2": _heads("layers.*.self_attn", output="out_proj")
    | _of("layers.*.self_attn", **dict.fromkeys(("q_layernorm", "k_layernorm"), "replicated_with_grad_allreduce"))
    | _of("layers.*.feed_forward", w1="colwise", w3="colwise", w2="rowwise"),
    # this class names no base model, so the names are whole
    "llama4_text": _heads("model.layers.*.self_attn")
    | _gated_mlp("model.layers.*.feed_forward")
    | _gated_mlp("model.layers.*.feed_forward.shared_expert")
    | _of("model.layers.*.feed_forward.shared_expert", down_proj="rowwise_copy_output"),
    "nemotron": _ATTENTION | _of("layers.*.mlp", up_proj="colwise", down_proj="rowwise"),
    "nemotron_h": _heads("layers.*.mixer") | _of("layers.*.mixer", up_proj="colwise", down_proj="rowwise"),
    "opt": _gathered_heads("decoder.layers.*.self_attn", output="out_proj")
    | _of("decoder.layers.*", fc1="colwise", fc2="rowwise"),
    "stablelm": _gathered_heads("layers.*.self_attn") | _gated_mlp("layers.*.mlp"),
}


# --- models whose heads tp does not divide, such as gemma-3-1b with its single KV head

_GATHERED = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
_WHOLE_OUTSIDE = {*_GATHERED.values(), "colwise_rep", "rowwise_rep"}  # all heads are there between these layers


def heads_divide(config, tp: int) -> bool:
    """Return whether each of `tp` ranks can have its own heads and KV heads, in every layer of a model of this config."""
    kinds = ("num_attention_heads", "num_key_value_heads")
    names = (*kinds, *(f"swa_{kind}" for kind in kinds))  # MiMo's layers with windows have heads of their own
    values = [getattr(layer, name, None) or [] for name in names for layer in layer_configs(config.get_text_config())]
    return all(heads % tp == 0 for value in values for heads in (value if isinstance(value, list) else [value]))


def plans_with_all_heads(model, plan: dict[str, str]) -> list[dict[str, str]]:
    """Return forms of `plan` in which every tp rank computes all heads: attention weights are sharded, or whole."""
    blocks = {name for name, module in model.named_modules() if _is_attention(name, module)}
    named = [name for items in (model.named_modules(), model.named_parameters()) for name, _ in items]
    inside = {pattern_of(name) for name in named if is_within(name, blocks)}
    rest = {pattern: style for pattern, style in plan.items() if pattern not in inside}
    cut = {pattern: _GATHERED.get(style, style) for pattern, style in plan.items() if pattern in inside}
    return [rest | {pattern: style for pattern, style in cut.items() if style in _WHOLE_OUTSIDE}, rest]


def _is_attention(name: str, module) -> bool:
    last = name.rpartition(".")[2]
    return (("attn" in last or "attention" in last) and "linear" not in last) or hasattr(module, "q_proj")


# --- plans of a model


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


def get_optimized_tp_plan(model) -> dict[str, str]:
    """Return our plan for the architecture of `model`, or {}."""
    model_type = model.config.get_text_config().model_type
    return OUR_PLANS[model_type](model) if model_type in OUR_PLANS else _named_plan(model, PLANS.get(model_type, {}))


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
    return _named_plan(model, base)


def _named_plan(model, base: dict[str, str]) -> dict[str, str]:
    """Return a plan of the base model with its prefix, without entries for modules that the model does not have."""
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    present = {pattern_of(name) for name, _ in model.named_modules()}
    return {f"{prefix}{name}": style for name, style in base.items() if f"{prefix}{name}" in present}


def get_gathered_tp_plan(model) -> dict[str, str]:
    """Return a plan for any decoder layer: each linear layer is sharded by columns, and its output is gathered.

    So every tp rank computes all heads. Only weights and matrix products are sharded. Blocks with convolutions stay
    whole: their kernels may read the weights of their linear layers.
    """
    plan = {}
    for name, layer in decoder_layers(model).items():
        for child, block in layer.named_children():
            if all(parameter.ndim <= 2 for parameter in block.parameters()):
                linear = [at for at, module in block.named_modules() if isinstance(module, nn.Linear | Conv1D)]
                plan |= {
                    pattern_of(".".join(filter(None, (name, child, at)))): "colwise_gather_output" for at in linear
                }
    return plan


def shard_sequence(plan: dict[str, str]) -> dict[str, str]:
    """Shard norms and residuals of a plan over the sequence, for --sequence_parallel (Korthikanti et al. 2022)."""
    return {pattern: SEQUENCE_FORMS.get(style, style) for pattern, style in plan.items()}


def has_llama_layout(model) -> bool:
    """Whether the model has all layers that the LLaMA plan shards."""
    layer = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    present = {pattern_of(name).rpartition("*.")[2] for name, _ in model.named_modules()}
    return set(layer) <= present


# --- names


def pattern_of(name: str) -> str:
    """model.layers.3.mlp -> model.layers.*.mlp"""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def parent_of(name: str) -> str:
    """model.layers.3.mlp.weight -> model.layers.3.mlp"""
    return name.rpartition(".")[0]


def paths_of(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module, from the outermost, and then its own name."""
    parts = name.split(".")
    return (".".join(parts[: n + 1]) for n in range(len(parts)))


def is_within(name: str, blocks: set[str]) -> bool:
    """Whether a module or parameter is one of `blocks`, or inside one."""
    return any(name == block or name.startswith(f"{block}.") for block in blocks)
