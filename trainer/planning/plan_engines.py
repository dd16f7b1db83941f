"""What a rollout engine adds to a plan: memory of its weights and cache, bytes and seconds of a weight sync, idle time.

A test compares the sizes with real engines, and the bytes with those that runs log as `sync_bytes` and `sync_sent_bytes`.
Seconds and idle shares follow from the rates that the user gives.
"""

import math
import random
from dataclasses import dataclass
from typing import Optional

from trainer.metrics import counted
from trainer.planning.idle_share import Idle, simulated
from trainer.planning.plan_inputs import GB, Machine, Rollouts
from trainer.planning.plan_memory import BF16, FP32, Layout, Sizes
from trainer.planning.plan_traffic import Sent, gathered
from trainer.rollout.engines.weight_stream import WHOLE, Head

STALE_COPIES = 2  # of a machine: the weights that the threads load, and those that the next sync gathers
SIMULATED = 20  # rollouts


@dataclass(frozen=True)
class EngineNeeds:
    """Bytes. `generating` and `training` are on the GPU of a training rank in these two phases. `host` is its host memory."""

    weights: float  # a whole copy
    generating: float
    training: float
    host: float
    on_engine: float  # weights on each GPU of an engine
    server_host: float  # of a process of a server
    cache_tokens: float  # that the cache of an engine holds
    problem: Optional[str] = None


def width_of(dtype: str) -> int:
    return FP32 if dtype == "fp32" else BF16


def cache_bytes(s: Sizes, width: int) -> int:
    """Bytes that the cache of an engine needs for one token, in all layers: keys and values of all heads.

    Multi-head latent attention needs `kv_lora_rank` + `qk_rope_head_dim` values in a layer, in transformers and in vLLM.
    """
    text = s.config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        return width * s.num_layers * (text.kv_lora_rank + text.qk_rope_head_dim)
    return width * s.num_layers * (s.key_width + s.value_width)


def engine_needs(s: Sizes, machine: Machine, rollouts: Rollouts, dtype: str = "bf16") -> EngineNeeds:
    """The memory of an engine. It does not depend on the layout of training.

    hf: a copy of the weights w on every rank, and a cache for `slots` responses of full length. In lock step, it is only
    there while a rollout is generated. With staleness it always is. Then a machine has `STALE_COPIES` w in host memory, of
    which each rank counts its share.
    vllm: an engine of N ranks takes `memory_share` of each GPU, w / N of it for weights. While the policy trains, it sleeps
    at level 2, which keeps no weights, not even on the host. Servers: the same share on GPUs of their own, all the time.
    Deltas need w in host memory at both ends.
    sglang: servers, too. A machine with ranks that have servers writes w to `--sync_folder` (`folder_copies`).
    """
    width = width_of(dtype)
    w, n = width * s.num_params, rollouts.engine_tp
    stale = STALE_COPIES * w / machine.gpus_per_node * bool(rollouts.max_staleness)
    if rollouts.engine == "hf":
        tokens = rollouts.slots * rollouts.longest
        size = w + tokens * cache_bytes(s, width)
        return EngineNeeds(w, size, size * bool(rollouts.max_staleness), stale, w, 0.0, tokens)
    share = rollouts.memory_share * machine.gpu_memory
    on_engine = w / n
    tokens = (share - on_engine) * min(n, heads_of_cache(s)) / cache_bytes(s, width)
    problem = None
    if tokens < rollouts.longest:
        problem = f"an engine of {counted(n, 'GPU')} needs {on_engine / GB:.1f} GB on each for weights, and more for a response"
        problem += f"; its share is {share / GB:.1f}"
    if rollouts.engine == "vllm":
        return EngineNeeds(w, share, 0.0, 0.0, on_engine, 0.0, max(tokens, 0.0), problem)
    copy = w * rollouts.sync_deltas
    return EngineNeeds(w, 0.0, 0.0, stale + copy, on_engine, copy, max(tokens, 0.0), problem)


