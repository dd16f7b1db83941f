"""How much memory a rank needs for an adapter of LoRA and its frozen base, by backend, stage and number of ranks.

`predicted_memory` has the same for training all weights. test/fake_gpu/memory.json has measured peaks.
"""

from trainer.planning.predicted_memory import BUFFER_BYTES, GRADS, LIVE_ELEMENTS, MASTERS, MOMENTS, Memory
from trainer.strategies.options import bucket_elements


def predict_adapter(
    backend: str,
    stage: int,
    param_dtype: str,
    num_ranks: int,
    num_params: float,
    num_adapter: float,
    largest_layer: float = 0,
) -> Memory:
    """Return the memory of an adapter of `num_adapter` parameters above `num_params` frozen ones, as `predict` does.

    The base has no gradient and no state. It is in the compute dtype: sharded by FSDP2 and ZeRO 3, else whole on each rank.
    Only the adapter is saved.
    """
    n, moments = num_ranks, MOMENTS * num_adapter / (num_ranks if backend == "fsdp2" or stage else 1)
    state = _state(backend, stage, 4 if param_dtype == "fp32" else 2, n, num_params, num_adapter)
    facts = (backend, stage, param_dtype, n, num_params, num_adapter, largest_layer)
    held, work = beside_adapter_activations(*facts, accumulates=True)
    saved = (MASTERS + MOMENTS) * num_adapter / n
    return Memory(state - moments, state, held + work, state + min(saved, BUFFER_BYTES))


def _state(backend: str, stage: int, width: int, n: int, p: float, a: float) -> float:
    """Bytes between steps: the base, the adapter's weights and states, and what DeepSpeed keeps of its gradients."""
    if backend == "fsdp2":
        return width * p / n + (MASTERS + MOMENTS) * a / n
    weights = width * (p + a) / (n if stage == 3 else 1) + (MASTERS + MOMENTS) * a / (n if stage else 1)
    if stage == 3:
        return weights + GRADS * (bucket_elements(a) + a / n)
    return weights + (GRADS * a if stage == 1 and width == 2 else 0)


def beside_adapter_activations(
    backend: str,
    stage: int,
    param_dtype: str,
    num_ranks: int,
    num_params: float,
    num_adapter: float,
    largest_layer: float,
    accumulates: bool,
) -> tuple[float, float]:
    """(bytes at the loss of the last micro-batch, more of them while its gradients come): as `beside_activations`."""
    p, a, n, width = num_params, num_adapter, num_ranks, 4 if param_dtype == "fp32" else 2
    state, bucket, grads = _state(backend, stage, width, n, p, a), GRADS * bucket_elements(a), GRADS * a
    if backend == "fsdp2":
        kept = 0 if stage == 3 and n > 1 else width * (a + (p if n > 1 else 0))
        return state + kept + accumulates * grads / n, 2 * width * largest_layer * (n > 1)
    if stage == 3:
        return state + (width * min(p + a, LIVE_ELEMENTS) if n > 1 else 0), 2 * bucket
    if stage == 2:
        return state + accumulates * grads / n, bucket + bucket / n
    if stage == 1 and width == 2:
        return state + width * a, 0.0
    return state + accumulates * grads, bucket
