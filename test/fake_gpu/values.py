"""Real numbers on the fake GPU: each operator of torch runs its CUDA kernel, which does nothing, and then the CPU's on the same memory.

So torch's C++ code for CUDA is executed as on a GPU: dispatch, checks, allocations, waits. And control flow that depends on data is
right: losses, samples, counts, checks for NaN. `install` is called once in a process, before tensors are made.

What has no kernel for the CPU has a formula in FORMULAS, or is in `WITHOUT` after a run: its results are what the memory held.
Kernels that Triton compiles are not reached.
"""

import collections
import ctypes
import itertools

import torch
from torch.utils._pytree import tree_leaves, tree_map

# operators that make or view memory, or only copy it: the CUDA code does all of it
NO_VALUES = {
    "empty", "empty_strided", "empty_like", "new_empty", "as_strided", "view", "_reshape_alias", "set_", "resize_", "record_stream",
    "_local_scalar_dense", "is_pinned", "_pin_memory", "unfold", "_cudnn_init_dropout_state", "_nested_view_from_buffer", "is_set_to",
    "view_as_real", "_efficient_attention_forward", "_efficient_attention_backward", "_conv_depthwise2d", "_conv_depthwise2d_backward", "view_as_complex", "_conj_physical", "_has_compatible_shallow_copy_type", "_unsafe_view",
}  # fmt: skip
# operators whose output's size depends on values: the CUDA code would read the size from memory that no kernel wrote
SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
ALSO = ["aten::copy_", "aten::convolution", "aten::convolution_backward"]  # registered for all devices at once
WITHOUT = set()
# how often each product was called with which type: what runs on a GPU's matrix units, or would
MULTIPLY = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "convolution", "addmv", "mv", "dot"}
TAKES_SUMMAND = {"addmm", "baddbmm", "addmv"}
PRODUCTS = collections.Counter()
EMPTY = torch.empty(0)
LIBRARIES = []


def host(value):
    """The same memory as a tensor of the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if (
        not isinstance(value, torch.Tensor)
        or not value.is_cuda
        or type(value) not in (torch.Tensor, torch.nn.Parameter)
    ):
        return value
    storage = value.untyped_storage()
    if not storage.nbytes():
        return EMPTY.to(value.dtype).as_strided(value.shape, value.stride())
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=value.dtype, count=storage.nbytes() // value.dtype.itemsize)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def seeded(device):
    """A seed from the state of the GPU's generator, so that it moves with each use and is restored with it."""
    generator = torch.cuda.default_generators[device]
    return (generator.initial_seed() * 1_000_003 + generator.get_offset()) % 2**63


def on_host(op, args, kwargs, device):
    """Run `op` on the memory of its arguments."""
    args, kwargs = tree_map(host, (args, kwargs))
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return op(*args, **kwargs)
    if "generator" in kwargs:
        kwargs = kwargs | {"generator": None}
    state = torch.get_rng_state()
    torch.manual_seed(seeded(device))
    try:
        return op(*args, **kwargs)
    finally:
        torch.set_rng_state(state)


