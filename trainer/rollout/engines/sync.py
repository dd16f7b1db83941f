"""Send the training weights to the rollout engines, and prove that they arrived."""

import time

from trainer.distributed.collectives import gather_objects
from trainer.distributed.weight_slices import only_slices
from trainer.errors import UserError
from trainer.model_folders.adapter_tensors import adapter_config
from trainer.model_folders.model_folder import unwrapped


def sync_weights(strategy, model, engine) -> dict:
    """Send the weights of `model` to the engine of every rank, in its dtype (collective over all ranks).

    Shards are cast before they are gathered, many tensors at a time (`distributed/bucketed_gather.py`). An engine over several
    ranks gets full tensors once, and later only each rank's slices. With an adapter, engines always get the full tensors
    of the base with the adapter merged in. Returns the metrics of the sync.

    Raises:
        UserError: an engine of a rank refuses the weights. All ranks raise the same error.
        RuntimeError: an engine does not hold, bit for bit, the weights that it was sent, or two engines differ.
    """
    started = time.perf_counter()
    engine.wake()
    tensors = strategy.iter_full_params(model, merged_as=engine.dtype)
    checksum, num_bytes, problem = "", 0, None
    try:
        if engine.slices is not None and adapter_config(unwrapped(model)) is None:
            with only_slices(engine.slices):
                checksum, num_bytes = engine.update_slices(tensors)
        else:
            checksum, num_bytes = engine.update_weights(tensors)
    except UserError as error:
        problem = error
    of_ranks = gather_objects((checksum, problem))
    for _, problem in of_ranks:
        if problem is not None:
            raise problem
    checksums = [checksum for checksum, _ in of_ranks]
    if len(set(checksums)) > 1:
        raise RuntimeError(f"rollout engines hold different weights: {checksums}")
    return {
        "weights_checksum": checksum,
        "sync_bytes": num_bytes,
        "time_sync": time.perf_counter() - started,
        **engine.sync_facts,
    }
