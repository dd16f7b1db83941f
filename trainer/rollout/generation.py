"""Generate the samples of a rollout with the engines of all ranks."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from trainer.datasets.batches.global_batches import contiguous_slice
from trainer.datasets.samples.prompts import columns_of
from trainer.distributed.collectives import gather_objects
from trainer.errors import UserError
from trainer.rollout.engines.sampling import Completion, Sampling, sample_seed
from trainer.rollout.placement import share
from trainer.rollout.samples import Sample
from trainer.rollout.timeline import span


def generate_samples(
    engine, prompts: list[dict], num_each: int, sampling: Sampling, *, seed: int, rollout: int, first: int = 0
) -> list[Sample]:
    """Generate `num_each` samples of each prompt, numbered from `first`.

    All engines share the work, and the ranks of an engine share its samples. Every rank gets all samples, but tokens only
    of its own (see `placement.share`).

    Raises:
        UserError: an engine failed. All ranks raise the same error.
    """
    number_of_engine, rank_in_engine = divmod(dist.get_rank(), engine.ranks_per_engine)
    num_engines = dist.get_world_size() // engine.ranks_per_engine
    mine = contiguous_slice(numbered(prompts, num_each, first), number_of_engine, num_engines)
    samples = with_errors_of_all_ranks(lambda: continue_prompts(engine, mine, sampling, seed, rollout))
    return share(contiguous_slice(samples, rank_in_engine, engine.ranks_per_engine))  # its other ranks have the same


def with_errors_of_all_ranks(act: Callable[[], Any]) -> Any:
    """Return `act()`. If it raises UserError on a rank, all ranks raise that error (all-gather of objects over the world)."""
    result, problem = None, None
    try:
        result = act()
    except UserError as error:
        problem = error
    with span("wait"):
        problems = gather_objects(problem)
    for found in problems:
        if found is not None:
            raise found
    return result


def numbered(prompts: list[dict], num_each: int, first: int = 0) -> list[tuple[int, dict]]:
    """(number, prompt) of each sample of a rollout. Samples of one prompt have adjacent numbers."""
    return list(enumerate((prompt for prompt in prompts for _ in range(num_each)), start=first))


def continue_prompts(
    engine, requests: list[tuple[int, dict]], sampling: Sampling, seed: int, rollout: int
) -> list[Sample]:
    """The sample of each (number, prompt). Only the engine may communicate."""
    seeds = [sample_seed(seed, rollout, number) for number, _ in requests]
    ids = [prompt["prompt_ids"] for _, prompt in requests]
    images = {}
    if requests and "images" in requests[0][1]:
        images["images"] = [prompt["images"] for _, prompt in requests]
    completions: list[Completion] = engine.generate(ids, sampling, seeds, **images)
    return [
        Sample(
            number=number,
            row=prompt["row"],
            prompt_ids=list(prompt["prompt_ids"]),
            response_ids=completion.token_ids,
            log_probs=completion.log_probs,
            finished=completion.finished,
            label=prompt["label"],
            kept_ids=completion.kept_ids,
            columns=columns_of(prompt),
            versions=completion.versions,
            experts=completion.experts,
        )
        for (number, prompt), completion in zip(requests, completions)
    ]
