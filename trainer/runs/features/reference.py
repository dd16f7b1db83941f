"""The reference model, before a run trains.

`--ref_model`: a model whose ids mean other tokens is refused before data is read. RL has its teacher under that flag.
`--precompute_ref_logps`: the reference's log-probs are added to the pairs, so that training needs no second model.
"""

import functools
import gc

import torch

from trainer.comma_separated import names_in
from trainer.datasets.samples.bounds import check_bounds
from trainer.distributed.collectives import broadcast_object, rank_0_alone
from trainer.errors import UserError
from trainer.methods import reference_cache as cache
from trainer.metrics import counted
from trainer.models.model_bounds import bounds_of
from trainer.runs.feature import Feature
from trainer.runs.preference_runs import load_reference
from trainer.runs.run_setup import check_vocabulary, tokenizer_folder


def check_reference(run) -> None:
    """Raise UserError for a reference that could not read the policy's tokens: another vocabulary, too few positions."""
    flag, setup = "--teacher" if run.flags.teacher else "--ref_model", run.setup
    names = names_in(run.flags.ref_model) if run.flags.teacher else [run.flags.ref_model]
    for name, reference in zip(names, run.references):
        check_vocabulary(setup, name, tokenizer_folder(*reference), flag, "a model with the same one")
        bounds = bounds_of(reference[0], setup.trust_remote_code)
        if bounds.learned and setup.rolls_out and bounds.positions < setup.longest:
            has = f"{name} has {counted(bounds.positions, 'position')}"
            allowed = "a smaller --prompt_max_len or --generate_max_len, or another model"
            raise UserError(flag, f"{has}, and prompts with responses up to {setup.longest} tokens", allowed)


def check_rows(run) -> None:
    """Raise UserError for a row that is longer than the learned positions of a reference."""
    for folder, _ in run.references:
        check_positions(run, folder)


def check_positions(run, folder: str) -> None:
    """Raise UserError for a row that is longer than the learned positions of the frozen model in `folder`."""
    bounds = bounds_of(folder, run.setup.trust_remote_code)
    for flag, samples in (("--dataset", run.samples), ("--eval_dataset", run.eval_samples)):
        if bounds.learned and samples:
            check_bounds(samples, run.setup.tokenizer, flag, bounds)


REFERENCE = Feature("reference", lambda run: run.flags.ref_model, before_data=check_reference, with_data=check_rows)


def add_log_probs(run) -> None:
    """Add the reference's log-probs to the pairs, from disk or from one pass.

    The file name is a hash of the reference, the pairs and the dtype. The reference is loaded only if a set is not on
    disk.
    """
    strategy, args, sets, reference, result = run.setup.strategy, run.args, [run.samples, run.eval_samples], None, []
    folder, adapter = run.references[0]
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
