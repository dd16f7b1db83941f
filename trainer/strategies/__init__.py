"""The two strategies, fsdp2.py and deepspeed.py. They have one duck-typed API: docs/new_strategy.md. Only this file chooses."""

from trainer.errors import UserError
from trainer.strategies.options import StrategyOptions, refuse_on_deepspeed, refuse_on_fsdp2


def offloads_weights(backend: str) -> bool:
    """Whether --adam_offload takes all weights to host memory. With the other one, GPUs keep those of the forward pass."""
    return backend == "fsdp2"


def refuse_options(backend: str, options: StrategyOptions) -> None:
    """Raise UserError for what `--backend` cannot do. Neither backend is imported."""
    (refuse_on_deepspeed if backend == "deepspeed" else refuse_on_fsdp2)(options)


def get_strategy(backend: str, options: StrategyOptions):
    """The strategy that `--backend` names.

    Raises:
        UserError: the backend is unknown, or it cannot do what the options request.
    """
    if backend == "deepspeed":
        from trainer.strategies.deepspeed import DeepspeedStrategy as Strategy  # heavy: only the chosen one is imported
    elif backend == "fsdp2":
        from trainer.strategies.fsdp2 import FSDP2Strategy as Strategy  # heavy, too
    else:
        raise UserError("--backend", backend, "deepspeed, fsdp2")
    return Strategy(options)
