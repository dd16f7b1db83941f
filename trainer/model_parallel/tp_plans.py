"""Tensor-parallel plans of model types for which transformers has none, or one that does not cover all parameters.

They have the format of `base_model_tp_plan`: names relative to the base model, without its prefix. Blocks without an
entry, such as Mamba-2 mixers and short convolutions, are stored in full on every tp rank. `models/head_shares.py` lets
each rank compute its own heads of them.
"""

import re

from trainer.metrics import layer_configs


def _of(block: str, **styles: str) -> dict[str, str]:
    return {f"{block}.{name}": style for name, style in styles.items()}


def _heads(block: str, output: str = "o_proj") -> dict[str, str]:
    return _of(block, q_proj="colwise", k_proj="colwise", v_proj="colwise", **{output: "rowwise"})


def _gathered_heads(block: str, output: str = "o_proj") -> dict[str, str]:
    """For attention that counts all its heads: the projections are cut, and every tp rank sees all heads."""
    inputs = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise_gather_output")
    return _of(block, **inputs, **{output: "rowwise_split_input"})


def _gated_mlp(block: str) -> dict[str, str]:
    return _of(block, gate_proj="colwise", up_proj="colwise", down_proj="rowwise")


_ATTENTION = _heads("layers.*.self_attn")
_HEAD_NORMS = dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")

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
    """Return forms of `plan` in which every tp rank computes all heads of attention: weights are cut, or else whole."""
    blocks = {name for name, module in model.named_modules() if _is_attention(name, module)}
    named = [name for items in (model.named_modules(), model.named_parameters()) for name, _ in items]
    inside = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in named if _outer(name) & blocks}
    rest = {pattern: style for pattern, style in plan.items() if pattern not in inside}
    cut = {pattern: _GATHERED.get(style, style) for pattern, style in plan.items() if pattern in inside}
    return [rest | {pattern: style for pattern, style in cut.items() if style in _WHOLE_OUTSIDE}, rest]


def _is_attention(name: str, module) -> bool:
    last = name.rpartition(".")[2]
    return (("attn" in last or "attention" in last) and "linear" not in last) or hasattr(module, "q_proj")


def _outer(name: str) -> set[str]:
    """Return the names of all modules around a module or parameter, and its own."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
