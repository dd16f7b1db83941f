"""`--precompute_ref_logps`: add the reference's log-probs to the pairs, so that training needs no second model."""

import functools
import gc

import torch

from trainer.distributed.collectives import broadcast_object, rank_0_alone
from trainer.methods import reference_cache as cache
from trainer.metrics import counted
from trainer.runs.feature import Feature
from trainer.runs.preference_runs import load_reference


def add_log_probs(run) -> None:
    """Add the reference's log-probs to the pairs, from disk or from one pass.

    The file name is a hash of the reference, the pairs and the dtype. The reference is loaded only if a set is not on
    disk.
    """
    strategy, args, sets, reference, result = run.setup.strategy, run.args, [run.samples, run.eval_samples], None, []
    folder, adapter = run.reference
    model = broadcast_object(cache.model_hash(folder, adapter) if strategy.is_rank_0() else None)
    for pairs in sets:
        if pairs is None:
            result.append(None)
            continue
        path = cache.cache_file(model, pairs, args.model.param_dtype)
        log_probs = broadcast_object(cache.read(path) if strategy.is_rank_0() else None)
        if log_probs is None:
            reference = reference or load_reference(run)
            loader = run.build_loader(pairs, shuffle=False)
            log_probs = cache.compute(strategy, reference, loader, pairs, run.setup.sp_group)
            rank_0_alone(functools.partial(cache.write, path, log_probs))
            strategy.print(f"reference log-probs of {counted(len(pairs), 'pair')} computed and saved in {path}")
        else:
            strategy.print(f"reference log-probs of {counted(len(pairs), 'pair')} read from {path}")
        result.append(cache.with_log_probs(pairs, log_probs))
    run.samples, run.eval_samples = result
    del reference
    gc.collect()  # free the reference's weights before the policy trains
    if strategy.device.type == "cuda":
        torch.cuda.empty_cache()


REFERENCE_LOG_PROBS = Feature(
    "reference log-probs", lambda run: run.flags.precompute_ref_logps, with_data=add_log_probs
)