def folder_copies(machine: Machine, rollouts: Rollouts) -> int:
    """Copies of the weights in the part of --sync_folder that a machine writes, at most.

    In lock step there is one. With staleness, each rank may still read a version of its own while another one is written.
    """
    readers = -(-min(rollouts.servers, machine.gpus) // machine.nodes)
    return 1 + min(rollouts.max_staleness, readers - 1)


def writing_machines(machine: Machine, rollouts: Rollouts) -> int:
    """Machines with a rank that has servers: rank r of R has the servers r, r + R, and so on."""
    return -(-min(rollouts.servers, machine.gpus) // machine.gpus_per_node)


def heads_of_cache(s: Sizes) -> int:
    """Over how many ranks an engine can divide its cache. More ranks hold the same heads, and a latent cache is not divided."""
    text = s.config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        return 1
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def message_bytes(s: Sizes, width: int, changed: Optional[float] = None) -> int:
    """Bytes of the messages of one sync to one server. `changed` is the share of values that changed. None: all are sent.

    A changed value needs its own bytes and 2 for its place in a block. A block of 65536 values needs 4 more. A tensor
    whose changes need as many bytes is sent whole (`weight_stream.py`). Changes are spread evenly over all tensors.
    """
    dtype, total = "float32" if width == FP32 else "bfloat16", 0
    for size in s.tensors:
        whole = Head("", dtype, [size], WHOLE).num_bytes()
        count = whole if changed is None else Head("", dtype, [size], math.ceil(changed * size)).num_bytes()
        total += min(whole, count)
    return total


def received_bytes(layout: Layout, s: Sizes, rollouts: Rollouts, width: int) -> Sent:
    """What a training rank receives in a sync from other ranks, at most: what it does not hold of the weights it needs."""
    needed = width * s.num_params / (rollouts.engine_tp if rollouts.engine == "vllm" else 1)
    return Sent("sync", gathered(needed, layout.num_parts), layout.num_parts, 1, False)


def sync_seconds(layout: Layout, s: Sizes, machine: Machine, rollouts: Rollouts, dtype: str = "bf16") -> float:
    """Seconds of a sync: gathering, copies between GPU and host memory, and messages to the servers of the busiest rank.

    In place of messages, sglang has a folder.
    """
    width = width_of(dtype)
    gathering = received_bytes(layout, s, rollouts, width)
    seconds = gathering.bytes / gathering.rate(machine)
    if rollouts.max_staleness or rollouts.on_servers:
        seconds += width * s.num_params / machine.host_rate
    if rollouts.engine == "sglang":  # a machine writes, and then all servers read at the same time
        seconds += 2 * width * s.num_params / machine.folder_rate
    elif rollouts.on_servers:
        most = -(-rollouts.servers // machine.gpus)
        seconds += most * rollouts.engine_tp * message_bytes(s, width, rollouts.changed) / machine.network_rate
    return seconds


def at_a_time(rollouts: Rollouts, cache_tokens: float) -> int:
    """Responses that an engine generates at a time: what is asked, and at most those of full length that its cache holds."""
    return max(1, int(min(rollouts.slots, cache_tokens // rollouts.longest)))


def predicted_idle(
    rollouts: Rollouts, machine: Machine, tokens_per_second: float, cache_tokens: float = math.inf
) -> Idle:
    """Idle shares by simulation. `tokens_per_second` is the speed of training, on prompts and responses."""
    chance = random.Random(0)
    drawn = [rollouts.lengths.sample(chance, rollouts.prompts, rollouts.group) for _ in range(SIMULATED)]
    tokens = sum(length for rollout in drawn for group in rollout for length in group) / SIMULATED
    train_time = (tokens + rollouts.prompts * rollouts.group * rollouts.prompt_len) / tokens_per_second
    times = [[[length / rollouts.token_rate for length in group] for group in rollout] for rollout in drawn]
    on_servers, stale = rollouts.on_servers, rollouts.max_staleness > 0
    engines = rollouts.servers if on_servers else machine.gpus // rollouts.engine_tp
    drivers, slots = min(machine.gpus, engines), at_a_time(rollouts, cache_tokens)
    return simulated(
        times, drivers=drivers, slots=engines * slots // drivers, train_time=train_time,
        staleness=rollouts.max_staleness, queue=on_servers and stale, barrier=rollouts.engine == "hf",
        drains=on_servers and stale,
    )  # fmt: skip


def engine_report(
    layout: Layout, s: Sizes, machine: Machine, rollouts: Rollouts, tokens_per_second: float, dtype: str = "bf16"
) -> str:
    """What `plan` prints of the engine, for the quickest layout that fits."""
    found, width = engine_needs(s, machine, rollouts, dtype), width_of(dtype)
    idle, lengths = predicted_idle(rollouts, machine, tokens_per_second, found.cache_tokens), rollouts.lengths
    gathering, slots = received_bytes(layout, s, rollouts, width).bytes, at_a_time(rollouts, found.cache_tokens)
    sizes = [f"{size / GB:.1f} GB" for size in (found.weights, found.generating, found.training, found.host)]
    lines = [
        f"Rollouts by {rollouts.engine}, with the first layout:",
        f"- weights: a copy has {sizes[0]}; each GPU of an engine holds {found.on_engine / GB:.1f} GB",
        f"- a training rank: {sizes[1]} more on its GPU while it generates, {sizes[2]} while it trains, "
        f"and {sizes[3]} more of host memory",
        f"- cache of an engine: {found.cache_tokens:,.0f} tokens, or {found.cache_tokens // rollouts.longest:,.0f} responses "
        f"of full length ({counted(rollouts.longest, 'token')} with the prompt)",
        f"- a sync: {found.weights / GB:.1f} GB; a rank receives {gathering / GB:.1f} GB; "
        f"{sync_seconds(layout, s, machine, rollouts, dtype):.2g} s",
    ]
    if rollouts.engine == "sglang":
        copies, machines = folder_copies(machine, rollouts), writing_machines(machine, rollouts)
        lines.append(
            f"- --sync_folder: {counted(machines, 'node')} with servers {'writes' if machines == 1 else 'each write'} "
            f"{found.weights / GB:.1f} GB a sync, and {'it keeps' if machines == 1 else 'each keeps'} up to "
            f"{copies * found.weights / GB:.1f} GB; {counted(rollouts.servers, 'server')} read {found.weights / GB:.1f} GB each"
        )
    elif rollouts.on_servers:
        sent = message_bytes(s, width, rollouts.changed) * rollouts.engine_tp
        what = "weights" if rollouts.changed is None else f"changes of {rollouts.changed:.1%} of the values"
        lines.append(
            f"- to each of the {counted(rollouts.servers, 'server')}: {sent / GB:.2f} GB of {what}; "
            f"a process of it keeps {found.server_host / GB:.1f} GB in host memory"
        )
    whose = f"the engines {idle.generating:.0%} of the time, training ranks {idle.training:.0%}"
    if not rollouts.on_servers and not rollouts.max_staleness:  # the two take turns on the same GPUs
        whose = f"the GPUs {idle.generating + idle.training - 1:.0%} of the time"
    lines += [
        f"- idle: {whose}; a rollout takes {idle.seconds / SIMULATED:.0f} s (simulated: {counted(rollouts.prompts, 'prompt')} x "
        f"{rollouts.group}, a median of {lengths.median:g} tokens, {counted(slots, 'response')} at a time of "
        f"{rollouts.token_rate:g} tokens/s each)"
    ]
    return "\n".join(lines)
