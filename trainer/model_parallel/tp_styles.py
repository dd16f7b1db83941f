"""Styles of a tensor-parallel plan: what each style string does to a module on a mesh of torch."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from transformers.pytorch_utils import Conv1D

from trainer.distributed.gradient_collectives import SumGradients


class _Colwise(ColwiseParallel):
    """ColwiseParallel that also shards the Conv1D of GPT-2, a linear layer with a transposed weight (in, out)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Conv1D):
            return super()._apply(module, device_mesh)
        return _cut_conv1d(self, module, device_mesh, {"weight": Shard(1), "bias": Shard(0)})


class _Rowwise(RowwiseParallel):
    """RowwiseParallel for Linear, Embedding and Conv1D. `copy_output` is for layers that add to the output in place."""

    def __init__(self, *, copy_output: bool = False, **layouts):
        super().__init__(**layouts)
        self.copy_output = copy_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Conv1D):
            module = super()._apply(module, device_mesh)
            if self.copy_output:
                module.register_forward_hook(lambda module, inputs, output: output.clone())
            return module
        self.desired_input_layouts = (Shard(-1),)
        return _cut_conv1d(self, module, device_mesh, {"weight": Shard(0), "bias": Replicate()})


def _cut_conv1d(style: ParallelStyle, module: Conv1D, mesh: DeviceMesh, placements: dict) -> nn.Module:
    for name, placement in placements.items():
        parameter = module._parameters[name]
        cut = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
    prepare_input = style._prepare_input_fn
    prepare_output = style._prepare_output_fn
    module.register_forward_pre_hook(
        lambda module, inputs: prepare_input(style.input_layouts, style.desired_input_layouts, module, inputs, mesh)
    )
    module.register_forward_hook(
        lambda module, inputs, output: prepare_output(
            style.output_layouts, style.use_local_output, module, output, mesh
        )
    )
    return module


class Held(ParallelStyle):
    """The weights of a linear layer are sharded, and nothing else. With --exact, the layer has a product of its own."""

    def __init__(self, **placements):
        self.placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter.data, device_mesh, [self.placements[name]], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        return module


class Replicated(ParallelStyle):
    """Every tp rank runs the module on the same full input, or on its own part of it if `sum_gradients`.

    The parameters become replicated DTensors. While the module runs, they are plain tensors. So the module may use them
    in any way: its own kernels, convolutions, scans. `whole` includes all parameters of the modules
    inside that no other style has sharded. `sum_gradients` adds up gradients over tp: each rank saw its own heads.
    """

    def __init__(self, *, whole: bool = False, sum_gradients: bool = False):
        self.whole, self.sum_gradients = whole, sum_gradients

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        owned = []
        for owner in module.modules() if self.whole else [module]:
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    continue
                replica = DTensor.from_local(parameter.data, device_mesh, [Replicate()], run_check=False)
                owner.register_parameter(name, nn.Parameter(replica, requires_grad=parameter.requires_grad))
                owned.append((owner, name))
        group = device_mesh.get_group() if self.sum_gradients else None
        kept = []

        def use_local(module, inputs):
            kept.append([owner._parameters[name] for owner, name in owned])
            for owner, name in owned:
                owner._parameters[name] = _local(owner._parameters[name], group)

        def restore(module, inputs, output):
            for (owner, name), parameter in zip(owned, kept.pop()):
                owner._parameters[name] = parameter

        module.register_forward_pre_hook(use_local)
        # also after an exception: recomputation leaves a layer by one, as soon as its last activation is there
        module.register_forward_hook(restore, always_call=True)
        return module


def _local(parameter: DTensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    local = parameter.to_local(grad_placements=[Replicate()])
    return local if group is None else SumGradients.apply(group, local)[0]


class ReplicatedInBlock(ParallelStyle):
    """A replica inside a block. Its input may be a DTensor, as the input of the block is."""

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


# the style strings of transformers' plans, and the styles that `resolve_tp_plan` adds
STYLES: dict[str, Callable[[], ParallelStyle] | None] = {
    "colwise": _Colwise,
    "rowwise": _Rowwise,
    "colwise_gather_output": lambda: _Colwise(output_layouts=Replicate()),
    "colwise_rep": lambda: _Colwise(output_layouts=Replicate()),
    "rowwise_split_input": lambda: _Rowwise(input_layouts=Replicate()),
    "rowwise_copy_output": lambda: _Rowwise(copy_output=True),
    "rowwise_rep": lambda: _Rowwise(input_layouts=Replicate()),
    "embedding_rowwise": lambda: _Rowwise(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: Replicated(sum_gradients=True),
    "replicated": Replicated,
    "replicated_block": lambda: Replicated(whole=True),  # with all that other styles leave of the modules inside
    "experts": None,  # see `expert_parallel.shard_experts`
    "replicated_in_block": ReplicatedInBlock,  # sees whole sequences, even with --sequence_parallel
    "block_input": BlockInput,
    "held_by_columns": lambda: Held(weight=Shard(0), bias=Shard(0)),
    "held_by_rows": lambda: Held(weight=Shard(1), bias=Replicate()),
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
# --exact: styles that keep every bit, and what is left of them where `exact_products` has the product
EXACT_FORMS = {
    "colwise": "held_by_columns",
    "colwise_vocab": "held_by_columns",
    "rowwise": "held_by_rows",
    "embedding_rowwise": "embedding_rowwise",  # adds zeros
    "replicated": "replicated",
    "replicated_in_block": "replicated",  # the input of a block is a plain tensor then
    "replicated_with_grad_allreduce": "replicated",
    "block_input": None,
}
# style of a layer -> styles of its own weight, of A and of B. In a column-parallel layer, A is a replica: every tp rank
# has its output. B is sharded like the layer. In a row-parallel layer, A is sharded like the layer, B is a replica.
LORA_STYLES = {
    "colwise": ("colwise", "replicated_in_block", "colwise"),
    "colwise_gather_output": ("colwise_gather_output", "replicated_in_block", "colwise_gather_output"),
    "rowwise": ("rowwise", "rowwise", "replicated"),
    "rowwise_split_input": ("rowwise_split_input", "rowwise_split_input", "replicated"),
}
COLWISE = ("colwise", "colwise_gather_output", "colwise_rep")
