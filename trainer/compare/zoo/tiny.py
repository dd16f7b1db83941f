"""A tiny random model of any architecture: the same layers and options as its config, and small sizes.

`shrink` needs no table of architectures. It knows the names that configs of transformers use for sizes.
"""

import copy
from typing import Any

VOCAB_SIZE, HIDDEN, HEADS, HEAD_DIM = 320, 32, 4, 8
# The size of each name. A value that is None, or smaller than the size here, stays.
SIZES = (
    (
        HIDDEN,
        "hidden_size d_model n_embd emb_dim embed_dim embedding_size embedding_dim word_embed_proj_dim lru_width "
        "attention_hidden_size",
    ),
    (
        64,
        "intermediate_size ffn_dim d_inner n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff dff "
        "intermediate_size_mlp dense_intermediate_size mamba_d_ssm",
    ),
    (
        24,
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size "
        "moe_shared_expert_intermediate_size prefix_dense_intermediate_size moe_latent_size",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads attention_heads decoder_attention_heads encoder_attention_heads num_heads "
        "swa_num_attention_heads linear_num_heads linear_num_value_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts num_attention_heads_per_layer",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok "
        "num_experts_per_token moe_k moe_top_k moe_topk n_group num_expert_group mamba_n_groups n_groups "
        "num_shared_experts n_shared_experts moe_num_shared_experts zero_expert_num num_global_key_value_heads",
    ),
    (
        HEAD_DIM,
        "head_dim dim_head swa_head_dim attention_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim indexer_head_dim hidden_size_per_layer_input laurel_rank router_hidden_size "
        "index_head_dim mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim mamba_headdim kv_channels "
        "sliding_window attention_window_size attention_chunk_size window_size sliding_window_size adapter_rank "
        "swa_v_head_dim gated_norm_rank mamba_n_heads mamba_num_heads",
    ),
    (
        16,
        # scores of index heads are sums of relus: with few heads, keys tie at 0, and a choice between them is arbitrary
        "index_n_heads indexer_n_heads q_lora_rank kv_lora_rank o_lora_rank global_head_dim mamba_chunk_size chunk_size "
        "block_size dim_model_base query_pre_attn_scalar index_topk",
    ),
    (4, "qk_rope_head_dim rotary_dim time_step_rank mamba_dt_rank"),
    (
        1,
        "first_k_dense_replace num_dense_layers topk_group num_expert_groups_per_token moe_layer_start_index "
        "num_nextn_predict_layers",
    ),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length"),
)
SIZE_OF = {name: size for size, names in SIZES for name in names.split()}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
BY_LAYER = ("per_layer_config",)
SHARED = "num_kv_shared_layers"
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size")
# A model with few layers has the usual scale of activations only with larger weights than 0.02.
SCALES = ("initializer_range", "init_std", "initializer_factor_std")
SCALE = 0.2


def shrink(config, vocab_size: int = VOCAB_SIZE, **overrides: Any):
    """A new config of the same class with small sizes. `config` is not changed; `overrides` are set last.

    Of layers that a list in the config describes (such as `layer_types`), the first of each kind is kept, and at least
    two. The ids of special tokens stay if the vocabulary has them.
    """
    return type(config).from_dict({**_small(config.to_dict(), vocab_size), **overrides})


def _small(values: dict, vocab_size: int) -> dict:
    small = {name: _size(name, value, values) for name, value in copy.deepcopy(values).items()}
    _keep_layers(small)
    _keep_relations(small, values)
    for name, value in small.items():
        if name in VOCABULARIES and value:
            small[name] = vocab_size
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= vocab_size:
            small[name] = 0 if name.startswith("pad") else 1
        elif name in SCALES and isinstance(value, float):
            small[name] = SCALE
        elif isinstance(value, dict) and "rope" in name:
            small[name] = _rope(value, small)
        elif isinstance(value, dict) and ("model_type" in value or name.endswith("_config")) and name not in BY_LAYER:
            inner = {key: item for key, item in value.items() if key not in ("_name_or_path", "output_attentions")}
            small[name] = _small(inner, vocab_size)
    return small


def _size(name: str, value: Any, values: dict) -> Any:
    """The small size of one value, or of each value of a list by layer."""
    size = SIZE_OF.get(name)
    if size is None or value is None or isinstance(value, (bool, str)):
        return value
    if "kv_heads" in name or "key_value_heads" in name:
        heads = values.get("num_attention_heads") or values.get("n_heads") or values.get("num_heads")
        size = HEADS if value == heads else size  # no groups of heads before: none after
    if isinstance(value, (list, tuple)):
        return [min(size, item) if isinstance(item, int) else item for item in value]
    return min(size, value) if isinstance(value, (int, float)) else value


