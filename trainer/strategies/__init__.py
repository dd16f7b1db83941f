"""The two strategies, which have one duck-typed API. Only `get_strategy(args)` chooses between them."""

import dataclasses

from trainer.errors import UserError


def get_strategy(args):
    """The strategy that `args.backend` names, built from the flags that are fields of StrategyOptions.

    Raises:
        UserError: the backend is unknown, or it cannot do what the flags ask for.
    """
    from trainer.strategies.options import StrategyOptions

    if args.backend == "deepspeed":
        from trainer.strategies.deepspeed import DeepspeedStrategy as Strategy
    elif args.backend == "fsdp2":
        from trainer.strategies.fsdp2 import FSDP2Strategy as Strategy
    else:
        raise UserError("--backend", args.backend, "deepspeed, fsdp2")
    flags = vars(args)
    return Strategy(StrategyOptions(**{field.name: flags[field.name] for field in dataclasses.fields(StrategyOptions)}))
