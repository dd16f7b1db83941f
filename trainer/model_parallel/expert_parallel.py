"""Expert parallelism: experts are sharded over ep x tp, and an all-to-all over ep sends tokens to them.

The ep axis is a part of fsdp (dp_shard x sp): fsdp = efsdp x ep, and ep is the inner axis. 8 fsdp ranks with ep 4 are two
groups of four neighbours. Each group holds all experts, a quarter of them on each rank. Each expert is on two ranks, and
FSDP shards it over these two. The rest of the model does not know about ep.

A token goes to the rank of each of its experts and comes back by all-to-all, as in GShard (Lepikhin et al. 2020). No
token is dropped, and nothing is padded. Routing weights are applied where the token comes from.

The tp ranks have the same tokens, so no token travels between them. Each one computes some whole experts, and their
outputs are summed. Experts that are sharded inside would make narrow matrices: 768 columns over tp 8 are 96.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer.distributed.gradient_collectives import AllToAll, Sum, SumGradients
from trainer.distributed.mesh_sizes import MeshSizes, check_expert_ranks
from trainer.distributed.sharded_tensors import even_dim
from trainer.errors import UserError
from trainer.metrics import counted
from trainer.model_folders.model_folder import has_adapter

FLAG = "--expert_parallel_size"
SEE_ALL_TOKENS = {"Llama4TextExperts"}  # each expert computes all tokens, which its caller has weighted


def are_experts(module: nn.Module) -> bool:
    """Return whether `module` holds all experts of a layer, each parameter stacked: (experts, ...)."""
    return hasattr(module, "_is_expert_parallel") or _see_all_tokens(module)  # transformers marks most of them


def _see_all_tokens(module: nn.Module) -> bool:
    return any(base.__name__ in SEE_ALL_TOKENS for base in type(module).__mro__)


def validate_experts(model: nn.Module, ep: int, sizes: MeshSizes) -> None:
    """Raise UserError unless the experts of `model` can be sharded over `ep` x tp ranks of a mesh of these sizes."""
    check_expert_ranks(ep, sizes)
    fsdp, kind = sizes.dp_shard * sizes.sp, type(model).__name__
    experts = [module for module in model.modules() if are_experts(module)]
    if not experts and ep > 1:
        raise UserError(FLAG, f"{kind} has no experts that transformers stacks in one tensor", "1")
    if ep > 1 and any(map(_see_all_tokens, experts)):
        raise UserError(FLAG, f"every expert of {kind} computes all tokens", "1")
    parts = ep * sizes.tp
    flag, found = (FLAG, ep) if sizes.tp == 1 else (f"{FLAG} * --tensor_parallel_size", f"{ep} * {sizes.tp}")
    for parameter in (parameter for module in experts for parameter in module.parameters()):
        if parameter.shape[0] % parts:
            raise UserError(
                flag, f"{found} does not divide the {counted(parameter.shape[0], 'expert')} of {kind}", "a divisor"
            )
        local = (parameter.shape[0] // parts, *parameter.shape[1:])
        if even_dim(local, fsdp // ep) is None:
            found = f"{counted(fsdp // ep, 'rank')} cannot share an expert tensor of {kind} of shape {local}"
            raise UserError(flag, found, "a size that leaves a divisor of one of these numbers")


def validate_expert_widths(model: nn.Module, flag: str) -> None:
    """Raise UserError for experts that a GPU cannot multiply in half precision.

    torch._grouped_mm needs rows of a multiple of 16 bytes, which are 8 numbers. The widths are whole: tp splits them later, in `prepare`.
    """
    if getattr(model.config, "_experts_implementation", None) != "grouped_mm":
        return
    for module in filter(are_experts, model.modules()):
        for name, parameter in module.named_parameters(recurse=False):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            if len(shape) == 3 and any(width % 8 for width in shape[1:]):
                found = f"experts of {type(model).__name__} with {name} of {tuple(shape)}, in half precision"
                raise UserError(flag, found, "widths that are multiples of 8, or --param_dtype fp32")


@functools.cache  # as in `mesh.build_meshes`
def _expert_mesh(sizes: MeshSizes, ep: int, device_type: str, world: dist.ProcessGroup) -> DeviceMesh:
    shape = (sizes.dp_replicate, sizes.dp_shard * sizes.sp // ep, ep, sizes.tp)
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "efsdp", "ep", "tp"))


def shard_experts(model: nn.Module, sizes: MeshSizes, ep: int, device_type: str, fsdp_options: dict) -> None:
    """Shard the experts of `model`, which is on the meta device, over ep and tp, and with FSDP over efsdp.

    `fsdp_options` are the options of the other layers. Call this before the layers get their own `fully_shard`. All
    ranks call it together, because it makes process groups.
    """
    experts = [module for module in model.modules() if are_experts(module)]
    if not experts:
        return
    mesh = _expert_mesh(sizes, ep, device_type, dist.group.WORLD)
    # without this, FSDP would round the router's weights, which are inputs of the experts
    policy = fsdp_options["mp_policy"]
    policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)

    def placement(parameter: DTensor) -> Shard:
        return Shard(even_dim(parameter.to_local().shape, mesh["efsdp"].size()))

    options = {"mp_policy": policy, "shard_placement_fn": placement}
    options["mesh"] = mesh[("dp_replicate", "efsdp") if sizes.dp_replicate > 1 else "efsdp"]
    for module in experts:
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.data, mesh["ep", "tp"], [Shard(0), Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        module.num_experts //= ep * sizes.tp
        groups = mesh.get_group("ep"), mesh.get_group("tp")
        module.forward = forward_of_part(module, *groups)
        fully_shard(module, **fsdp_options | options)
    if has_adapter(model):
        _shard_updates(model, mesh.get_local_rank("ep") * sizes.tp + mesh.get_local_rank("tp"))


def forward_of_part(module: nn.Module, ep_group: dist.ProcessGroup | None, tp_group: dist.ProcessGroup) -> Callable:
    """Return the forward of experts for a module that holds only the experts of this ep and tp rank."""
    if _see_all_tokens(module):
        forward = functools.partial(_all_tokens_forward, module, module.forward, tp_group)
    else:
        forward = functools.partial(local_experts_forward, module, module.forward, ep_group, tp_group)
    # --compile skips experts, and so the exchange of their tokens
    return torch.compiler.disable(forward) if hasattr(module.forward, "_torchdynamo_disable") else forward


def _all_tokens_forward(module, local_forward: Callable, tp_group, hidden_states: torch.Tensor) -> torch.Tensor:
    """Compute this tp rank's experts for (experts * tokens, hidden), one copy of the tokens for each expert of the layer.

    The caller sums the outputs over the experts. So this returns the sum over all of them, followed by zeros.
    """
    num_local = module.num_experts
    copies = SumGradients.apply(tp_group, hidden_states)[0].unflatten(0, (tp_group.size() * num_local, -1))
    own = copies[tp_group.rank() * num_local :][:num_local].flatten(0, 1)
    with _plain_parameters(module):
        outputs = local_forward(own).unflatten(0, (num_local, -1))
    total = Sum.apply(outputs.sum(0), tp_group)
    return F.pad(total, (0, 0, 0, len(hidden_states) - len(total)))


def local_experts_forward(
    module,
    local_forward: Callable,
    ep_group: dist.ProcessGroup | None,
    tp_group: dist.ProcessGroup,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute the experts of this rank for the tokens of all ep ranks (three all-to-alls over ep, all-reduce over tp).

    `hidden_states` is (tokens, hidden). `top_k_index` and `top_k_weights` are (tokens, k). Returns (tokens, hidden).
    """
    ep, tp, num_local = 1 if ep_group is None else ep_group.size(), tp_group.size(), module.num_experts
    if tp > 1:  # the gradient of each tp rank comes from its own experts
        hidden_states, top_k_weights = (SumGradients.apply(tp_group, t)[0] for t in (hidden_states, top_k_weights))
    experts = top_k_index.flatten()
    # by expert, so also by the ranks that hold them: ep, then tp
    (in_order, order), numbers = experts.sort(stable=True), torch.arange(ep * tp * num_local, device=experts.device)
    bounds = torch.searchsorted(in_order, numbers, right=True)  # a GPU waits for bincount, but not for this
    sent = bounds.diff(prepend=bounds.new_zeros(1)).view(ep, tp, num_local)
    if tp > 1:  # the tokens of this tp rank come first
        order = order[(in_order // num_local % tp != tp_group.rank()).to(torch.int8).argsort(stable=True)]
    sent = sent[:, tp_group.rank()].contiguous()  # (ep rank, expert of that rank): number of tokens
    received = _exchange(sent, [1] * ep, [1] * ep, ep_group)  # (ep rank that sends, expert of this rank)
    # the one place where a layer waits for its GPU
    send_sizes, receive_sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    order = order[: sum(send_sizes)]
    tokens = _exchange(hidden_states[order // top_k_index.shape[-1]], receive_sizes, send_sizes, ep_group)
    ids = torch.arange(num_local, device=tokens.device).repeat(ep)
    ids = ids.repeat_interleave(received.flatten(), output_size=len(tokens))
    outputs = _exchange(_local_outputs(module, local_forward, tokens, ids), send_sizes, receive_sizes, ep_group)
    outputs = outputs.new_zeros(len(experts), outputs.shape[-1]).index_copy(0, order, outputs)
    result = (outputs.unflatten(0, top_k_index.shape) * top_k_weights[..., None]).sum(1)
    return (Sum.apply(result, tp_group) if tp > 1 else result).to(hidden_states.dtype)


def _exchange(rows: torch.Tensor, receive_sizes: list[int], send_sizes: list[int], group) -> torch.Tensor:
    """Send the first rows to the first rank of `group`, and so on. Return the rows that arrive (all-to-all)."""
    return rows if group is None or group.size() == 1 else AllToAll.apply(rows, group, receive_sizes, send_sizes)


def _local_outputs(module, local_forward, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Run the experts of this rank on (n, hidden) tokens, one expert each.

    Without tokens, one row of zeros runs. So every parameter has a gradient, which FSDP reduces over all ranks.
    """
    num_tokens = len(tokens)
    if not num_tokens:
        tokens, ids = F.pad(tokens, (0, 0, 0, 1)), ids.new_zeros(1)
    with _plain_parameters(module):
        return local_forward(tokens, ids[:, None], tokens.new_ones(len(ids), 1))[:num_tokens]


@contextlib.contextmanager
def _plain_parameters(module: nn.Module) -> Iterator[None]:
    held = {name: parameter for name, parameter in module._parameters.items() if isinstance(parameter, DTensor)}
    try:
        updates = vars(module).get("weight_updates", {})  # of adapters
        local = {name: _local(parameter) for name, parameter in held.items()}
        module._parameters.update(local | {name: updated(local[name]) for name, updated in updates.items()})
        yield
    finally:
        module._parameters.update(held)


def _local(parameter: DTensor) -> torch.Tensor:
    """Return this rank's experts. Their gradient is divided by ep.

    It is the sum over all ranks of an ep group, because each one sends its tokens. FSDP averages it over efsdp and
    dp_replicate only, but the gradients of other weights over all ranks.
    """
    local = parameter.to_local(grad_placements=parameter.placements)
    return _ScaleGradient.apply(local, 1 / parameter.device_mesh["ep"].size())


class _ScaleGradient(torch.autograd.Function):
    """Identity. Backward: the gradient times `factor`."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad * ctx.factor, None


# --- adapters on experts


def _shard_updates(model: nn.Module, place: int) -> None:
    """Let each rank add the update of its own experts. `place` is this rank's number among the ep x tp ranks.

    peft wraps the experts of a layer once for each adapted tensor. Its matrices hold all experts, and FSDP gathers them
    with the layer. peft's own forward pass would add whole updates to weights that FSDP has not gathered yet.
    """
    for module in model.modules():
        if hasattr(module, "parameter_name") and hasattr(module, "get_delta_factors"):
            module.forward = functools.partial(_adapted_forward, module, place)


def _adapted_forward(wrapper, place: int, *args, **kwargs) -> torch.Tensor:
    experts = wrapper.get_base_layer()
    updates = vars(experts).setdefault("weight_updates", {})
    if not wrapper.disable_adapters:
        updates[wrapper.parameter_name] = functools.partial(_updated, wrapper, place)
    try:
        return wrapper.base_layer(*args, **kwargs)
    finally:
        updates.clear()


def _updated(wrapper, place: int, weight: torch.Tensor) -> torch.Tensor:
    """W + alpha / rank * B A of the experts in `weight`, (experts here, rows, columns)."""
    *factors, scale = wrapper.get_delta_factors(wrapper.active_adapters[0])
    left, right = (factor.narrow(0, place * len(weight), len(weight)).to(weight.dtype) for factor in factors)
    with torch.autocast(weight.device.type, enabled=False):
        return torch.baddbmm(weight, left, right, alpha=scale)
