"""How much memory a rank needs for weights, gradients and optimizer states, by backend, stage and number of ranks.

The terms are the tensors that FSDP2 and DeepSpeed allocate, found by reading their code and by measuring.
test/strategies/test_host_memory.py compares real runs with them. Activations, logits and libraries come on top.
"""

from dataclasses import dataclass

from trainer.strategies.options import bucket_elements

MASTERS, MOMENTS, GRADS = 4, 8, 4  # bytes: everything that accumulates is fp32
ALL_REDUCED_ELEMENTS = 500_000_000  # fp32 gradients in an all-reduce of DeepSpeed's
LIVE_ELEMENTS = (
    1_000_000_000  # gathered weights that ZeRO 3 keeps until their backward, and weights it updates at a time
)
BUFFER_BYTES = 32 << 20  # for writing a checkpoint: a part of a tensor, and both ends of a file
STAGES = {"fsdp2": (3, 2), "deepspeed": (0, 1, 2, 3)}


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: while the model is loaded, between steps, at the peak of a step, and while it is saved.

    `save` adds the buffers of a checkpoint, or of the exported model, to the state. They are in host memory.
    """

    load: float
    state: float
    step: float
    save: float


def predict(
    backend: str,
    stage: int,
    param_dtype: str,
    num_ranks: int,
    num_params: float,
    largest_layer: float = 0,
    largest_tensor: float = 0,
) -> Memory:
    """Return the memory of full fine-tuning with AdamW on `num_ranks` data-parallel ranks.

    `num_params` and `largest_layer` (the largest decoder layer, embedding or head) count parameters. With tensor
    parallelism, divide them by its size. A model is saved tensor by tensor: without `largest_tensor`, one counts as a layer.
    """
    p, n, width = num_params, num_ranks, 4 if param_dtype == "fp32" else 2
    if backend == "fsdp2":
        load, state = MASTERS * p / n, (MASTERS + MOMENTS) * p / n
        kept = 0 if stage == 3 or (n == 1 and width == 4) else width * p  # one rank in fp32 gathers nothing
        # gathered weights are freed layer by layer while gradients come; one rank frees them when the step ends
        step = state + max(GRADS * p / n, kept) if n > 1 else state + GRADS * p + kept
        step += (3 * width + GRADS) * largest_layer  # two gathered layers, and the gradient of one in both dtypes
        written = state
    else:
        load, state, step, written = _deepspeed(stage, width, p, n, largest_layer)
    # one tensor is gathered and converted; the exported model is streamed
    one_tensor = (MASTERS + width) * (largest_tensor or largest_layer)
    save = state + max(min(written, BUFFER_BYTES), one_tensor)
    return Memory(load, state, step, save)


def beside_activations(
    backend: str,
    stage: int,
    param_dtype: str,
    num_ranks: int,
    num_params: float,
    largest_layer: float,
    accumulates: bool,
) -> tuple[float, float]:
    """(bytes at the loss of the last micro-batch, more of them while its gradients come), both without activations.

    With several micro-batches in a step (`accumulates`), the gradients of the earlier ones are there.
    """
    p, n, width = num_params, num_ranks, 4 if param_dtype == "fp32" else 2
    state, bucket = predict(backend, stage, param_dtype, n, p, largest_layer).state, GRADS * bucket_elements(p)
    layer = (width + GRADS) * largest_layer
    if backend == "fsdp2":
        kept = 0 if (stage == 3 and n > 1) or (n == 1 and width == 4) else width * p
        return state + kept + accumulates * GRADS * p / n, (3 * width + GRADS) * largest_layer
    if stage == 3:
        return state + (width * min(p, LIVE_ELEMENTS) if n > 1 else 0), 2 * bucket + layer
    if stage == 2:
        return state + accumulates * GRADS * p / n, bucket + bucket / n + layer
    if stage == 1 and width == 2:
        return state + width * p, layer  # gradients in bf16, beside the fp32 ones of the state
    return state + accumulates * GRADS * p, layer


def _deepspeed(stage: int, width: int, p: float, n: int, largest_layer: float) -> tuple[float, ...]:
    """(load, state, step, bytes that this rank writes to a checkpoint)"""
    has_masters, sharded = width == 2, (MASTERS + MOMENTS) * p / n
    bucket, all_reduced = GRADS * bucket_elements(p), GRADS * min(p, ALL_REDUCED_ELEMENTS)
    layer = (width + GRADS) * largest_layer  # the weights or the gradient of one, and its fp32 gradient
    if stage == 0:
        state = (width * has_masters + MASTERS + MOMENTS) * p
        return state - MOMENTS * p, state, state + GRADS * p + all_reduced, (MASTERS + MOMENTS) * p
    if stage == 3:
        partition = (width + GRADS) * p / n
        state = partition + sharded + bucket
        gathered = width * min(p, LIVE_ELEMENTS) if n > 1 else 0
        # two more buckets while one is reduced, and the optimizer's copy of some of this rank's gradients
        step = state + gathered + 2 * bucket + GRADS * min(p / n, LIVE_ELEMENTS) + layer
        return partition + MASTERS * p / n + bucket, state, step, sharded
    if stage == 1 and has_masters:  # BF16_Optimizer keeps all fp32 gradients between steps
        state = (width + GRADS) * p + sharded
        # the reduced gradients, or later the new weights of all ranks, some at a time
        gathered = width * min(p, ALL_REDUCED_ELEMENTS)
        step = state + width * p + max(all_reduced if n == 1 else bucket + bucket / n, gathered)
        return state - MOMENTS * p / n, state, step, sharded
    state = width * p + sharded
    # the weights are copied once into a flat tensor; later, zero gradients create the optimizer states
    load = max(2 * width * p, width * p + (MASTERS + GRADS) * p / n)
    if stage == 1:
        return load, state, state + max(GRADS * p + bucket, 2 * GRADS * p / n), sharded
    # each rank's part of a bucket is reduced on its own
    return load, state, state + bucket + GRADS * p / n + bucket / n + layer, sharded


def table(num_ranks: int, param_dtype: str = "bf16") -> str:
    """Return the bytes per parameter as Markdown, for large models, where buckets and layers do not count."""
    rows = ["| Backend | Stage | load | between steps | step |", "|---|---|---:|---:|---:|"]
    for backend, stages in STAGES.items():
        for stage in stages:
            found, p = predict(backend, stage, param_dtype, num_ranks, 1e15), 1e15
            figures = " | ".join(f"{value / p:.2f}" for value in (found.load, found.state, found.step))
            rows.append(f"| `{backend}` | {stage} | {figures} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(8))
