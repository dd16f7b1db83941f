"""Training weights to the rollout engines, and the proof that they arrived."""

import time

from trainer.distributed.collectives import gather_objects


def sync_weights(strategy, model, engine) -> dict:
    """Stream the full weights of `model`, one tensor at a time, into the engine of every rank (collective over all ranks);
    of a model with an adapter, those of the plain model that it makes.

    Returns the metrics of it. Raises RuntimeError unless all engines hold, bit for bit, the same weights, and each of
    them those that it was sent.
    """
    started = time.perf_counter()
    engine.wake()
    checksum, num_bytes = engine.update_weights(strategy.iter_full_params(model, merged=True))
    checksums = gather_objects(checksum)
    if len(set(checksums)) > 1:
        raise RuntimeError(f"rollout engines hold different weights: {checksums}")
    return {
        "weights_checksum": checksum,
        "sync_bytes": num_bytes,
        "time_sync": time.perf_counter() - started,
    }
