"""The keyword arguments of the model call that runs now, for layers to which the model does not pass them.

Attention of a packed row needs the documents. Most models pass unknown keyword arguments down to attention, but in
some models a layer drops them. `remember_call` keeps them while the decoder runs. Activation checkpointing runs a layer
again in the backward pass, when the decoder no longer runs: `keep_call` brings back the arguments of its own micro-batch.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Optional

import torch

NAMES = ("cu_seqlens", "cu_seqlens_host", "max_length_q", "position_ids", "prompt_bounds")
_call: ContextVar[Optional[dict]] = ContextVar("call", default=None)


@torch.compiler.disable  # otherwise compiled layers would depend on the values of one micro-batch
def current_call() -> dict:
    """Return the arguments in `NAMES` of the model call that runs now. {} outside of a call."""
    return _call.get() or {}


def remember_call(model: torch.nn.Module) -> None:
    """Make `current_call` return the arguments of each call of `model`, until its decoder has returned."""
    decoder = getattr(model, "base_model", model)  # not the model itself: peft calls its `forward`, without hooks
    decoder.register_forward_pre_hook(
        lambda module, args, kwargs: _set({name: kwargs[name] for name in NAMES if name in kwargs}), with_kwargs=True
    )
    decoder.register_forward_hook(lambda module, args, output: _set(None), always_call=True)


def keep_call(contexts: Callable) -> tuple:
    """Return the result of a `context_fn` of torch.utils.checkpoint: a context for the forward pass and one for backward.

    The second one restores the current call. `contexts` is the `context_fn` to which this is added.
    """
    forward, recompute = contexts()
    return forward, _within(_call.get(), recompute)


@contextlib.contextmanager
def _within(call: Optional[dict], context) -> Iterator[None]:
    before = _call.set(call)
    try:
        with context:
            yield
    finally:
        _call.reset(before)


def _set(call: Optional[dict]) -> None:
    _call.set(call)
