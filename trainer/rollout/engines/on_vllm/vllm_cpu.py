"""vLLM on CPU: the size of its cache, what it must not do to weights that change or to groups of ranks, and its drafts."""

import torch
from transformers import AutoConfig

from trainer.errors import UserError

CPU_BLOCK = 128  # tokens in a block of vLLM's cache on CPU
MIN_CPU_HEAD_DIM = 32
MIN_CPU_CACHE_BYTES = 64 << 20


def cpu_cache_bytes(folder: str, dtype, batch_size: int, max_len: int, trust_remote_code: bool) -> int:
    """Cache bytes for `batch_size` responses of full length, in every layer, for all heads.

    Raises UserError if vLLM's CPU kernels do not support the head size. vLLM would notice it only while generating.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim < MIN_CPU_HEAD_DIM:
        raise UserError("--rollout_engine", f"vllm on the CPU with heads of {head_dim}", "hf, or heads of 32 or more")
    token_bytes = 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize
    blocks = batch_size * (-(-max_len // CPU_BLOCK) + 1)
    return max(MIN_CPU_CACHE_BYTES, blocks * CPU_BLOCK * token_bytes)


def keep_plain_weights() -> None:
    """Stop vLLM on CPU from packing the weights of linear layers after loading. It skips layers with this mark.
    No update would reach the packed weights."""
    from vllm.model_executor.layers.linear import LinearBase  # vllm is an extra

    LinearBase._cpu_skip_gemm_dispatch = True


def communicate_by_gloo() -> None:
    """Make vLLM's tp groups on CPU communicate by gloo. Their shared memory has one name for all external launches.
    With it, a second run could not start at the same time, nor after a killed run."""
    # vllm is an extra
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def use_plain_embeddings(model: torch.nn.Module) -> None:
    """Use the embedding itself in the output layer on CPU. vLLM uses a packed copy, which an update does not change."""
    for module in model.modules():
        if "cpu_linear" in vars(module):
            module.cpu_linear = torch.nn.functional.linear


def check_drafts_by_their_own_settings() -> None:
    """Let vLLM 0.32 on CPU check drafts at the temperature, top_k and top_p of their requests.

    Its kernel writes these into a copy that is lost, so drafts are checked by numbers that are left in memory. It also
    cuts off tokens of no drafts, which ends in an error.
    """
    from vllm.v1.sample import rejection_sampler  # vllm is an extra

    cut = rejection_sampler.apply_top_k_top_p
    rejection_sampler.expand_batch_to_tokens = for_each_draft
    rejection_sampler.apply_top_k_top_p = lambda logits, k, p: cut(logits, k, p) if len(logits) else logits


def for_each_draft(values: torch.Tensor, ends: torch.Tensor, count: int, replace_from=0, replace_to=0) -> torch.Tensor:
    """The value of a request for each of its drafts. Values [a, b] and ends [2, 5] give [a, a, b, b, b]."""
    values = torch.where(values == replace_from, replace_to, values).to(values.dtype)
    return values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=count)


def drafts_from_the_text(num_tokens: int) -> dict:
    """vLLM's `speculative_config`: the tokens that followed the last one to three tokens earlier in the text."""
    return {
        "method": "ngram",
        "num_speculative_tokens": num_tokens,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