def _keep_layers(small: dict) -> None:
    """Keep the first layer of each kind, and at least two layers, in every list and table by layer."""
    name = next((name for name in LAYERS if isinstance(small.get(name), int)), None)
    depth = small[name] if name else len(small.get("layers_block_type") or ())  # Nemotron-H counts its list
    if not depth:
        return
    numbers = [key for key, value in small.items() if _are_layer_numbers(key, value, depth)]
    lists = [k for k, v in small.items() if isinstance(v, (list, tuple)) and len(v) == depth and k not in numbers]
    tables = {key: {int(n): v for n, v in small[key].items()} for key in BY_LAYER if small.get(key)}
    first_shared = depth - (small.get(SHARED) or 0)  # the layers from here on read keys and values of earlier ones

    def kind(layer: int) -> str:
        listed, numbered = [small[key][layer] for key in lists], [layer in small[key] for key in numbers]
        return str((listed, numbered, [table.get(layer) for table in tables.values()], layer >= first_shared))

    kinds = [kind(layer) for layer in range(depth)]
    kept = sorted({kinds.index(found) for found in kinds})
    if "hybrid" in small.get("layers_block_type", ()):  # blocks that share weights: the first two
        kept = sorted({*kept, *[n for n in range(depth) if small["layers_block_type"][n] == "hybrid"][:2]})
    periods = [key for key in small if key.endswith("_layer_period")]
    least = 4 if periods else len(small.get("block_types") or ()) or 2
    kept = kept if len(kept) >= least else sorted({*kept, *range(depth)} - set(range(least, depth)) | set(kept))
    for key in lists:
        small[key] = [small[key][layer] for layer in kept]
    for key in numbers:
        small[key] = [new for new, old in enumerate(kept) if old in small[key]]
    for key, table in tables.items():
        small[key] = {new: _table_sizes(table[old]) for new, old in enumerate(kept) if old in table}
    if name:
        small[name] = len(kept)
    if small.get(SHARED):
        small[SHARED] = sum(layer >= first_shared for layer in kept)
    for key in periods:
        offset = key.replace("period", "offset")
        small[key] = min(4, small[key])
        small[offset] = min(small[key] // 2, small[offset])


def _are_layer_numbers(name: str, value: Any, depth: int) -> bool:
    """Whether a list holds numbers of layers, such as `attn_layer_indices`, and not one value for each layer."""
    if not isinstance(value, (list, tuple)) or not value or not all(type(item) is int for item in value):
        return False
    named = "layer" in name or "idx" in name or "indices" in name
    return named and list(value) == sorted(set(value)) and value[-1] < depth and (len(value) > 2 or value[-1] > 1)


def _table_sizes(values: dict) -> dict:
    """The sizes of one layer of `per_layer_config`: heads that were larger than usual stay larger."""
    return {key: 2 * HEAD_DIM if key == "head_dim" else _size(key, item, values) for key, item in values.items()}


def _keep_relations(small: dict, values: dict) -> None:
    """Set again the sizes that are computed from others."""
    if small.get("qk_rope_head_dim"):
        if values.get("head_dim") == values["qk_rope_head_dim"]:
            small["head_dim"] = small["qk_rope_head_dim"]
        if small.get("qk_head_dim"):
            small["qk_head_dim"] = small["qk_rope_head_dim"] + small["qk_nope_head_dim"]
    if values.get("attention_hidden_size") == 2 * values.get("hidden_size", 0):
        small["attention_hidden_size"], small["attention_head_dim"] = 2 * HIDDEN, 2 * HIDDEN // HEADS
    if "n_mamba_heads" in small and "mamba_headdim" in small:
        small["mamba_headdim"] = small["mamba_expand"] * HIDDEN // small["n_mamba_heads"]
    if "state_size" in small and "expand" in small and "num_heads" in small:
        small["num_heads"] = small["expand"] * HIDDEN // small["head_dim"]
    if "num_blocks" in small:
        small["num_blocks"] = small["num_hidden_layers"]


def _rope(rope: dict, small: dict) -> dict:
    """Rope parameters for the small head: lists by frequency are cut, sections keep their proportions."""
    rope = {key: _rope(value, small) if isinstance(value, dict) else value for key, value in rope.items()}
    head = small.get("qk_rope_head_dim") or small.get("head_dim") or HEAD_DIM
    share = rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1.0
    pairs = max(1, int(head * share) // 2)
    for key in ("short_factor", "long_factor"):
        if rope.get(key):
            rope[key] = rope[key][:pairs]
    if rope.get("mrope_section"):
        first = pairs - 2 * (pairs // 3)
        rope["mrope_section"] = [first, pairs // 3, pairs // 3]
    return rope


def randomize(model) -> None:
    """Move norms, biases and stored vectors away from their zeros and ones, in place. They would hide a wrong factor.

    Matrices of zeros move too: ERNIE's routers would choose between equal scores. What is not trained moves little: a
    bias that keeps an expert from all tokens would leave its router without a gradient.
    """
    import torch  # not at the top: the zoo sets the environment first

    generator = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and (tensor.ndim == 1 or not tensor.any()):
                noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                is_trained = name in parameters and parameters[name].requires_grad
                tensor.add_((0.1 if is_trained else 0.01) * noise)
