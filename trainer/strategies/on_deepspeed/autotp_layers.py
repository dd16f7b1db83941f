"""How DeepSpeed's AutoTP shards a model by a complete plan of ours.

AutoTP shards linear layers in place. It keeps the vocabulary head and a tied embedding sharded. It sums the gradients
of weights that are replicated but see only this rank's heads (Qwen3's q_norm, k_norm).
"""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from typing import ClassVar

import deepspeed
import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.layers import (
    DS_TENSOR_MODEL_PARALLEL,
    ColumnParallel,
    GatherFromTensorParallelRegion,
    LinearAllreduce,
    LinearAllreduceWithReplicatedInput,
    RowParallel,
    ScatterToTensorParallelRegion,
    TensorParallel_Layer,
    VocabParallelLinear,
    _build_param_uc_restore_meta,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

from trainer.distributed.bucketed_gather import chunk_sizes
from trainer.distributed.sharded_tensors import sharded_logits
from trainer.errors import UserError
from trainer.metrics import counted
from trainer.model_parallel.expert_parallel import are_experts, forward_of_part
from trainer.model_parallel.tp_plans import pattern_of

FLAG = "--tensor_parallel_size"
# style of a plan -> AutoTP's partition type
PARTITION_TYPES = {
    "colwise": {"partition_type": "column"},
    "colwise_gather_output": {"partition_type": "column", "gather_output": True},
    "colwise_rep": {"partition_type": "column", "gather_output": True},
    "rowwise": {"partition_type": "row"},
    "rowwise_copy_output": {"partition_type": "row"},
    "rowwise_split_input": {"partition_type": "row"},
    "rowwise_rep": {"partition_type": "row"},
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
}
# AutoTP does these without an entry: its vocab_parallel_lm_head is for the head and its tied embedding
IMPLIED = ("colwise_vocab", "embedding_rowwise", "replicated", "replicated_block", "replicated_in_block", "block_input")
IMPLIED += ("experts",)  # see `_shard_experts`


def tensor_parallel_config(plan: dict[str, str], tp_size: int) -> dict:
    """DeepSpeed's "tensor_parallel" section for a complete plan {"model.layers.*.mlp.up_proj": "colwise", ...}.

    Raises UserError for a style without a counterpart in AutoTP.
    """
    specs = []
    for pattern, style in plan.items():
        if style in IMPLIED:
            continue
        if style not in PARTITION_TYPES:
            known = ", ".join([*PARTITION_TYPES, *IMPLIED])
            raise UserError(FLAG, f"the plan gives {pattern} the style {style}", known)
        # the * in a plan is one name between dots; biases follow the weights that are sharded
        parameter = r"\.weight$" if PARTITION_TYPES[style]["partition_type"] != "skip" else r"\.[^.]+$"
        regex = re.escape(pattern).replace(r"\*", r"[^.]+") + parameter
        specs.append({"patterns": [regex], **PARTITION_TYPES[style]})
    return {
        "autotp_size": tp_size,
        "vocab_parallel_lm_head": "colwise_vocab" in plan.values(),  # a reward model has no such head
        "partition_config": {"use_default_specs": False, "layer_specs": specs},
    }


def initialize(model: torch.nn.Module, plan: dict[str, str], tp_mesh, **options) -> tuple:
    """`deepspeed.initialize` of a model that AutoTP shards by `plan`. Logits become DTensors, as the loss needs them."""
    _accept_scaled_embedding(model)
    _validate_head(model, plan)
    validate_experts(model, tp_mesh.size())
    with _our_layers(plan), _readable(model.config.get_text_config()):
        result = deepspeed.initialize(model=model, dist_init_required=False, **options)
    _return_sharded_logits(model, tp_mesh)
    return result


@contextlib.contextmanager
def _readable(config) -> Iterator[None]:
    """Let AutoTP read the number of KV heads, in this context, where it differs between layers. `_our_layers` ignores it."""
    config.allow_global_per_layer_attribute_access = True
    try:
        yield
    finally:
        del vars(config)["allow_global_per_layer_attribute_access"]


def _accept_scaled_embedding(model) -> None:
    """Make AutoTP accept a tied embedding that multiplies its output by a constant. It knows only the one of Gemma 3.

    Raises UserError for any other tied embedding with a forward pass of its own.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    own_forward = type(embedding).forward
    if head is None or head.weight is not embedding.weight or own_forward is torch.nn.Embedding.forward:
        return
    if inspect.getsource(own_forward) != inspect.getsource(Gemma3TextScaledWordEmbedding.forward):
        found = f"the tied {type(embedding).__name__}, which AutoTP does not shard"
        raise UserError(FLAG, found, "--backend fsdp2, or 1")
    embedding.__class__ = Gemma3TextScaledWordEmbedding


def _validate_head(model, plan: dict[str, str]) -> None:
    """Raises UserError for a head over the vocabulary that AutoTP would not find: it goes by the name."""
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)
    if "colwise_vocab" in plan.values() and head not in ("lm_head", "embed_out"):
        raise UserError(FLAG, f"the head is called {head}, and AutoTP finds lm_head only", "--backend fsdp2, or 1")


def validate_experts(model: torch.nn.Module, tp: int) -> None:
    """Raise UserError unless `tp` divides the experts of every layer of `model`. Its parameters may be partitioned."""
    for module in filter(are_experts, model.modules()):
        for parameter in module.parameters():
            number = getattr(parameter, "ds_shape", parameter.shape)[0]
            if number % tp:
                fits = ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
                found = f"{tp} does not divide the {counted(number, 'expert')} of {type(model).__name__}"
                raise UserError("--tensor_parallel_size", found, fits)


@contextlib.contextmanager
def _our_layers(plan: dict[str, str]) -> Iterator[None]:
    """In this context, AutoTP makes layers that it has but does not choose, layers for Conv1D, and sharded experts.

    It would also divide numbers such as `num_heads` in every module around a sharded layer. The plans are for layers
    that need no such change, and in blocks with gathered outputs it would be wrong.
    """
    names = ("_create_column_parallel_layer", "_create_row_parallel_layer", "update_mp_params")
    names += ("register_replicated_grad_hooks",)
    originals = {name: getattr(AutoTP, name) for name in names}

    def column(self, module, spec, name):
        self.tp_meta = dataclasses.replace(self.tp_meta, num_kv_heads=None)  # even parts, whatever the heads
        if isinstance(module, Conv1D):
            return ColumnConv1D(module, self.mp_group, name=name, gather_output=spec.gather_output)
        return originals["_create_column_parallel_layer"](self, module, spec, name)

    def row(self, module, spec, name):
        self.tp_meta = dataclasses.replace(self.tp_meta, num_kv_heads=None)
        style = plan.get(name) or plan[pattern_of(name)]
        splits_input = style in ("rowwise_split_input", "rowwise_rep")
        if isinstance(module, Conv1D):
            return RowConv1D(module, self.mp_group, name=name, splits_input=splits_input)
        kind = LinearAllreduceWithReplicatedInput if splits_input else LinearAllreduce
        layer = kind(module, self.mp_group, name=name, tp_meta=self.tp_meta)
        if style == "rowwise_copy_output":
            layer.register_forward_hook(lambda layer, inputs, output: output.clone())
        return layer

    def after_children(self, child, name=None):
        if are_experts(child):
            _shard_experts(self, child)

    def add_hooks(self, model):
        if any(parameter.requires_grad for parameter in model.parameters()):  # a frozen model takes no hooks
            originals["register_replicated_grad_hooks"](self, model)

    def freeze_as_dtensor(self, total_size):
        """AutoTP and DTensor split an uneven vocabulary at different places. Logits are DTensors."""
        self._partition_sizes = chunk_sizes(total_size, self.tp_world_size)
        return self._partition_sizes

    for name, ours in zip(names, (column, row, after_children, add_hooks)):
        setattr(AutoTP, name, ours)
    VocabParallelLinear._freeze_partition_sizes = freeze_as_dtensor
    try:
        yield
    finally:
        del VocabParallelLinear._freeze_partition_sizes  # the inherited one is back
        for name, original in originals.items():
            setattr(AutoTP, name, original)


def _shard_experts(autotp: AutoTP, module: torch.nn.Module) -> None:
    """Keep this tp rank's whole experts of `module`, and let it compute only these. Routers are copies.

    AutoTP leaves stacked experts whole. See `model_parallel.expert_parallel` for the mathematics.
    """
    tp, group = autotp.mp_size, autotp.mp_group
    autotp._gather_zero3_params(module)
    for parameter in module.parameters():
        shape, number = tuple(parameter.shape), parameter.shape[0] // tp
        parameter.data = parameter.data.narrow(0, group.rank() * number, number).clone()
        setattr(parameter, DS_TENSOR_MODEL_PARALLEL, True)  # DeepSpeed's gradient norm adds it up over tp
        facts = {"partition_dim": 0, "logical_shape": shape, "partition_sizes": (number,) * tp, "original_shape": shape}
        setattr(parameter, DS_AUTOTP_UC_META, _build_param_uc_restore_meta(partition_type="column", **facts))
    module.num_experts //= tp
    module.forward = forward_of_part(module, None, group)


class _Conv1DPart(TensorParallel_Layer):
    """A part of transformers' Conv1D, a linear layer with a transposed weight (in, out). `dims` are the sharded ones."""

    dims: ClassVar[dict[str, int]]

    def __init__(self, module: Conv1D, group, name: str):
        super().__init__(group, name=name)
        self.weight, self.bias, self.support_training = module.weight, module.bias, True
        self._full_shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        self._freeze_partition_sizes(self.weight.shape[self.dims["weight"]])
        self._tp_partition([self.weight, self.bias])
        for name in self.dims:
            self.config_tp_params(getattr(self, name))
        self._mark_uc_metadata()

    @torch.no_grad()
    def _tp_partition(self, params_list) -> None:
        for parameter, name in zip(params_list, ("weight", "bias")):
            if name in self.dims:
                part = parameter.split(self._partition_sizes, dim=self.dims[name])[self.tp_index]
                parameter.data = part.contiguous().clone()

    @torch.no_grad()
    def gather_params(self, params_list) -> None:
        for parameter, name in zip(params_list, ("weight", "bias")):
            if name in self.dims:
                parameter.data = self._all_gather_shards(parameter, self._partition_sizes, dim=self.dims[name])

    def _mark_uc_metadata(self) -> None:
        for name, shape in self._full_shapes.items():
            is_sharded, parameter = name in self.dims, getattr(self, name)
            self._set_param_uc_meta(
                parameter,
                partition_type="column",
                partition_dim=self.dims.get(name),
                logical_shape=shape,
                partition_sizes=self._partition_sizes if is_sharded else None,
                original_shape=shape,
                is_bias=name == "bias",
                replicated=not is_sharded,
            )


class ColumnConv1D(_Conv1DPart):
    dims: ClassVar = {"weight": 1, "bias": 0}

    def __init__(self, module: Conv1D, group, name: str, gather_output: bool):
        super().__init__(module, group, name)
        self.gather_output = gather_output

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = ColumnParallel.apply(self.mp_group, inputs) @ self.weight + self.bias
        if self.gather_output:
            output = GatherFromTensorParallelRegion.apply(self.mp_group, output, self._partition_sizes)
        return output


class RowConv1D(_Conv1DPart):
    dims: ClassVar = {"weight": 0}

    def __init__(self, module: Conv1D, group, name: str, splits_input: bool):
        super().__init__(module, group, name)
        self.splits_input = splits_input

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.splits_input:
            inputs = ScatterToTensorParallelRegion.apply(self.mp_group, inputs, self._partition_sizes, self.tp_index)
        return RowParallel.apply(self.mp_group, inputs @ self.weight, False) + self.bias


def _return_sharded_logits(model: torch.nn.Module, tp_mesh) -> None:
    """Make the vocabulary head return its part of the logits as a DTensor. The loss of tensor parallelism needs it.

    The head keeps the function as `sharded_logits`, for chunks of logits (`models/losses/policy_values.py`).
    """
    for module in model.modules():
        if isinstance(module, VocabParallelLinear):
            module.sharded_logits = functools.partial(sharded_logits, module.vocab_size, tp_mesh)
            module.register_forward_hook(lambda head, _, logits: head.sharded_logits(logits))
