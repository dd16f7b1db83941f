"""How much memory a rank needs for weights, gradients and optimizer states, by backend, stage and number of ranks.

The terms are the tensors that FSDP2 and DeepSpeed allocate, found by reading their code and by measuring.
test/strategies/test_host_memory.py compares real runs with them. Activations, logits and libraries come on top.
"""

from dataclasses import dataclass

MASTERS, MOMENTS, GRADS = 4, 8, 4  # bytes: everything that accumulates is fp32
BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default number of fp32 gradients in a reduction
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
    on_gpu: bool = False,
    largest_tensor: float = 0,
) -> Memory:
    """Return the memory of full fine-tuning with AdamW on `num_ranks` data-parallel ranks.

    `num_params` and `largest_layer` (the largest decoder layer, embedding or head) count parameters. With tensor
    parallelism, divide them by its size. `on_gpu`: a GPU holds whole buffers, host memory only the pages in use. A model is
    saved tensor by tensor: without `largest_tensor`, one counts as a layer.
    """
    p, n, width = num_params, num_ranks, 4 if param_dtype == "fp32" else 2
    bucket = 4 * min(p, BUCKET_ELEMENTS)
    if backend == "fsdp2":
        load, state = MASTERS * p / n, (MASTERS + MOMENTS) * p / n
        kept = 0 if stage == 3 or (n == 1 and width == 4) else width * p  # one rank in fp32 gathers nothing
        # gathered weights are freed layer by layer while gradients come; one rank frees them when the step ends
        step = state + max(GRADS * p / n, kept) if n > 1 else state + GRADS * p + kept
        step += (3 * width + GRADS) * largest_layer  # two gathered layers, and the gradient of one in both dtypes
        written = state
    else:
        load, state, step, written = _deepspeed(stage, width, p, n, bucket, on_gpu)
    # one tensor is gathered and converted; the exported model is streamed
    one_tensor = (MASTERS + width) * (largest_tensor or largest_layer)
    save = state + max(min(written, BUFFER_BYTES), one_tensor)
    return Memory(load, state, step, save)


def _deepspeed(stage: int, width: int, p: float, n: int, bucket: float, on_gpu: bool) -> tuple[float, ...]:
    """(load, state, step, bytes that this rank writes to a checkpoint)"""
    has_masters, sharded = width == 2, (MASTERS + MOMENTS) * p / n
    buffer = 4 * BUCKET_ELEMENTS if on_gpu else bucket  # gradients of a bucket, end to end
    if stage == 0:
        state = (width * has_masters + MASTERS + MOMENTS) * p
        return state - MOMENTS * p, state, state + GRADS * p + bucket, (MASTERS + MOMENTS) * p
    if stage == 3:
        partition = (width + GRADS) * p / n
        state = partition + sharded + buffer
        return partition + MASTERS * p / n, state, state + 2 * bucket, sharded
    if stage == 1 and has_masters:  # BF16_Optimizer keeps all fp32 gradients between steps
        state = (width + GRADS) * p + sharded
        # the sums of a bucket; gloo copies it, and we copy it if it is not all of the gradients
        copied = n == 1 or not on_gpu or p > BUCKET_ELEMENTS
        reduced = bucket * copied + (bucket / n if n > 1 else 0)
        return state - MOMENTS * p / n, state, state + width * p + reduced, sharded
    state = width * p + sharded
    # the weights are copied once into a flat tensor; later, zero gradients create the optimizer states
    load = max(2 * width * p, width * p + (MASTERS + GRADS) * p / n)
    if stage == 1:
        return load, state, state + GRADS * p + bucket, sharded
    # each rank's part of a bucket is reduced on its own
    return load, state, state + buffer + GRADS * p / n + bucket / n, sharded


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
