"""Send the training weights to the rollout engines, and prove that they arrived."""

import time

from trainer.distributed.collectives import gather_objects


def sync_weights(strategy, model, engine) -> dict:
    """Send the full weights of `model` to the engine of every rank, in its dtype (collective over all ranks).

    Parts are cast before they are gathered, many tensors at a time (`distributed/bucketed_gather.py`). With an adapter, the engines get the plain model that it makes of its base. Returns the metrics of the sync.

    Raises:
        RuntimeError: an engine does not hold, bit for bit, the weights that it was sent, or two engines differ.
    """
    started = time.perf_counter()
    engine.wake()
    checksum, num_bytes = engine.update_weights(strategy.iter_full_params(model, merged_as=engine.dtype))
    checksums = gather_objects(checksum)
    if len(set(checksums)) > 1:
        raise RuntimeError(f"rollout engines hold different weights: {checksums}")
    return {
        "weights_checksum": checksum,
        "sync_bytes": num_bytes,
        "time_sync": time.perf_counter() - started,
    }
