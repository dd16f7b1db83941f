"""How many bytes a rank sends in a step of a layout, over which links, and how long the step takes at given rates.

A rank in a ring of n sends (n - 1) / n of the whole tensor in an all-gather or a reduce-scatter, and twice that in an
all-reduce. A test counts the collectives of the sharded axes and of tp under a fake process group. The bytes of sp and
ep are read from the code, and not counted.
"""

from dataclasses import dataclass, replace

from trainer.planning.plan_inputs import Machine
from trainer.planning.plan_memory import BF16, FP32, Layout, Sizes, adapter_of_rank
from trainer.planning.predicted_memory import MASTERS, MOMENTS


@dataclass(frozen=True)
class Sent:
    """Bytes of one rank per step over one axis. Two neighbours in the group of `size` are `inner` ranks apart."""

    axis: str
    bytes: float
    size: int
    inner: int
    overlaps: bool  # it travels while the GPU computes

    def rate(self, machine: Machine) -> float:
        """NVLink within a node. Between nodes, a collective uses the network cards of all its ranks in a node.

        Tokens of sp and ep leave a node through the card of their own rank.
        """
        if self.size * self.inner <= machine.gpus_per_node:
            return machine.node_rate
        if self.axis in ("sp", "ep"):
            return machine.network_rate
        return min(machine.node_rate, machine.network_rate * max(1, machine.gpus_per_node // self.inner))


def gathered(size: float, n: int) -> float:
    """Bytes that a rank sends in an all-gather or reduce-scatter of `size` bytes over n ranks."""
    return size * (n - 1) / n


def shard_traffic(layout: Layout, num_params: float, num_micro_batches: int, num_trained: float) -> list[Sent]:
    """Bytes of weights and gradients in a step, over the ranks that share them. The numbers are of one tp rank."""
    p, trained, m, stage, tp = num_params, num_trained, num_micro_batches, layout.stage, layout.tp
    n, replicas = layout.num_shards, layout.dp_replicate
    if layout.backend == "fsdp2":
        times = 2 if stage == 3 else 1  # forward and backward
        reductions = 1 if layout.reduce_once else m
        sent = [Sent("weights", gathered(times * m * BF16 * p, n), n, tp, True)]
        sent.append(Sent("gradients", gathered(reductions * FP32 * trained, n), n, tp, True))
        sent.append(Sent("replicas", 2 * gathered(FP32 * trained / n, replicas), replicas, n * tp, False))
        return sent
    everyone = n * replicas
    if stage == 3:
        forward, backward = gathered(m * BF16 * p, everyone), gathered(m * BF16 * p, n)  # hpZ: from the own group
        reduced = Sent("gradients", gathered(m * FP32 * trained, everyone), everyone, tp, True)
        return [Sent("weights", forward, everyone, tp, True), Sent("weights", backward, n, tp, True), reduced]
    # ZeRO 2 reduces each part to its rank in every micro-batch, ZeRO 1 once a step; ZeRO 0 all-reduces
    times = {0: 2, 1: 1, 2: m}[stage]
    reduced = Sent("gradients", gathered(times * FP32 * trained, n), n, tp, stage == 2)
    return [reduced, Sent("weights", gathered(BF16 * trained, n) if stage else 0.0, n, tp, False)]


def layer_traffic(layout: Layout, s: Sizes, tokens: int, num_micro_batches: int) -> list[Sent]:
    """What layers send over tp, sp and ep for `tokens` local tokens a micro-batch. Checkpointing repeats forward."""
    times = num_micro_batches * s.num_layers * tokens
    forwards, passes = (2, 3) if layout.checkpointing else (1, 2)
    hidden = BF16 * s.hidden
    # an all-reduce after attention and one after the MLP, in each pass; one of the embedding and one of the head
    reductions = 2 * passes * times + 2 * num_micro_batches * tokens
    sent = [Sent("tp", reductions * 2 * gathered(hidden, layout.tp), layout.tp, 1, False)]
    block = BF16 * (s.key_width + s.value_width) / layout.tp
    # keys and values travel in each pass; the backward pass also sends sums of their gradients in fp32
    ring = block * (layout.sp - 1) * (forwards + 1) + 2 * block * layout.sp * (layout.sp > 1)
    sent.append(Sent("sp", times * ring, layout.sp, layout.tp, True))
    routed = times * passes * 2 * gathered(hidden * s.experts_per_token, layout.ep)
    return [*sent, Sent("ep", routed, layout.ep, layout.tp, False)]


def traffic(layout: Layout, s: Sizes, tokens: int, num_micro_batches: int) -> list[Sent]:
    """All that a rank sends in a step. With experts sharded over ep, fewer ranks gather their weights."""
    whole = (s.num_params - s.expert_params) / layout.tp
    adapter = adapter_of_rank(s, layout.tp)
    held, trained = (whole + adapter, adapter) if adapter else (whole, whole)
    sent = shard_traffic(layout, held, num_micro_batches, trained)
    parts = layout.ep * layout.tp
    of_experts = replace(layout, dp_shard=max(1, layout.num_shards // layout.ep), sp=1, tp=parts)
    experts = s.expert_params / parts
    sent += shard_traffic(of_experts, experts, num_micro_batches, 0.0 if adapter else experts)
    return [part for part in sent + layer_traffic(layout, s, tokens, num_micro_batches) if part.bytes]


def step_seconds(layout: Layout, s: Sizes, machine: Machine, micro_tokens: int, num_micro: int, length: int) -> float:
    """The time of a step in which each rank computes `num_micro` micro-batches of `micro_tokens` tokens.

    Traffic that overlaps with computing counts only where it takes longer. `length` is the mean length of a document.
    """
    flops = s.flops_per_token(length) * micro_tokens * num_micro / layout.tp
    compute = flops * (4 / 3 if layout.checkpointing else 1) / machine.flops
    sent = traffic(layout, s, micro_tokens, num_micro)
    hidden = sum(part.bytes / part.rate(machine) for part in sent if part.overlaps)
    seconds = max(compute, hidden) + sum(part.bytes / part.rate(machine) for part in sent if not part.overlaps)
    if (
        layout.offload
    ):  # weights go up in every pass, gradients go down, and Adam reads and writes its states on the host
        held = s.num_params / layout.tp / layout.num_shards
        seconds += held * (2 * FP32 * num_micro + FP32 * num_micro + 2 * (MASTERS + MOMENTS)) / machine.host_rate
    return seconds
