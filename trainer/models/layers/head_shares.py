"""Mixers whose heads are sharded over ranks: linear attention, Mamba 2, short convolutions.

Each rank computes its own heads for all tokens, from its own slices of the weights. The results of the ranks are parts
of a sum, because the output layer adds up over heads. The storage of the weights does not change: FSDP2, ZeRO and the
tensor-parallel plan keep them as before, and a mixer slices them while it computes. So checkpoints and optimizers do not
change either.

A table per mixer holds the places of the heads in each weight. Every rank computes the whole mixer where the table does
not fit: heads that the ranks do not divide, adapters in the mixer, quantized weights, and generation with a cache.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from trainer.distributed.gradient_collectives import Gather, Sum, SumGradients

Sections = list[tuple[int, int]]  # (size, number of equal parts) of each stretch of a dimension; a rank takes one part


class Table(NamedTuple):
    """The places of the heads in the weights of a mixer, for one number of ranks."""

    cuts: dict[str, Sections]  # of the output rows of a layer, or of the input columns of `out_proj`
    sizes: dict[str, int]  # attributes of the mixer that count its heads
    whole: tuple[str, ...] = ()  # parameters that all heads use
    wide_norm: bool = False  # the gated norm is over the heads of all ranks


# --- the tables. Each function returns None if the number of ranks does not divide the heads.


def _gated_delta_net(mixer, ranks: int) -> Optional[Table]:
    if mixer.num_k_heads % ranks or mixer.num_v_heads % ranks:
        return None
    keys, values, heads = ((size, ranks) for size in (mixer.key_dim, mixer.value_dim, mixer.num_v_heads))
    cuts = {"in_proj_qkv": [keys, keys, values], "in_proj_z": [values], "in_proj_b": [heads], "in_proj_a": [heads]}
    # Qwen3-Next sorts these two by key head
    cuts |= {"in_proj_qkvz": [(2 * mixer.key_dim + 2 * mixer.value_dim, ranks)]}
    cuts |= {"in_proj_ba": [(2 * mixer.num_v_heads, ranks)]}
    cuts |= {"conv1d": [keys, keys, values], "A_log": [heads], "dt_bias": [heads], "out_proj": [values]}
    counts = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
    return Table(cuts, {name: getattr(mixer, name) // ranks for name in counts}, whole=("norm.weight",))


def _mamba_2(mixer, ranks: int) -> Optional[Table]:
    """B and C belong to groups of heads. With fewer groups than ranks, several ranks compute the same B and C."""
    groups = mixer.n_groups
    norm_groups = _norm_groups(mixer)
    is_wide = norm_groups == 1 and not getattr(mixer.norm, "norm_before_gate", False)
    if mixer.num_heads % ranks or (groups % ranks and ranks % groups) or (norm_groups % ranks and not is_wide):
        return None
    parts = min(groups, ranks)
    inner, heads = (mixer.intermediate_size, ranks), (mixer.num_heads, ranks)
    state = (groups * mixer.ssm_state_size, parts)
    cuts = {"in_proj": [inner, inner, state, state, heads], "conv1d": [inner, state, state], "norm": [inner]}
    cuts |= {key: [heads] for key in ("A_log", "dt_bias", "D")} | {"out_proj": [inner]}
    sizes = {name: getattr(mixer, name) // ranks for name in ("num_heads", "intermediate_size")}
    sizes |= {"n_groups": groups // parts, "conv_dim": inner[0] // ranks + 2 * state[0] // parts}
    return Table(cuts, sizes, wide_norm=is_wide and norm_groups % ranks != 0)


def _norm_groups(mixer) -> int:
    """Return the number of groups of channels in the gated norm of a Mamba-2 mixer."""
    if not list(mixer.norm.parameters()):
        return mixer.num_heads  # there is no norm
    if hasattr(mixer.norm, "group_size"):
        return mixer.intermediate_size // mixer.norm.group_size
    return getattr(mixer.norm, "n_groups", 1)


def _short_convolution(mixer, ranks: int) -> Optional[Table]:
    channels = (mixer.in_proj.out_features // 3, ranks)
    if channels[0] % ranks:
        return None
    return Table({"in_proj": [channels] * 3, "conv": [channels], "out_proj": [channels]}, {})


TABLES = {
    "BambaMixer": _mamba_2,
    "FalconH1Mixer": _mamba_2,
    "GraniteMoeHybridMambaLayer": _mamba_2,
    "Lfm2MoeShortConv": _short_convolution,
    "Lfm2ShortConv": _short_convolution,
    "Mamba2Mixer": _mamba_2,
    "NemotronHMamba2Mixer": _mamba_2,
    "Qwen3NextGatedDeltaNet": _gated_delta_net,
    "Qwen3_5GatedDeltaNet": _gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta_net,
    "Zamba2MambaMixer": _mamba_2,
}


def own_part(tensor: torch.Tensor, dim: int, sections: Sections, rank: int, ranks: int) -> torch.Tensor:
    """Return a copy of the part of each section of `dim` that belongs to `rank`.

    Rank 1 of 2 takes [1 3 4] of [0 1 2 3 4] with sections (2, 2), (2, 2), (1, 1).
    """
    pieces = []
    for section, (_, parts) in zip(tensor.split([size for size, _ in sections], dim), sections):
        pieces.append(section.chunk(parts, dim)[rank * parts // ranks])
    return torch.cat(pieces, dim)


# --- a mixer with the heads of one rank


class OwnHeads:
    """The heads of `mixer` that this rank computes. Create it before a strategy wraps the model.

    Heads are sharded over both groups if the product of their sizes divides them, otherwise over one group. `tp` and
    `sp` are the groups that shard. Both are None if every rank computes the whole mixer.
    """

    def __init__(self, mixer, tp_group: Optional[dist.ProcessGroup], sp_group: Optional[dist.ProcessGroup]):
        tp, sp = shared_over(mixer, _size(tp_group), _size(sp_group))
        self.tp, self.sp = tp_group if tp > 1 else None, sp_group if sp > 1 else None
        self.mixer, self.ranks, self.rank = mixer, tp * sp, _rank(self.tp) * sp + _rank(self.sp)
        self.table = find_table(mixer, self.ranks) if self.ranks > 1 else None
        self.shapes = {name: _full_shape(parameter) for name, parameter in mixer.named_parameters()}
        self.own = _without_hooks(mixer)
        if self.table:
            vars(self.own).update(self.table.sizes)
            if getattr(self.own, "norm", None) is not None and hasattr(self.own.norm, "n_groups"):
                self.own.norm.n_groups = max(1, self.own.norm.n_groups // self.ranks)
            if self.table.wide_norm:
                groups = [group for group in (self.tp, self.sp) if group is not None]
                self.own.norm.forward = functools.partial(_wide_norm, self.own.norm, mixer.intermediate_size, groups)

    @contextlib.contextmanager
    def taken(self, caches: bool) -> Iterator[Optional[torch.nn.Module]]:
        """Yield the mixer with this rank's slices of the weights, or None: compute the whole mixer.

        `caches`: this call uses the states of a generation, so it gives None.
        """
        wholes = None if self.table is None or caches else self._whole_parameters()
        if wholes is None:
            yield None
            return
        try:
            for name, tensor in wholes.items():
                self._put(name, self._slice(name, tensor))
            for name, buffer in self.mixer.named_buffers():
                part = own_part(buffer, buffer.ndim - 1, self.table.cuts["in_proj"], self.rank, self.ranks)
                _owner(self.own, name)._buffers[name.rpartition(".")[2]] = part
            self.own.train(self.mixer.training)
            if self.table.wide_norm:
                self.own.training = False  # kernels that fuse a whole mixer would norm only our heads
            yield self.own
        finally:
            for name in wholes:
                self._put(name, None)

    def _whole_parameters(self) -> Optional[dict[str, torch.Tensor]]:
        """Return each parameter of the mixer whole, with gradients that sum over tp. None if one is unknown."""
        found = dict(self.mixer.named_parameters())
        if set(found) != set(self.shapes):
            return None
        wholes, parts = {}, {}
        for name, tensor in found.items():
            if isinstance(tensor, DTensor):
                if self.tp is None or tuple(tensor.placements) != (Shard(0),):
                    return None
                tensor = tensor.to_local()
            if tensor.shape == self.shapes[name]:
                wholes[name] = tensor
            elif self.tp and (self.tp.size() * len(tensor), *tensor.shape[1:]) == self.shapes[name]:
                parts[name] = tensor  # a plan has sharded its rows over tp
            else:
                return None
        if self.tp:
            wholes = dict(zip(wholes, SumGradients.apply(self.tp, *wholes.values())))
        return wholes | {name: Gather.apply(part, self.tp) for name, part in parts.items()}

    def _slice(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in self.table.whole:
            return tensor
        if name == "out_proj.bias":  # the sum over ranks must contain it once
            return tensor * float(self.rank == 0)
        return own_part(tensor, *_where(name, self.table), self.rank, self.ranks)

    def _put(self, name: str, tensor: Optional[torch.Tensor]) -> None:
        _owner(self.own, name)._parameters[name.rpartition(".")[2]] = tensor


def shared_over(mixer, tp: int, sp: int) -> tuple[int, int]:
    """Return over how many ranks of tp and of sp the heads of a mixer are sharded: both axes, one axis, or (1, 1)."""
    ways = [(tp, sp), (tp, 1), (1, sp)]
    return next((way for way in ways if math.prod(way) > 1 and find_table(mixer, math.prod(way))), (1, 1))


def find_table(mixer, ranks: int) -> Optional[Table]:
    """Return the places of a mixer's heads if it can be sharded over `ranks`. The table must cover every parameter."""
    make = TABLES.get(type(mixer).__name__)
    table = make(mixer, ranks) if make else None
    for name, parameter in mixer.named_parameters() if table else ():
        if name in table.whole or name == "out_proj.bias":
            continue
        dim, sections = _where(name, table)
        if sum(size for size, _ in sections) != _full_shape(parameter)[dim]:
            return None
    return table


