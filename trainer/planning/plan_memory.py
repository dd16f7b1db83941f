"""What a layout needs: the sizes of a model from its config, and the memory of each phase on each rank.

Weights, gradients and states come from `predicted_memory`. Activations are the tensors that the decoder layers of
transformers save for backward; a test counts them. Offloading is read from the code of FSDP2, and not measured.
"""

from dataclasses import dataclass, replace
from typing import Optional

import torch

from trainer.distributed.decoder_layers import decoder_layers
from trainer.distributed.mesh_sizes import MeshSizes
from trainer.errors import UserError
from trainer.metrics import flops_per_token
from trainer.model_parallel.expert_parallel import are_experts, validate_experts
from trainer.model_parallel.tensor_parallel import validate_tp_sizes
from trainer.model_parallel.tp_plans import heads_divide
from trainer.models.attention.choice import validate_split_model
from trainer.models.lora import default_targets
from trainer.models.losses.token_losses import GPU_CHUNK_BYTES
from trainer.planning.adapter_memory import beside_adapter_activations, predict_adapter
from trainer.planning.predicted_memory import BUFFER_BYTES, GRADS, MASTERS, MOMENTS, beside_activations, predict
from trainer.strategies.options import StrategyOptions, refuse_on_deepspeed, refuse_on_fsdp2

BF16, FP32 = 2, 4  # bytes


@dataclass(frozen=True)
class Layout:
    """One way to train. Each field is a flag, except `dp_shard`, which follows from the ranks."""

    backend: str
    stage: int
    dp_replicate: int = 1
    dp_shard: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    offload: bool = False
    checkpointing: bool = False
    reduce_once: bool = False

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the weights of their tp rank."""
        return self.dp_shard * self.sp

    @property
    def num_parts(self) -> int:
        """Ranks over which the compute weights are divided between steps. ZeRO 0 to 2 divide them over tp only."""
        return self.tp * (self.num_shards if self.backend == "fsdp2" or self.stage == 3 else 1)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model. Widths are elements per token in one layer; `mlp_width` counts the experts of a token."""

    num_params: int
    active_params: float
    expert_params: int
    largest_layer: int  # parameters of the largest decoder layer, embedding or head
    layer_experts: int  # parameters of experts in that layer
    num_layers: int
    num_heads: int
    hidden: int
    query_width: int
    key_width: int
    value_width: int
    out_width: int
    normed_width: int  # of query and key, where heads have norms of their own
    mlp_width: int
    experts_per_token: int
    vocab: int
    config: object
    tensors: tuple[int, ...]  # parameters of each tensor
    adapter_params: int = 0  # of LoRA; 0: all weights are trained
    adapter_width: int = 0  # elements per token that an adapter adds in one layer

    def flops_per_token(self, mean_length: float) -> float:
        """Without gradients of the base's weights, a third of the products with them are left out."""
        whole = flops_per_token(self.config, self.active_params, mean_length)
        return whole - 2 * self.active_params + 6 * self.adapter_params if self.adapter_params else whole


