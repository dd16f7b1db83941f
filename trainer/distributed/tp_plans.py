"""Tensor-parallel plans of model types for which transformers has none, or one that does not cover all parameters.

They have the format of `base_model_tp_plan`: names relative to the base model, without its prefix. Blocks without an
entry, such as Mamba-2 mixers and short convolutions, are computed in full by every tp rank.
"""


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
    "nemotron": _ATTENTION | _of("layers.*.mlp", up_proj="colwise", down_proj="rowwise"),
    "nemotron_h": _heads("layers.*.mixer") | _of("layers.*.mixer", up_proj="colwise", down_proj="rowwise"),
    "opt": _gathered_heads("decoder.layers.*.self_attn", output="out_proj")
    | _of("decoder.layers.*", fc1="colwise", fc2="rowwise"),
    "stablelm": _gathered_heads("layers.*.self_attn") | _gated_mlp("layers.*.mlp"),
}