def _where(name: str, table: Table) -> tuple[int, Sections]:
    return int(name == "out_proj.weight"), table.cuts.get(name.partition(".")[0], [])


def _full_shape(parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO 3 leaves an empty tensor


def _size(group) -> int:
    return group.size() if group is not None else 1


def _rank(group) -> int:
    return group.rank() if group is not None else 0


def _owner(module: torch.nn.Module, name: str) -> torch.nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _without_hooks(module: torch.nn.Module) -> torch.nn.Module:
    """Return the same module without hooks, parameters and buffers. Each call puts tensors in."""
    bare = type(module).__new__(type(module))
    torch.nn.Module.__init__(bare)
    vars(bare).update({name: value for name, value in vars(module).items() if name not in vars(bare)})
    bare._parameters.update(dict.fromkeys(module._parameters))
    bare._buffers.update(dict.fromkeys(module._buffers))
    bare._modules.update({name: _without_hooks(child) for name, child in module.named_children()})
    return bare


def _wide_norm(norm, width: int, groups: list, hidden: torch.Tensor, gate: Optional[torch.Tensor] = None):
    """The gated RMS norm over `width` channels. This rank has some of them: squares are summed over the groups."""
    dtype, hidden = hidden.dtype, hidden.float()
    if gate is not None:
        hidden = hidden * F.silu(gate.float())
    squares = hidden.pow(2).sum(-1, keepdim=True)
    for group in groups:  # every rank uses the sum, so gradients are summed too
        squares = Sum.apply(*SumGradients.apply(group, squares), group)
    hidden = hidden * torch.rsqrt(squares / width + norm.variance_epsilon)
    return norm.weight * hidden.to(dtype)
