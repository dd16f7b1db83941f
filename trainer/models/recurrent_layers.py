"""Layers with a state from token to token: linear attention, state spaces, short convolutions.

Such a mixer calls no attention function. Its state would run on from one packed document into the next, and a rank
with a part of a sequence would not know the state before it. `restart_at_documents` mends both from outside: the
mixers of transformers do not change, and every kind of them is served by the same code.

- Packed documents become the rows of batches that are padded on the right. A causal mixer gives real tokens the same
  values with or without padding on their right. Documents of like length share a batch.
- The hidden states of a split sequence are gathered over sp, and put in the order of the text. Every rank computes the
  whole sequence and keeps its own tokens. Its loss is that of its own tokens, so gradients are counted once.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainer.datasets.global_batches import copied
from trainer.datasets.sequence_split import natural_order, zigzag_shard
from trainer.errors import UserError

# model_type of transformers -> class of its mixers. Each maps hidden states (rows, tokens, hidden) to the same shape,
# alone or as the first item of a tuple.
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
    """Return the names of the layers without attention that `restart_at_documents` makes right in this config's model."""
    return WITH_MIXER | TOKEN_BY_TOKEN if config.get_text_config().model_type in MIXERS else set()


def restart_at_documents(model: torch.nn.Module, sp_group: Optional[dist.ProcessGroup] = None) -> None:
    """Make the mixers of a transformers model restart at packed documents, and see whole sequences if `sp_group` splits
    them. Changes the `forward` of modules in place, and nothing for a model without mixers.

    Call this after activation checkpointing is switched on, and before a strategy wraps the model. Raises UserError for
    a model whose mixers have unknown classes.
    """
    config = model.config.get_text_config()
    mixers = [module for module in model.modules() if type(module).__name__ == MIXERS.get(config.model_type)]
    expected = sum(layer in WITH_MIXER for layer in getattr(config, "layer_types", None) or ())
    if len(mixers) != expected:  # remote code with the model_type of transformers' own model
        found = f"{config.model_type} has {expected} layers with a state, of which {len(mixers)} are known"
        raise UserError("--packing_samples, --ring_attn_size", found, "leave them out")
    if not mixers:
        return
    row = _Row()
    for module in {model, model.base_model}:
        module.forward = _noting_documents(module.forward, row)
    for module in model.modules():
        if "_gradient_checkpointing_func" in vars(module):
            module._gradient_checkpointing_func = _keeping_documents(module._gradient_checkpointing_func, row)
    for mixer in mixers:
        _gather_as_a_whole(mixer)
        mixer.forward = _restarting(mixer.forward, row, sp_group)


def _gather_as_a_whole(mixer: torch.nn.Module) -> None:
    """Make ZeRO 3 gather the weights of a mixer once per call. Its ranks have different numbers of batches, and gathers
    for each batch would not meet. ZeRO 3 sees the gradients of positional inputs only, and layers name their inputs."""

    def call(self, hidden_states, *args, **kwargs):
        return mixer_class.__call__(self, hidden_states, *args, **kwargs)

    mixer_class = type(mixer)
    mixer.__class__ = type(mixer_class.__name__, (mixer_class,), {"__call__": call})
    mixer._z3_leaf = True


class _Row:
    """The documents of the packed row that the model computes now. `batches` is None for rows that are not packed."""

    batches: Optional["Batches"] = None

    @contextlib.contextmanager
    def of(self, batches: Optional["Batches"]):
        before, self.batches = self.batches, batches
        try:
            yield
        finally:
            self.batches = before


def _noting_documents(forward: Callable, row: _Row) -> Callable:
    """Return the forward of a model that notes the documents of its inputs. An inner model inherits them."""

    @functools.wraps(forward)
    def noting(*args, **kwargs):
        bounds = kwargs.get("cu_seqlens_host")
        with row.of(row.batches if bounds is None else find_batches(bounds.tolist())):
            return forward(*args, **kwargs)

    return noting


def _keeping_documents(checkpoint: Callable, row: _Row) -> Callable:
    """Return a checkpoint function that computes a layer again for the documents of its own forward pass."""

    def keeping(layer: Callable, *args):
        batches = row.batches

        def again(*inputs):
            with row.of(batches):
                return layer(*inputs)

        return checkpoint(again, *args)

    return keeping


def _restarting(forward: Callable, row: _Row, sp_group: Optional[dist.ProcessGroup]) -> Callable:
    """Return the forward of a mixer that computes whole documents, each from an empty state."""

    @torch.compiler.disable  # documents have new lengths in every batch
    @functools.wraps(forward)
    def restarting(hidden_states, *args, **kwargs):
        whole = hidden_states if sp_group is None else _gather_tokens(hidden_states, sp_group)
        kwargs = {name: value for name, value in kwargs.items() if name not in OF_ROW}
        rest: list = []  # what the mixer returns beside its output, such as its last state

        def mix(batch: torch.Tensor) -> torch.Tensor:
            out = forward(batch, *args, **kwargs)
            out, rest[:] = (out[0], out[1:]) if isinstance(out, tuple) else (out, ())
            return out

        out = mix(whole) if row.batches is None else _in_batches(mix, whole, row.batches)
        out = out if sp_group is None else zigzag_shard(out, sp_group.rank(), sp_group.size())
        return (out, *rest) if rest else out

    return restarting


# arguments that describe the packed row; kernels would apply them to the batches
OF_ROW = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "cu_seqlens_host", "seq_idx"}


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
    return natural_order(torch.cat(_AllGather.apply(hidden, group).chunk(group.size()), dim=1), group.size())


class _AllGather(torch.autograd.Function):
    """(rows, ...) of each rank -> (ranks * rows, ...) on all. The gradient of a part is the sum of all ranks' for it."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        gathered = tensor.new_empty(group.size() * len(tensor), *tensor.shape[1:])
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None
