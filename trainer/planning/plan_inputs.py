"""What a plan starts from: the machine, and what a step trains."""

from dataclasses import dataclass

from trainer.errors import UserError

GB = 1e9
# a GPU and its node, unless flags say otherwise. The rates are what training reaches, not peaks
GPU_MEMORY, HOST_MEMORY = 80, 1000  # GB of one GPU, and of one node
RESERVE = 8  # GB of a GPU for the driver, NCCL and fragments
TFLOPS, NODE_RATE, NETWORK_RATE, HOST_RATE = 400, 300, 40, 20  # bf16 TFLOP/s, and GB/s


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes, rates in bytes or FLOPs per second. `room` is on one GPU, `host_memory` on one node."""

    gpus: int
    nodes: int
    room: float
    host_memory: float
    flops: float
    node_rate: float
    network_rate: float
    host_rate: float

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes


@dataclass(frozen=True)
class Work:
    """What a step trains. `samples` packed samples of `max_len` tokens, `micro` in a forward pass on one rank."""

    samples: int
    micro: int
    max_len: int
    by_tokens: bool = False  # any number of samples can be spread over the ranks
    dtype: str = "bf16"
    has_frozen_copy: bool = False  # such as the reference model of DPO


def machine_of(
    gpus: int, nodes: int = 1, gpu_memory: float = GPU_MEMORY, host_memory: float = HOST_MEMORY,
    reserve: float = RESERVE, tflops: float = TFLOPS, node_rate: float = NODE_RATE,
    network_rate: float = NETWORK_RATE, host_rate: float = HOST_RATE,
) -> Machine:  # fmt: skip
    """A machine with `gpus` GPUs on all `nodes`. Memory is in GB of one GPU and of one node, rates are in GB/s.

    Raises:
        UserError: the nodes do not have equally many GPUs.
    """
    if gpus % nodes:
        raise UserError("--gpus", f"{gpus} is not a multiple of --nodes {nodes}")
    rates = {"node_rate": GB * node_rate, "network_rate": GB * network_rate, "host_rate": GB * host_rate}
    room = GB * (gpu_memory - reserve)
    return Machine(gpus, nodes, room, GB * host_memory, flops=1e12 * tflops, **rates)
