"""Expert parallelism: the experts of a layer are shared out over the ep ranks, and tokens travel to them and back.

The ep axis is folded out of fsdp (dp_shard x sp): fsdp = efsdp x ep, and ep is the inner axis. 8 fsdp ranks with ep 4
are two groups of four neighbours. Each group holds all experts, a quarter of them on each rank. Each expert is on two
ranks, and FSDP cuts it over these two. The rest of the model does not know of ep.

A token goes to the rank of each of its experts and comes back by all-to-all, as in GShard (Lepikhin et al. 2020). No
token is dropped, and nothing is padded. Routing weights are applied where the token comes from.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer.distributed.mesh import MeshSizes
from trainer.errors import UserError

FLAG = "--expert_parallel_size"


def stacked_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold all experts of a layer, each parameter stacked: (experts, ...)."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]  # transformers marks them


def validate_experts(model: nn.Module, ep: int, sizes: MeshSizes) -> None:
    """Raise UserError unless the experts of `model` can be shared out over `ep` ranks of a mesh of these sizes."""
    fsdp, kind = sizes.dp_shard * sizes.sp, type(model).__name__
    if fsdp % ep:
        fits = ", ".join(str(size) for size in range(1, fsdp + 1) if fsdp % size == 0)
        raise UserError(FLAG, f"{ep} does not divide the {fsdp} ranks that shard the weights (dp_shard x sp)", fits)
    if sizes.tp > 1:
        raise UserError(FLAG, f"{ep} with --tensor_parallel_size {sizes.tp}", "one of them")
    experts = stacked_experts(model)
    if not experts:
        raise UserError(FLAG, f"{kind} has no experts that transformers stacks in one tensor", "1")
    for parameter in (parameter for module in experts for parameter in module.parameters()):
        if parameter.shape[0] % ep:
            raise UserError(FLAG, f"{ep} does not divide the {parameter.shape[0]} experts of {kind}", "a divisor")
        local = (parameter.shape[0] // ep, *parameter.shape[1:])
        if _cut_dim(local, fsdp // ep) is None:
            found = f"{fsdp // ep} ranks cannot share an expert tensor of {kind} of shape {local}"
            raise UserError(FLAG, found, "a size that leaves a divisor of one of these numbers")


def _cut_dim(shape: tuple[int, ...], num_ranks: int) -> int | None:
    """Return the first dimension that `num_ranks` divides: few experts on many ranks are cut inside, not padded."""
    return next((dim for dim, size in enumerate(shape) if size % num_ranks == 0), None)


def expert_mesh(sizes: MeshSizes, ep: int, device_type: str) -> DeviceMesh:
    """Build the mesh (dp_replicate, efsdp, ep) of the experts. All ranks call this together."""
    return _expert_mesh(sizes, ep, device_type, dist.group.WORLD)


@functools.cache  # as in `mesh.build_meshes`
def _expert_mesh(sizes: MeshSizes, ep: int, device_type: str, world: dist.ProcessGroup) -> DeviceMesh:
    shape = (sizes.dp_replicate, sizes.dp_shard * sizes.sp // ep, ep)
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "efsdp", "ep"))


def shard_experts(model: nn.Module, mesh: DeviceMesh, fsdp_options: dict) -> None:
    """Share the experts of `model`, which is on the meta device, out over ep. FSDP cuts them over efsdp.

    `fsdp_options` are those of the other layers. Call this before the layers get their own `fully_shard`.
    """
    axes = ("dp_replicate", "efsdp") if mesh["dp_replicate"].size() > 1 else ("efsdp",)
    # the router's weights stay as precise as without ep: FSDP would round them at the door of the experts
    policy = fsdp_options["mp_policy"]
    policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    num_ranks = mesh["efsdp"].size()

    def placement(parameter: DTensor) -> Shard:
        return Shard(_cut_dim(parameter.to_local().shape, num_ranks))

    for module in stacked_experts(model):
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.data, mesh["ep"], [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        module.num_experts //= mesh["ep"].size()
        module.forward = functools.partial(_forward, module, module.forward, mesh.get_group("ep"))
        fully_shard(module, **fsdp_options | {"mesh": mesh[axes], "mp_policy": policy, "shard_placement_fn": placement})


def _forward(module, local_forward, group, hidden_states, top_k_index, top_k_weights) -> torch.Tensor:
    """Compute the experts of this rank for the tokens of all ranks of `group` (three all-to-alls).

    `hidden_states` is (tokens, hidden). `top_k_index` and `top_k_weights` are (tokens, k). Returns (tokens, hidden).
    """
    num_ranks, num_local = group.size(), module.num_experts
    experts = top_k_index.flatten()
    order = experts.argsort(stable=True)  # by expert, so also by the rank that holds it
    sent = torch.bincount(experts, minlength=num_ranks * num_local).view(num_ranks, num_local)
    received = torch.empty_like(sent)  # (rank that sends, expert of this rank): number of tokens
    dist.all_to_all_single(received, sent, group=group)
    send_sizes, receive_sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    tokens = _AllToAll.apply(hidden_states[order // top_k_index.shape[-1]], receive_sizes, send_sizes, group)
    ids = torch.arange(num_local, device=tokens.device).repeat(num_ranks).repeat_interleave(received.flatten())
    outputs = _AllToAll.apply(_local_outputs(module, local_forward, tokens, ids), send_sizes, receive_sizes, group)
    outputs = outputs[order.argsort()].unflatten(0, top_k_index.shape)  # (tokens, k, hidden)
    return (outputs * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _local_outputs(module, local_forward, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Run the experts of this rank on (n, hidden) tokens, one expert each. The parameters are plain tensors meanwhile.

    Without tokens, one row of zeros runs. So every parameter has a gradient, which FSDP reduces on all ranks.
    """
    held, num_tokens = dict(module._parameters), len(tokens)
    if not num_tokens:
        tokens, ids = F.pad(tokens, (0, 0, 0, 1)), ids.new_zeros(1)
    try:
        module._parameters.update({name: _local(parameter) for name, parameter in held.items()})
        return local_forward(tokens, ids[:, None], tokens.new_ones(len(ids), 1))[:num_tokens]
    finally:
        module._parameters.update(held)


def _local(parameter: DTensor) -> torch.Tensor:
    """Return this rank's experts. Their gradient is divided by ep.

    It is the sum over all ranks of an ep group, as each one sends its tokens. FSDP averages it over efsdp and
    dp_replicate only, where other weights get the average over all ranks.
    """
    local = parameter.to_local(grad_placements=parameter.placements)
    return _ScaleGradient.apply(local, 1 / parameter.device_mesh.size())


class _ScaleGradient(torch.autograd.Function):
    """Identity. Backward: the gradient times `factor`."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad * ctx.factor, None


class _AllToAll(torch.autograd.Function):
    """Rows for each rank of `group` for rows of each rank. Backward sends the gradients back."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, receive_sizes: list[int], send_sizes: list[int], group) -> torch.Tensor:
        ctx.sizes, ctx.group = (receive_sizes, send_sizes), group
        received = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive_sizes, send_sizes, group=group)
        return received

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        receive_sizes, send_sizes = ctx.sizes
        return _AllToAll.apply(grad, send_sizes, receive_sizes, ctx.group), None, None, None
