"""What a plan starts from: the machine, and what a step trains."""

from dataclasses import dataclass
from typing import Optional

from trainer.errors import UserError
from trainer.planning.idle_share import Lengths

GB = 1e9
ON_SERVERS = ("vllm_server", "sglang")  # engines on GPUs of their own
# a GPU and its node, unless flags say otherwise. The rates are what training reaches, not peaks
GPU_MEMORY, HOST_MEMORY = 80, 1000  # GB of one GPU, and of one node
RESERVE = 8  # GB of a GPU for the driver, NCCL and fragments
TFLOPS, NODE_RATE, NETWORK_RATE, HOST_RATE = 400, 300, 40, 20  # bf16 TFLOP/s, and GB/s
FOLDER_RATE = 2  # GB/s of a file system


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes, rates in bytes or FLOPs per second.

    `room` is on one GPU without the reserve, `host_memory` on one node.
    """

    gpus: int
    nodes: int
    room: float
    host_memory: float
    flops: float
    node_rate: float
    network_rate: float
    host_rate: float
    gpu_memory: float = 0.0  # of one GPU, with the reserve
    folder_rate: float = GB * FOLDER_RATE  # of a node that writes --sync_folder, or of a server that reads it

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
    num_frozen: int = 0  # further models of this size that are only read, such as a reference or a teacher
    lora_rank: int = 0  # 0: all weights are trained


@dataclass(frozen=True)
class Rollouts:
    """How a run of reinforcement learning generates. Lengths are in tokens."""

    engine: str  # of --rollout_engine
    engine_tp: int  # GPUs of an engine
    servers: int
    memory_share: float  # of a GPU, for vLLM or a server
    slots: int  # responses at a time, of a rank or a server, if its cache holds them
    max_staleness: int
    sync_deltas: bool
    changed_share: float  # of the values, from one sync to the next
    prompts: int  # of a rollout
    group: int  # responses to a prompt
    prompt_len: int
    lengths: Lengths  # of responses
    token_rate: float  # tokens per second of one response, while an engine generates as many as it can

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its longest response."""
        return self.prompt_len + int(self.lengths.longest)

    @property
    def on_servers(self) -> bool:
        return self.engine in ON_SERVERS

    @property
    def changed(self) -> Optional[float]:
        """The share of values that a sync sends. None: whole tensors."""
        return self.changed_share if self.sync_deltas else None


def machine_of(
    gpus: int, nodes: int = 1, gpu_memory: float = GPU_MEMORY, host_memory: float = HOST_MEMORY,
    reserve: float = RESERVE, tflops: float = TFLOPS, node_rate: float = NODE_RATE,
    network_rate: float = NETWORK_RATE, host_rate: float = HOST_RATE, folder_rate: float = FOLDER_RATE,
) -> Machine:  # fmt: skip
    """A machine with `gpus` GPUs on all `nodes`. Memory is in GB of one GPU and of one node, rates are in GB/s.

    Raises:
        UserError: the nodes do not have equally many GPUs.
    """
    if gpus % nodes:
        raise UserError("--gpus", f"{gpus} is not a multiple of --nodes {nodes}")
    rates = {"node_rate": GB * node_rate, "network_rate": GB * network_rate, "host_rate": GB * host_rate}
    rates["folder_rate"] = GB * folder_rate
    room = GB * (gpu_memory - reserve)
    return Machine(gpus, nodes, room, GB * host_memory, flops=1e12 * tflops, **rates, gpu_memory=GB * gpu_memory)
