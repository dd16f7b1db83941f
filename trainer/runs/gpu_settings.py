"""What a run on GPUs changes in its process: precision of fp32, how memory is allocated, threads of an Adam on the host."""

import os

import torch

from trainer.runs.cpu_cores import share_cores

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # of torch; the user's choice stays


def set_up_gpu(adam_offload: bool, vllm: bool) -> None:
    """Allocate in expandable segments: batches differ in size, and less memory is lost between their tensors.

    vLLM's sleep mode keeps its weights in a pool of its own, which cannot have such segments. Convolutions in fp32, such
    as those of Mamba, are exact like matrix products: torch would compute them with 10 bits.
    """
    torch.backends.cudnn.allow_tf32 = False
    if not vllm and not any(name in os.environ for name in VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if adam_offload:
        share_cores()