def with_adapter(s: Sizes, model: torch.nn.Module, rank: int) -> Sizes:
    """The sizes with an adapter of LoRA on the default layers: for each, `rank` rows of its input and columns of its output.

    Raises UserError if the model has no layer for one.
    """
    names = default_targets(model)
    targets = [
        module for path, module in model.named_modules() if any(f".{path}".endswith(f".{name}") for name in names)
    ]
    count = rank * sum(sum(module.weight.shape) for module in targets)
    return replace(s, adapter_params=count, adapter_width=rank * -(-len(targets) // s.num_layers))


def adapter_of_rank(s: Sizes, tp: int) -> float:
    """Parameters of the adapter on a tp rank. Of its two matrices at a layer, tp divides one."""
    return s.adapter_params * (1 + 1 / tp) / 2


def sizes_of(model: torch.nn.Module) -> Sizes:
    text = model.config.get_text_config()
    layers = list(decoder_layers(model).values())
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    counts = {module: sum(p.numel() for p in module.parameters()) for module in [*layers, *ends]}
    in_layers = {layer: _expert_params(layer) for layer in layers}
    largest, experts = max(counts, key=counts.get), sum(in_layers.values())
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    num_experts = next((p.shape[0] for m in model.modules() if are_experts(m) for p in m.parameters()), 1)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    query_dim, value_dim = getattr(text, "qk_head_dim", head_dim), getattr(text, "v_head_dim", None) or head_dim
    if hasattr(text, "qk_head_dim"):  # multi-head latent attention: keys and values of all heads exist
        kv_heads = heads
    has_head_norms = any(name.endswith("q_norm") for name, _ in model.named_modules())
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if experts:
        shared = getattr(text, "n_shared_experts", None) or 0
        width = (chosen + shared) * (getattr(text, "moe_intermediate_size", None) or width)
    return Sizes(
        num_params=num_params, active_params=num_params - experts * (1 - chosen / num_experts), expert_params=experts,
        largest_layer=counts[largest], layer_experts=in_layers.get(largest, 0), num_layers=len(layers),
        num_heads=heads, hidden=text.hidden_size, query_width=heads * query_dim, key_width=kv_heads * query_dim,
        value_width=kv_heads * value_dim, out_width=heads * value_dim,
        normed_width=(heads + kv_heads) * query_dim * has_head_norms, mlp_width=width,
        experts_per_token=chosen if experts else 0, vocab=text.vocab_size, config=model.config,
        tensors=tuple(parameter.numel() for parameter in model.parameters()),
    )  # fmt: skip


def pinned_bytes(s: Sizes, num_ranks: int) -> int:
    """Bytes of one rank's fp32 shards in torch's pinned memory, which rounds each tensor up to a power of two."""
    return sum(1 << (FP32 * -(-size // num_ranks) - 1).bit_length() for size in s.tensors)


def _expert_params(layer: torch.nn.Module) -> int:
    return sum(p.numel() for module in layer.modules() if are_experts(module) for p in module.parameters())


def saved_bytes_per_token(s: Sizes, tp: int = 1, width: int = BF16) -> float:
    """Bytes per token that one decoder layer saves for backward: a Llama layer with a fused attention kernel.

    A norm saves its input in fp32 and in the compute dtype, and its output feeds the next product. Attention saves
    query, key, value and out. The gated MLP saves gate, activation, up and their product. A frozen norm saves its input
    in fp32 only. An adapter saves its inner product, and the input of its layer as training of that layer would.
    """
    own = not s.adapter_params
    norms = 2 * (FP32 + (1 + own) * width) * s.hidden + (FP32 + own * width) * s.normed_width / tp
    attention = width * (s.query_width + s.key_width + s.value_width + s.out_width) / tp
    mlp = width * 4 * s.mlp_width / tp
    routed = width * 2 * s.experts_per_token * s.hidden  # copies of a token for its experts, there and back
    return norms + attention + mlp + routed + width * s.adapter_width


@dataclass(frozen=True)
class Activations:
    """Bytes of a micro-batch on one rank: what layers keep, what the loss adds, and what a layer adds in its backward."""

    layers: float
    loss: float
    later: float


def activations(layout: Layout, s: Sizes, tokens: int, length: int, width: int = BF16) -> Activations:
    """The activations of a micro-batch with `tokens` tokens on one rank, in samples of `length`. A number has `width` bytes.

    No fused kernel of attention is deterministic in fp32 on a GPU. So a layer keeps the weights of all pairs of tokens.
    """
    pairs = FP32 * s.num_heads / layout.tp * tokens * length / layout.sp if width == FP32 else 0.0
    saved = saved_bytes_per_token(s, layout.tp, width) * tokens + pairs
    inputs = width * s.hidden * tokens * s.num_layers  # checkpointing keeps these, and saves one layer at a time
    layers, again = (inputs, saved) if layout.checkpointing else (saved * s.num_layers, 0.0)
    gradients = 2 * width * max(s.hidden, s.mlp_width / layout.tp) * tokens + 2 * pairs  # of one layer
    logits = tokens * s.vocab / layout.tp
    if layout.tp == 1 and FP32 * logits > GPU_CHUNK_BYTES:  # in chunks; the head's gradient is summed in fp32
        loss = 3 * GPU_CHUNK_BYTES + FP32 * s.vocab * s.hidden * (not s.adapter_params)
        return Activations(layers, loss, loss + again + gradients)
    # log-probs in fp32, their gradient and that of the logits; later in bf16, while the head computes its own
    return Activations(layers, 3 * FP32 * logits, max(again + gradients, 2 * width * logits))


@dataclass(frozen=True)
class Needs:
    """Bytes on the GPU of one rank in each phase, and in host memory of one rank."""

    load: float
    step: float
    save: float
    host: float
    generate: float = 0.0  # with a rollout engine

    @property
    def gpu(self) -> float:
        return max(self.load, self.step, self.save, self.generate)


def needs(
    layout: Layout,
    s: Sizes,
    tokens: int,
    dtype: str = "bf16",
    num_frozen: int = 0,
    accumulates: bool = True,
    length: Optional[int] = None,
) -> Needs:
    """The memory of training all weights, or an adapter, with AdamW. `tokens` counts a micro-batch on one rank.

    `num_frozen` further models are sharded like the trained one. `accumulates`: a step has several micro-batches.
    `length` is that of a sample (None: the micro-batch is one sample). test/fake_gpu/memory.json has measured peaks.
    """
    p, layer = s.num_params / layout.tp, (s.largest_layer - s.layer_experts * (1 - 1 / layout.ep)) / layout.tp
    n = layout.num_shards * (1 if layout.backend == "fsdp2" else layout.dp_replicate)
    facts, width = (layout.backend, layout.stage, dtype, n), FP32 if dtype == "fp32" else BF16
    trained = adapter_of_rank(s, layout.tp) if s.adapter_params else p
    if s.adapter_params:
        found = predict_adapter(*facts, p, trained, layer)
        held, work = beside_adapter_activations(*facts, p, trained, layer, accumulates)
    else:
        found = predict(*facts, p, layer)
        held, work = beside_activations(*facts, p, layer, accumulates)
    of = activations(layout, s, tokens, length or tokens * layout.sp, width)
    one = width * p / (n if layout.backend == "fsdp2" or layout.stage == 3 else 1)
    extra = frozen = num_frozen * one
    if layout.reduce_once and layout.backend == "fsdp2":
        held += accumulates * GRADS * trained  # whole gradients until the last micro-batch
    if layout.backend == "deepspeed" and layout.dp_replicate > 1:
        extra += BF16 * p / layout.num_shards  # hpZ: a second copy of the weights, sharded within the group
    step = max(found.step, held + of.layers + max(of.loss, work + of.later)) + extra
    host = found.save - found.state  # buffers of the files that this rank writes
    if layout.backend == "deepspeed" and layout.stage < 3 and layout.tp > 1:
        host = max(host, BF16 * s.num_params)  # AutoTP shards the whole model, which was read to host memory
    if not layout.offload:
        return Needs(found.load, step, found.state + frozen, host)
    state, gathered = (MASTERS + MOMENTS + GRADS) * p / n, found.step - found.state - GRADS * p / n
    buffers = max(min(state, BUFFER_BYTES), (MASTERS + BF16) * layer)  # of checkpoints, and one tensor of the model
    if layout.backend == "fsdp2":  # weights and gradients are pinned
        pinned = pinned_bytes(s, layout.tp * n)
        state += 2 * pinned - (MASTERS + GRADS) * p / n
        buffers = max(buffers, pinned)  # gradients of a micro-batch, before they are added to the earlier ones
    gathered = max(gathered, (3 * BF16 + FP32) * layer)
    step = of.layers + max(of.loss, gathered + of.later) + extra
    return Needs(0.0, step, frozen, state + buffers)


def refusal(layout: Layout, s: Sizes, model: Optional[torch.nn.Module] = None) -> Optional[str]:
    """The line with which the trainer refuses this layout, or None. Layouts that are only slow are refused here too."""
    options = StrategyOptions(
        zero_stage=layout.stage, adam_offload=layout.offload, tensor_parallel_size=layout.tp, ring_attn_size=layout.sp,
        expert_parallel_size=layout.ep, dp_replicate_size=layout.dp_replicate, reduce_once=layout.reduce_once,
        lora_rank=1 if s.adapter_params else None,
    )  # fmt: skip
    mesh = MeshSizes(layout.dp_replicate, layout.dp_shard, layout.sp, layout.tp)
    try:
        if layout.backend == "fsdp2":
            refuse_on_fsdp2(options)
        else:
            refuse_on_deepspeed(options)
        if layout.tp > 1:
            validate_tp_sizes(s.config, layout.tp, layout.num_shards if layout.backend == "fsdp2" else 1)
            if not heads_divide(s.config, layout.tp):
                found = f"{layout.tp} does not divide the heads, so that every rank would compute all of them"
                raise UserError("--tensor_parallel_size", found, "a size that divides heads and KV heads")
        if layout.sp > 1:
            validate_split_model(s.config)
        if model is not None and (layout.ep > 1 or layout.tp > 1):
            validate_experts(model, layout.ep, mesh)
    except UserError as error:
        return str(error)
    return None
