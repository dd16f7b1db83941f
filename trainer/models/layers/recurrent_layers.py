"""Layers with a state from token to token: linear attention, state spaces, short convolutions.

Such a mixer calls no attention function. Its state would run on from one packed document into the next, and a rank
with a part of a sequence would not know the state before it. `restart_at_documents` corrects both from outside: the
mixers of transformers do not change, and the same code serves every kind.

- Packed documents become the rows of batches that are padded on the right. A causal mixer gives real tokens the same
  values with or without padding on their right. Documents of like length share a batch.
- The hidden states of a split sequence are gathered over sp, and put in the order of the text. Every rank of sp and of tp
  computes its own heads for all tokens (`head_shares`). The sum over the ranks is scattered over sp again.
- Where heads cannot be sharded, every rank computes the whole mixer and keeps its own tokens. Its loss covers only its
  own tokens, so gradients are counted once.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainer.datasets.batches.global_batches import copied
from trainer.datasets.batches.sequence_split import natural_order, zigzag_shard
from trainer.distributed.gradient_collectives import Gather, ScatterSum, Sum, SumGradients
from trainer.errors import UserError
from trainer.metrics import counted
from trainer.models.layers.head_shares import OwnHeads

# model_type of transformers -> class of its mixers. Each maps hidden states (rows, tokens, hidden) to the same shape,
# as the result or as the first item of a tuple.
MIXERS = {
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "minimax": "MiniMaxLightningAttention",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "zamba": "ZambaMambaMixer",
    "zamba2": "Zamba2MambaMixer",
}
WITH_MIXER = {"linear_attention", "hybrid", "conv", "mamba"}  # layers with such a mixer, as configs name them
TOKEN_BY_TOKEN = {"moe", "mlp"}


def known_layers(config) -> set[str]:
    """Return the names of the layers without attention that `restart_at_documents` supports in a model of this config."""
    return WITH_MIXER | TOKEN_BY_TOKEN if config.get_text_config().model_type in MIXERS else set()


def restart_at_documents(
    model: torch.nn.Module, sp_group: Optional[dist.ProcessGroup] = None, tp_group: Optional[dist.ProcessGroup] = None
) -> None:
    """Make the mixers of a transformers model restart at packed documents, and see whole sequences if `sp_group` splits
    them. Heads are sharded over both groups. This changes the `forward` of modules in place, and nothing in a model
    without mixers.

    Call this after activation checkpointing is switched on, and before a strategy wraps the model.

    Raises:
        UserError: the mixers of the model have unknown classes.
    """
    config = model.config.get_text_config()
    mixers = mixers_of(model)
    expected = sum(layer in WITH_MIXER for layer in getattr(config, "layer_types", None) or ())
    if len(mixers) != expected:  # remote code with the model_type of transformers' own model
        found = f"{config.model_type} has {counted(expected, 'layer')} with a state; {len(mixers)} of them are known"
        raise UserError("--packing_samples, --ring_attn_size", found, "leave them out")
    if not mixers:
        return
    row = Row()
    for module in {model, model.base_model}:
        module.forward = _noting_documents(module.forward, row)
    for module in model.modules():
        if "_gradient_checkpointing_func" in vars(module):
            module._gradient_checkpointing_func = _keeping_documents(module._gradient_checkpointing_func, row)
    change_mixers(mixers, row, sp_group, tp_group)


def share_heads(model: torch.nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Shard the heads of mixers over `tp_group`, in place. For whole sequences without packing; see above."""
    change_mixers(mixers_of(model), Row(), None, tp_group)