def override(op, name, kernel):
    formula = FORMULAS.get(name)
    base = name.split("::")[1].split(".")[0]
    packet = getattr(getattr(torch.ops, name.split("::")[0]), base)  # takes the overload for a number
    written = [
        place
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    names = [argument.name for argument in op._schema.arguments]
    tensors = [
        place
        for place, argument in enumerate(op._schema.arguments)
        if str(argument.type) in ("Tensor", "Optional[Tensor]")
    ]

    def has_numbers(args):
        return any(place < len(args) and isinstance(args[place], (bool, int, float)) for place in tensors)

    def with_tensors(args):
        """A number in the place of a tensor, as a tensor that changes no type."""
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        return [
            torch.ops.aten.scalar_tensor(a, dtype=torch.result_type(first, a), device="cpu")
            if place in tensors and isinstance(a, (bool, int, float))
            else a
            for place, a in enumerate(args)
        ]

    def run(keyset, *args, **kwargs):
        device = torch.cuda.current_device()
        if base in MULTIPLY or "attention" in base:
            factor = next(a for a in args[int(base in TAKES_SUMMAND) :] if isinstance(a, torch.Tensor))
            PRODUCTS[f"{base} {str(factor.dtype).removeprefix('torch.')}"] += 1
        if name == "aten::pow.Scalar":  # its code calls others with a number in GPU memory, which Python cannot take
            return torch.pow(
                torch.full((), args[0], dtype=torch.result_type(args[1], args[0]), device=args[1].device), args[1]
            )
        if base in SIZED_BY_VALUES:
            result = on_host(op, args, kwargs, device)
            args[0].reshape(-1)[:1].sum().item()  # the wait of the CUDA code
            return tree_map(lambda x: x.to(f"cuda:{device}") if isinstance(x, torch.Tensor) else x, result)
        targets = [args[place] if place < len(args) else kwargs.get(names[place]) for place in written]
        targets = [t for t in tree_leaves(targets) if isinstance(t, torch.Tensor) and t.is_cuda]
        before = [host(t).clone() for t in targets]
        result = kernel.call_boxed(keyset, *with_tensors(args), **kwargs)
        # the CUDA code may have called other operators, which wrote to a target already
        for target, old in zip(targets, before, strict=True):
            if target.shape == old.shape:
                host(target).copy_(old)
        if formula is not None:
            formula(result, *args, **kwargs)
            return result
        try:
            right = on_host(packet if has_numbers(args) else op, args, kwargs, device)
        except (NotImplementedError, RuntimeError) as error:
            WITHOUT.add(f"{name}: {str(error).splitlines()[0][:80]}")
            return result
        if not targets:
            for fake, real in zip(tree_leaves(result), tree_leaves(right), strict=True):
                if isinstance(fake, torch.Tensor) and fake.is_cuda and fake.numel():  # an unused buffer is empty
                    host(fake).copy_(real)
        return result

    return run


def scores_of(query, key, causal, scale, bias, left):
    """Q K^T scale in fp32 with its masks, and the keys, one for each head of queries. Shapes: (batch, heads, length, width)."""
    key = key.float().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.float() @ key.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias.float()
    after = torch.arange(scores.shape[-1]) - torch.arange(scores.shape[-2])[:, None]
    if causal:
        scores = scores.masked_fill(after > 0, float("-inf"))
    if left is not None and left >= 0:
        scores = scores.masked_fill(-after > left, float("-inf"))
    return scores, key


def attention(query, key, value, causal, scale=None, bias=None, left=None):
    """softmax(Q K^T scale) V and the log-sum-exp of its rows. `left`: the window of keys before a query."""
    scores, _ = scores_of(query, key, causal, scale or query.shape[-1] ** -0.5, bias, left)
    value = value.float().repeat_interleave(query.shape[1] // value.shape[1], 1)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def attention_backward(grad, query, key, value, out, sums, causal, scale=None, bias=None, left=None):
    """The gradients of `attention` for queries, keys and values: dS = P (dP - sum(dO O)) scale.

    As in the kernels, P comes from the log-sum-exps that are given, and O is given. In ring attention, and for shared prompts,
    both are those of all keys, and these keys are a part of them.
    """
    scale, heads = scale or query.shape[-1] ** -0.5, key.shape[1]
    scores, wide_key = scores_of(query, key, causal, scale, bias, left)
    wide_value = value.float().repeat_interleave(query.shape[1] // heads, 1)
    sums = sums[..., : scores.shape[-2], None].float()
    grad, weights = grad.float(), torch.where(sums.isinf(), 0.0, (scores - sums).exp())  # rows without a key have none
    grad_scores = weights * (grad @ wide_value.transpose(-1, -2) - (grad * out.float()).sum(-1, keepdim=True)) * scale
    grads = grad_scores @ wide_key, grad_scores.transpose(-1, -2) @ query.float(), weights.transpose(-1, -2) @ grad
    return grads[0], *(x.unflatten(1, (heads, -1)).sum(2) for x in grads[1:])


def fill(results, values):
    for result, value in zip(results, values, strict=True):
        host(result).copy_(value)


def flash_forward(result, query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    fill(result[:2], attention(host(query), host(key), host(value), is_causal, scale))


def flash_backward(result, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                   philox_seed, philox_offset, *, scale=None):  # fmt: skip
    fill(result[:3], attention_backward(*map(host, (grad_out, query, key, value, out, logsumexp)), is_causal, scale))


def efficient_forward(
    result, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    out, sums = attention(host(query), host(key), host(value), is_causal, scale, host(attn_bias))
    fill(result[:1], (out,))
    if compute_log_sumexp:
        host(result[1])[..., : sums.shape[-1]].copy_(sums)


def efficient_backward(result, grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
                       grad_input_mask, is_causal=False, *, scale=None):  # fmt: skip
    given = map(host, (grad_out, query, key, value, out, logsumexp))
    grads = attention_backward(*given, is_causal, scale, host(attn_bias))
    fill(result[:3], grads)


def rows_of(bounds_q, bounds_k, batch):
    """Each row of a batch of FlashAttention: where its queries and its keys are."""
    if bounds_q is None:
        return [(place, place) for place in range(batch)]
    bounds = [host(x).tolist() for x in (bounds_q, bounds_q if bounds_k is None else bounds_k)]
    return list(zip(*([slice(*pair) for pair in itertools.pairwise(b)] for b in bounds), strict=True))


def heads_first(tensor, place):
    return tensor[place].transpose(0, 1)[None]


def varlen_forward(result, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
                   scale=None, window_size_left=None, window_size_right=None, **unused):  # fmt: skip
    query, key, value, out, sums = map(host, (query, key, value, *result[:2]))
    causal = is_causal or window_size_right == 0
    for q, k in rows_of(cum_seq_q, cum_seq_k, query.shape[0]):
        parts = heads_first(query, q), heads_first(key, k), heads_first(value, k)
        found, found_sums = attention(*parts, causal, scale, left=window_size_left)
        out[q] = found[0].transpose(0, 1).to(out.dtype)
        if cum_seq_q is None:
            sums[q, :, : found_sums.shape[-1]] = found_sums[0]
        else:
            sums[:, q] = found_sums[0]


def varlen_backward(result, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None, **more):  # fmt: skip
    grad_out, query, key, value, out, sums = map(host, (grad_out, query, key, value, out, logsumexp))
    causal = is_causal or window_size_right == 0
    for q, k in rows_of(cum_seq_q, cum_seq_k, query.shape[0]):
        parts = heads_first(grad_out, q), heads_first(query, q), heads_first(key, k), heads_first(value, k)
        own_sums = sums[q] if cum_seq_q is None else sums[:, q]
        grads = attention_backward(*parts, heads_first(out, q), own_sums[None], causal, scale, left=window_size_left)
        for target, place, grad in zip(map(host, result[:3]), (q, k, k), grads, strict=True):
            target[place] = grad[0].transpose(0, 1).to(target.dtype)


def integer_histogram(result, tensor, bins, min, max):
    host(result).copy_(torch.histc(host(tensor).double(), bins, min, max))


def log_sigmoid_backward(result, grad_output, tensor, buffer, **unused):
    """The CUDA code keeps no buffer, which the CPU's would read."""
    host(result).copy_(host(grad_output) * torch.sigmoid(-host(tensor).float()))


def four_bits_out(result, tensor, absmax, blocksize, quant_type, shape, dtype, out):
    tensor, absmax, out = map(host, (tensor, absmax, out))
    out.copy_(torch.ops.bitsandbytes.dequantize_4bit(tensor, absmax, blocksize, quant_type, shape, dtype))


def blocks_out(result, tensor, absmax, code, blocksize, dtype, out):
    tensor, absmax, code, out = map(host, (tensor, absmax, code, out))
    out.copy_(torch.ops.bitsandbytes.dequantize_blockwise(tensor, absmax, code, blocksize, dtype))


FORMULAS = {
    "bitsandbytes::dequantize_4bit.out": four_bits_out,
    "bitsandbytes::dequantize_blockwise.out": blocks_out,
    "aten::histc": integer_histogram,
    "aten::log_sigmoid_backward": log_sigmoid_backward,
    "aten::log_sigmoid_backward.grad_input": log_sigmoid_backward,
    "aten::_scaled_dot_product_flash_attention": flash_forward,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient_forward,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_flash_attention_forward": varlen_forward,
    "aten::_flash_attention_backward": varlen_backward,
}


def install(namespace="aten"):
    """Give every operator of a package that has a CUDA kernel its values."""
    library = torch.library.Library(namespace, "IMPL")
    also = ALSO if namespace == "aten" else []
    for name in sorted(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")) + also:
        if not name.startswith(f"{namespace}::"):
            continue
        own = name.removeprefix(f"{namespace}::")
        base, _, overload = own.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        op = getattr(packet, overload or "default", None)
        if op is None or base in NO_VALUES:
            continue
        kernel = torch.library.get_kernel(name, "CUDA")
        library.impl(own, override(op, name, kernel), "CUDA", with_keyset=True, allow_override=True)
    LIBRARIES.append(library)
