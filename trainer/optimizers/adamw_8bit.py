"""`--optim adamw_8bit`: AdamW with 8-bit moments for large matrices, for sharded weights (DTensor).

It uses block-wise quantization (Dettmers et al. 2022, 8-bit optimizers via block-wise quantization). A block is up to
256 elements of one row of the whole matrix. Ranks that share a row agree on the largest element of each block. So every
layout rounds in the same way. The second moment is kept as its root, which has the range of the first moment.
"""

import functools

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from trainer.distributed.sharded_tensors import local_region, to_local_if_dtensor
from trainer.optimizers.adamw import adam_state, decay_groups, states_of

BLOCK = 256
MIN_ELEMENTS, MIN_COLUMNS = 4096, 64  # a smaller matrix gains too little: each maximum of a row takes 4 bytes
MOMENTS = {"exp_avg": True, "exp_avg_sq_root": False}  # moment in 8 bits -> whether it has a sign


class AdamW8bit(torch.optim.Optimizer):
    """torch's fused AdamW, one matrix at a time. Moments are decoded to fp32, updated, and encoded again."""

    def __init__(self, groups: list[dict], *, lr: float, betas: tuple[float, float], eps: float):
        """`in_8_bits` of a group says whether the moments of its parameters take 8 bits. Otherwise they are fp32."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        matrices = (p for group in self.param_groups if group["in_8_bits"] for p in group["params"])
        if not any(parameter is matrix for matrix in matrices):
            return adam_state(parameter)
        state = {"step": torch.zeros((), device=parameter.device)}
        for name in MOMENTS:
            state[f"{name}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
            state[f"{name}_max"] = _zero_maxima(parameter)  # 0 times any code is 0
        return state

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not group["in_8_bits"]:
                step_in_fp32(self, group, parameters)
                continue
            for parameter in parameters:
                _step_in_8_bits(group, parameter, states_of(self, parameter))


def step_in_fp32(optimizer: torch.optim.Optimizer, group: dict, parameters: list[torch.Tensor]) -> None:
    """Run torch's fused AdamW on parameters that have a gradient. Their state comes from `adam_state`."""
    states = [states_of(optimizer, parameter) for parameter in parameters]
    moments = ([to_local_if_dtensor(state[kind]) for state in states] for kind in ("exp_avg", "exp_avg_sq"))
    _fused_adamw(group, parameters, *moments, [state["step"] for state in states])


def _step_in_8_bits(group: dict, parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    blocks = _blocks(parameter)
    moment, root = (_decoded(state, name, blocks) for name in MOMENTS)
    _fused_adamw(group, [parameter], [moment], [root.square_()], [state["step"]])
    for name, values in zip(MOMENTS, (moment, root.sqrt_())):
        _encode(values, parameter, state, name, blocks)


def _fused_adamw(group: dict, parameters, exp_avgs, exp_avg_sqs, steps) -> None:
    """Run torch's fused AdamW on this rank's parts. The moments are this rank's parts already."""
    local = [to_local_if_dtensor(parameter) for parameter in parameters]
    grads = [to_local_if_dtensor(parameter.grad) for parameter in parameters]
    options = {key: group[key] for key in ("lr", "weight_decay", "eps")} | dict(zip(("beta1", "beta2"), group["betas"]))
    adamw(local, grads, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, maximize=False, fused=True, **options)


@functools.cache
def code_book(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 numbers that a code can mean, sorted: 0, 1 and the middles of equal parts of 7 decades up to 1.

    A decade has twice as many parts as the decade below (dynamic tree quantization, Dettmers 2016). With a sign, each
    sign has half as many."""
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64) * 10.0 ** (decade - 6)
        middles = (edges[:-1] + edges[1:]) / 2
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values.float().to(device)


def _blocks(parameter: torch.Tensor) -> torch.Tensor:
    """Return the block of each column that this rank holds, counted within a row of the whole matrix."""
    region, local = local_region(parameter), to_local_if_dtensor(parameter)
    first = 0 if region is None else region[-1].start
    return torch.arange(first, first + local.shape[-1], device=local.device) // BLOCK


def _zero_maxima(parameter: torch.Tensor) -> torch.Tensor:
    """Return a zero for each block of each row that this rank holds. The result is sharded like the rows."""
    num_blocks = -(-parameter.shape[-1] // BLOCK)
    local = to_local_if_dtensor(parameter)
    maxima = local.new_zeros((*local.shape[:-1], num_blocks), requires_grad=False)
    if not isinstance(parameter, DTensor):
        return maxima
    placements = [Replicate() if _cuts_rows(parameter, p) else p for p in parameter.placements]
    shape = torch.Size((*parameter.shape[:-1], num_blocks))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(maxima, parameter.device_mesh, placements, shape=shape, stride=stride, run_check=False)


def _cuts_rows(parameter: torch.Tensor, placement) -> bool:
    return not placement.is_replicate() and placement.dim == parameter.ndim - 1


def _decoded(state: dict, name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a moment in fp32. `blocks` are the blocks of its columns."""
    codes, maxima = to_local_if_dtensor(state[f"{name}_codes"]), to_local_if_dtensor(state[f"{name}_max"])
    values = code_book(MOMENTS[name], codes.device)[codes.int()]
    return values.mul_(maxima.index_select(-1, blocks))


def _encode(moment: torch.Tensor, parameter: torch.Tensor, state: dict, name: str, blocks: torch.Tensor) -> None:
    """Write codes and maxima of this rank's part of a moment (all-reduce, max, if a row lies on several ranks)."""
    codes, maxima = to_local_if_dtensor(state[f"{name}_codes"]), to_local_if_dtensor(state[f"{name}_max"])
    maxima.zero_().scatter_reduce_(-1, blocks.expand_as(moment), moment.abs(), "amax")
    if isinstance(parameter, DTensor):
        for number, placement in enumerate(parameter.placements):
            if _cuts_rows(parameter, placement):
                dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=parameter.device_mesh.get_group(number))
    book = code_book(MOMENTS[name], codes.device)
    shares = moment / maxima.index_select(-1, blocks).clamp(min=torch.finfo(torch.float32).tiny)
    nearest = torch.bucketize(shares, (book[:-1] + book[1:]) / 2, out_int32=True)
    if not MOMENTS[name]:  # the update is divided by this moment: a positive value must not become 0
        nearest.masked_fill_((shares > 0) & (nearest == 0), 1)
    codes.copy_(nearest)


def build_adamw_8bit(model: torch.nn.Module, *, lr: float, betas, eps: float, weight_decay: float) -> AdamW8bit:
    """Build AdamW with 8-bit moments for every large matrix except embeddings.

    Rows of embeddings have gradients of exactly 0 most of the time. Users of bitsandbytes leave them out as well."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}

    def in_8_bits(parameter: torch.Tensor) -> bool:
        is_large = parameter.ndim > 1 and parameter.numel() >= MIN_ELEMENTS and parameter.shape[-1] >= MIN_COLUMNS
        return is_large and id(parameter) not in embeddings

    groups = [
        {**group, "in_8_bits": wanted, "params": [p for p in group["params"] if in_8_bits(p) == wanted]}
        for group in decay_groups(model.named_parameters(), weight_decay)
        for wanted in (True, False)
    ]
    return AdamW8bit([group for group in groups if group["params"]], lr=lr, betas=tuple(betas), eps=eps)