def mixers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the mixers of a model with linear attention, state spaces or convolutions, in order."""
    kind = MIXERS.get(model.config.get_text_config().model_type)
    return [module for module in model.modules() if type(module).__name__ == kind]


def change_mixers(mixers: list[torch.nn.Module], row: "Row", sp_group, tp_group) -> list[OwnHeads]:
    """Make mixers restart at the documents of `row`, and compute the heads of this rank."""
    heads = [OwnHeads(mixer, tp_group, sp_group) for mixer in mixers]
    for mixer, own in zip(mixers, heads):
        _gather_as_a_whole(mixer)
        mixer.forward = _restarting(mixer.forward, row, sp_group, own)
    return heads


def _gather_as_a_whole(mixer: torch.nn.Module) -> None:
    """Make ZeRO 3 gather the weights of a mixer once per call, in place.

    The ranks have different numbers of batches, so gathers for each batch would not match. ZeRO 3 handles gradients of
    positional inputs only, but layers name their inputs.
    """

    def call(self, hidden_states, *args, **kwargs):
        return mixer_class.__call__(self, hidden_states, *args, **kwargs)

    mixer_class = type(mixer)
    mixer.__class__ = type(mixer_class.__name__, (mixer_class,), {"__call__": call})
    mixer._z3_leaf = True


class Row:
    """The documents of the packed row that the model computes now. `batches` is None for rows that are not packed."""

    batches: Optional["Batches"] = None

    @contextlib.contextmanager
    def of(self, batches: Optional["Batches"]) -> Iterator[None]:
        """Set the documents inside this context."""
        before, self.batches = self.batches, batches
        try:
            yield
        finally:
            self.batches = before


def _noting_documents(forward: Callable, row: Row) -> Callable:
    """Return the forward of a model that notes the documents of its inputs. An inner model inherits them."""

    @functools.wraps(forward)
    def noting(*args, **kwargs):
        bounds = kwargs.get("cu_seqlens_host")
        with row.of(row.batches if bounds is None else find_batches(bounds.tolist())):
            return forward(*args, **kwargs)

    return noting


def _keeping_documents(checkpoint: Callable, row: Row) -> Callable:
    """Return a checkpoint function that computes a layer again for the documents of its own forward pass."""

    def keeping(layer: Callable, *args):
        batches = row.batches

        def again(*inputs):
            with row.of(batches):
                return layer(*inputs)

        return checkpoint(again, *args)

    return keeping


def _restarting(forward: Callable, row: Row, sp_group: Optional[dist.ProcessGroup], heads: OwnHeads) -> Callable:
    """Return the forward of a mixer that computes whole documents, each from an empty state."""

    @torch.compiler.disable  # documents have new lengths in every batch
    @functools.wraps(forward)
    def restarting(hidden_states, *args, **kwargs):
        kwargs = {name: value for name, value in kwargs.items() if name not in OF_ROW}
        rest: list = []  # what the mixer returns besides its output, such as its last state
        with heads.taken(caches=any(kwargs.get(name) is not None for name in CACHES)) as own:
            tp, over_sp = (heads.tp, heads.sp is not None) if own else (None, False)
            compute = own.forward if own else forward

            def mix(batch: torch.Tensor) -> torch.Tensor:
                out = compute(batch, *args, **kwargs)
                out, rest[:] = (out[0], out[1:]) if isinstance(out, tuple) else (out, ())
                return out

            if tp:
                (hidden_states,) = SumGradients.apply(tp, hidden_states)
            whole = hidden_states if sp_group is None else _gather_tokens(hidden_states, sp_group)
            out = mix(whole) if row.batches is None else _in_batches(mix, whole, row.batches)
        if sp_group is not None:
            out = _own_tokens(out, sp_group, is_part=over_sp)
        out = Sum.apply(out, tp) if tp else out
        return (out, *rest) if rest else out

    return restarting


# arguments that describe the packed row; kernels would apply them to the batches
OF_ROW = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "cu_seqlens_host", "seq_idx"}
CACHES = ("cache_params", "past_key_values")  # arguments with the states of a generation


# --- packed documents


class Batches(NamedTuple):
    """Documents of a packed row as padded batches."""

    shapes: list[tuple[int, int]]  # (documents, longest) of each batch
    sources: torch.Tensor  # for each place of all batches, its token of the row; padding has the row's length
    places: torch.Tensor  # for each token of the row, its place


def find_batches(bounds: Sequence[int]) -> Batches:
    """Return batches in which no document is shorter than half of the longest. So padding less than doubles the work.

    Bounds [0, 3, 4, 6] give shapes [(2, 3), (1, 1)], sources [0 1 2 4 5 6 3] (6 is padding), places [0 1 2 6 3 4].
    """
    documents = sorted(itertools.pairwise(bounds), key=lambda document: document[0] - document[1])
    shapes, sources, places = [], [], [0] * bounds[-1]
    while documents:
        longest = documents[0][1] - documents[0][0]
        batch = [document for document in documents if 2 * (document[1] - document[0]) >= longest]
        documents = documents[len(batch) :]
        shapes.append((len(batch), longest))
        for start, end in batch:
            places[start:end] = range(len(sources), len(sources) + end - start)
            sources += [*range(start, end), *[bounds[-1]] * (longest - end + start)]
    return Batches(shapes, torch.tensor(sources), torch.tensor(places))


def _in_batches(forward: Callable, hidden: torch.Tensor, batches: Batches) -> torch.Tensor:
    """Apply `forward` to the documents of a packed row (1, tokens, hidden), and put its results in the row's order."""
    if len(batches.shapes) == 1 and batches.shapes[0][0] == 1:
        return forward(hidden)
    sources, places = (copied(index, hidden.device) for index in batches[1:])
    sizes = [rows * longest for rows, longest in batches.shapes]
    parts = F.pad(hidden[0], (0, 0, 0, 1)).index_select(0, sources).split(sizes)  # the last row is the padding
    outs = [forward(part.view(*shape, -1)).flatten(0, 1) for part, shape in zip(parts, batches.shapes)]
    return torch.cat(outs).index_select(0, places)[None]


# --- split sequences


def _gather_tokens(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Zigzag shards (rows, tokens / sp, hidden) -> (rows, tokens, hidden) in the order of the text (all-gather)."""
    return natural_order(torch.cat(Gather.apply(hidden, group).chunk(group.size()), dim=1), group.size())


def _own_tokens(out: torch.Tensor, group: dist.ProcessGroup, is_part: bool) -> torch.Tensor:
    """(rows, tokens, hidden) in the order of the text -> this rank's zigzag shard. Parts are summed (reduce-scatter)."""
    if not is_part:
        return zigzag_shard(out, group.rank(), group.size())
    return ScatterSum.apply(torch.cat([zigzag_shard(out, rank, group.size()) for rank in range(group.size())]), group)
