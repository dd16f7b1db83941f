"""`--precompute_ref_logps`: add the reference's log-probs to the pairs, so that training needs no second model."""

import functools
import gc

import torch

from trainer.runs import run_training
from trainer.runs.preference_runs import build_pair_loader


def with_reference(args, setup: run_training.Setup, folder: str, load_reference, sets: list, rows_of=None) -> list:
    """Return the sets of pairs with the reference's log-probs, from disk or from one pass. None stays None.

    The file name is a hash of the model in `folder`, the pairs and the dtype. `load_reference()` is called only if a
    set is not on disk. `rows_of` makes rows of sequences with images.
    """
    from trainer.distributed.collectives import broadcast_object, rank_0_alone
    from trainer.methods import reference_cache as cache

    strategy, reference, result = setup.strategy, None, []
    model = broadcast_object(cache.model_hash(folder) if strategy.is_rank_0() else None)
    for pairs in sets:
        if pairs is None:
            result.append(None)
            continue
        path = cache.cache_file(model, pairs, args.param_dtype)
        log_probs = broadcast_object(cache.read(path) if strategy.is_rank_0() else None)
        if log_probs is None:
            reference = reference or load_reference()
            loader = build_pair_loader(args, setup, pairs, shuffle=False, rows_of=rows_of)
            log_probs = cache.compute(strategy, reference, loader, pairs, setup.sp_group)
            rank_0_alone(functools.partial(cache.write, path, log_probs))
            strategy.print(f"reference log-probs of {len(pairs)} pairs computed and saved in {path}")
        else:
            strategy.print(f"reference log-probs of {len(pairs)} pairs read from {path}")
        result.append(cache.with_log_probs(pairs, log_probs))
    del reference
    gc.collect()  # free the reference's weights before the policy trains
    if strategy.device.type == "cuda":
        torch.cuda.empty_cache()
    return result
