"""The two strategies, which have one duck-typed API. Only `get_strategy` chooses between them."""

from trainer.errors import UserError
from trainer.strategies.options import StrategyOptions


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
