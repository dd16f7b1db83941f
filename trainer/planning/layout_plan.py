"""`plan`: which layouts of a model fit a machine, what each phase needs, and how long a step takes at given rates.

python -m trainer.cli.plan MODEL --gpus 64 --gpu_memory 80 --nodes 8 --host_memory 2000

Nothing is downloaded but the config, and no weight is read. Predicted memory and bytes are explained in docs/plan.md.
"""

import argparse
import itertools
import math
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from trainer.errors import UserError
from trainer.model_folders.model_folder import read_config
from trainer.planning.plan_memory import Layout, Needs, Sizes, needs, refusal, sizes_of
from trainer.planning.plan_traffic import Machine, step_seconds, traffic

GB = 1e9
# what a GPU and its node have, unless the flags say otherwise. The rates are what training reaches, not peaks
GPU_MEMORY, HOST_MEMORY, RESERVE = 80, 1000, 8  # GB of one GPU and of one node, and of a GPU what libraries take
TFLOPS, NODE_RATE, NETWORK_RATE, HOST_RATE = 400, 300, 40, 20  # bf16 TFLOP/s, and GB/s
BACKENDS = (("fsdp2", 3), ("fsdp2", 2), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3))
MIN_LOCAL_TOKENS = 1024  # of a sequence that is split over sp: below, a ring of tiny blocks only waits
SHOWN = 10


@dataclass(frozen=True)
class Work:
    """What a step trains. `samples` packed samples of `max_len` tokens, `micro` of them in a forward pass on one rank."""

    samples: int
    micro: int
    max_len: int
    by_tokens: bool = False  # any number of samples can be shared out over the ranks
    dtype: str = "bf16"
    has_frozen_copy: bool = False  # such as the reference model of DPO


@dataclass(frozen=True)
class Choice:
    """A layout with its prediction. `problem` says why it cannot run, or is None."""

    layout: Layout
    needs: Needs
    sent: float  # bytes of a rank per step
    seconds: float
    problem: str | None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.cli.plan",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="model folder, config.json, or hub name in the cache")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of all nodes")
    parser.add_argument("--gpu_memory", type=float, default=GPU_MEMORY, help="GB of one GPU")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes")
    parser.add_argument("--host_memory", type=float, default=HOST_MEMORY, help="GB of one node")
    parser.add_argument("--max_len", type=int, default=4096, help="tokens of a packed sample")
    parser.add_argument("--train_batch_size", type=int, default=128, help="samples per step, over all ranks")
    parser.add_argument("--micro_train_batch_size", type=int, default=1, help="samples per forward pass on one rank")
    parser.add_argument("--reserve", type=float, default=RESERVE, help="GB of a GPU for the driver, NCCL and fragments")
    parser.add_argument("--tflops", type=float, default=TFLOPS, help="bf16 TFLOP/s that a GPU reaches, not its peak")
    parser.add_argument("--node_rate", type=float, default=NODE_RATE, help="GB/s of a GPU to others in its node")
    parser.add_argument("--network_rate", type=float, default=NETWORK_RATE, help="GB/s of a GPU to other nodes")
    parser.add_argument(
        "--host_rate", type=float, default=HOST_RATE, help="GB/s between a GPU and host memory, and Adam there"
    )
    return parser


def layouts(machine: Machine, has_experts: bool, work: Work) -> list[Layout]:
    """Every layout that is worth a look. tp stays within a node."""
    powers = [2**k for k in range(20)]
    tps = [tp for tp in powers if machine.gpus_per_node % tp == 0]
    sps = [sp for sp in powers if machine.gpus % sp == 0 and (sp == 1 or work.max_len // sp >= MIN_LOCAL_TOKENS)]
    replicas = [1, machine.nodes] if machine.nodes > 1 else [1]
    eps = [ep for ep in powers if machine.gpus % ep == 0] if has_experts else [1]
    found = []
    for (backend, stage), tp, sp, replicate, ep in itertools.product(BACKENDS, tps, sps, replicas, eps):
        shard, rest = divmod(machine.gpus, tp * sp * replicate)
        if rest or shard == 0 or (backend == "deepspeed" and (ep > 1 or (replicate > 1 and stage < 3))):
            continue
        accumulates = work.samples > work.micro * replicate * shard
        for offload, checkpointing, once in itertools.product((False, True), repeat=3):
            if offload and (backend, stage) != ("fsdp2", 3):
                continue
            if once and (backend != "fsdp2" or offload or not accumulates):
                continue
            found.append(Layout(backend, stage, replicate, shard, sp, tp, ep, offload, checkpointing, once))
    return found


def judge(layout: Layout, s: Sizes, machine: Machine, work: Work, model: torch.nn.Module) -> Choice:
    """Predict memory, bytes and time of one layout."""
    tokens = work.micro * work.max_len // layout.sp
    num_micro, rest = divmod(work.samples, layout.dp * work.micro)
    if work.by_tokens:
        num_micro, rest = num_micro + bool(rest), 0
    found = needs(layout, s, tokens, work.dtype, work.has_frozen_copy)
    room, host_room = machine.room, machine.host_memory / machine.gpus_per_node
    problem = refusal(layout, s, model)
    if not problem and (rest or not num_micro):
        unit = layout.dp * work.micro
        problem = f"--train_batch_size {work.samples} is no multiple of {unit} = dp x micro-batch"
    for phase in ("load", "step", "save"):
        if not problem and getattr(found, phase) > room:
            problem = f"{phase} needs {getattr(found, phase) / GB:.1f} GB of a GPU's {room / GB:.1f}"
    if not problem and found.host > host_room:
        problem = f"a rank needs {found.host / GB:.1f} GB of host memory; its share of a node is {host_room / GB:.1f}"
    num_micro = max(1, num_micro)
    sent = sum(part.bytes for part in traffic(layout, s, tokens, num_micro))
    return Choice(layout, found, sent, step_seconds(layout, s, machine, tokens, num_micro, work.max_len), problem)


def describe(layout: Layout) -> str:
    parts = [f"{layout.backend} {layout.stage}", f"dp {layout.dp}"]
    sizes = {"sp": layout.sp, "tp": layout.tp, "ep": layout.ep}
    parts += [f"in {layout.dp_replicate} replicas"] * (layout.dp_replicate > 1)
    parts += [f"{name} {size}" for name, size in sizes.items() if size > 1]
    parts += ["offload"] * layout.offload + ["checkpointing"] * layout.checkpointing
    return ", ".join(parts + ["reduce once"] * layout.reduce_once)


def table(choices: list[Choice], work: Work) -> str:
    tokens = work.samples * work.max_len
    rows = ["| Layout | load | step | save | host a rank | sent a step | step time | tokens/s |"]
    rows.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for choice in choices:
        n, size = choice.needs, [f"{value / GB:.1f} GB" for value in (choice.needs.load, choice.needs.step)]
        size += [f"{n.save / GB:.1f} GB", f"{n.host / GB:.1f} GB", f"{choice.sent / GB:.1f} GB"]
        rate = f"{choice.seconds:.1f} s", f"{tokens / choice.seconds:,.0f}"
        rows.append(f"| {describe(choice.layout)} | {' | '.join([*size, *rate])} |")
    return "\n".join(rows)


def layout_flags(layout: Layout) -> dict:
    """The values of the flags of a layout."""
    return {
        "backend": layout.backend, "zero_stage": layout.stage, "dp_replicate_size": layout.dp_replicate,
        "tensor_parallel_size": layout.tp, "ring_attn_size": layout.sp, "expert_parallel_size": layout.ep,
        "adam_offload": layout.offload, "gradient_checkpointing": layout.checkpointing, "reduce_once": layout.reduce_once,
    }  # fmt: skip


def as_text(layout: Layout) -> str:
    """The flags of a layout on a command line, without those that have their default."""
    usual = layout_flags(Layout("", -1))
    used = {name: value for name, value in layout_flags(layout).items() if value != usual[name]}
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in used.items())


def command(layout: Layout, machine: Machine, work: Work, model: str) -> str:
    """The command line of a layout, on each node."""
    flags = ["torchrun", f"--nproc_per_node {machine.gpus_per_node}"]
    if machine.nodes > 1:
        flags += [f"--nnodes {machine.nodes}", "--rdzv_backend c10d", "--rdzv_endpoint FIRST_NODE:29500"]
    flags += ["-m trainer.cli.train_sft", as_text(layout), "--packing_samples", f"--max_len {work.max_len}"]
    flags += [f"--train_batch_size {work.samples}", f"--micro_train_batch_size {work.micro}", f"--pretrain {model}"]
    return " ".join([*flags, "--dataset DATA --output_dir RUN"])


def why_not(choices: list[Choice]) -> str:
    """For each backend and stage, the layout without a fit that needs least, and why it does not fit."""
    lines = []
    for backend, stage in BACKENDS:
        kinds = {}
        for choice in (c for c in choices if (c.layout.backend, c.layout.stage) == (backend, stage) and c.problem):
            kind = choice.problem.split(" ")[0]
            if kind not in kinds or choice.needs.gpu < kinds[kind].needs.gpu:
                kinds[kind] = choice
        lines += [f"- {describe(choice.layout)}: {choice.problem}" for choice in kinds.values()]
    return "\n".join(lines)


def make_plan(model: torch.nn.Module, machine: Machine, work: Work) -> list[Choice]:
    """All layouts, the quickest first. Of layouts within 2 % of each other, the one that sends least."""
    s = sizes_of(model)
    found = [judge(layout, s, machine, work, model) for layout in layouts(machine, s.expert_params > 0, work)]
    return sorted(found, key=lambda choice: (round(math.log(choice.seconds, 1.02)), choice.sent))


def machine_of(
    gpus: int, nodes: int = 1, gpu_memory: float = GPU_MEMORY, host_memory: float = HOST_MEMORY,
    reserve: float = RESERVE, tflops: float = TFLOPS, node_rate: float = NODE_RATE,
    network_rate: float = NETWORK_RATE, host_rate: float = HOST_RATE,
) -> Machine:  # fmt: skip
    """A machine of `gpus` GPUs on all `nodes`. Memory is in GB of one GPU and of one node, rates are in GB/s.

    Raises:
        UserError: the nodes do not have equally many GPUs.
    """
    if gpus % nodes:
        raise UserError("--gpus", f"{gpus} is not a multiple of --nodes {nodes}")
    rates = {"node_rate": GB * node_rate, "network_rate": GB * network_rate, "host_rate": GB * host_rate}
    room = GB * (gpu_memory - reserve)
    return Machine(gpus, nodes, room, GB * host_memory, flops=1e12 * tflops, **rates)


def report(model: torch.nn.Module, name: str, machine: Machine, gpu_memory: float, work: Work) -> str:
    """What `plan` prints. `name` is MODEL on the command line; `gpu_memory` counts the reserve too (GB)."""
    s, choices = sizes_of(model), make_plan(model, machine, work)
    fits, unfit = [c for c in choices if not c.problem], [c for c in choices if c.problem]
    parts = [
        f"{s.num_params / 1e9:.2f} billion parameters, {s.active_params / 1e9:.2f} of them for each token; "
        f"{machine.gpus} GPUs of {gpu_memory:g} GB on {machine.nodes} nodes; "
        f"{work.samples} packed samples of {work.max_len} tokens a step",
        f"{len(fits)} of {len(choices)} layouts fit. The quickest:",
        table(fits[:SHOWN], work) if fits else "none",
        *([f"{n}. `{command(c.layout, machine, work, name)}`" for n, c in enumerate(fits[:3], 1)]),
        "What does not fit, for each backend and stage the smallest of its kind:",
        why_not(unfit) or "- nothing",
    ]
    return "\n\n".join(parts)


def meta_model(name: str, flag: str = "MODEL") -> torch.nn.Module:
    """The model of a folder, or of a name of the hub, without memory: only its config is read."""
    try:
        config = read_config(name, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise UserError(flag, f"{name}: {str(error).splitlines()[0]}", "a model folder") from None


def read_flags(argv: list[str]) -> tuple[str, Machine, float, Work]:
    """Return (model, machine, GB of one GPU, what a step trains).

    Raises:
        UserError: a number is below 1, or the nodes do not have equally many GPUs.
    """
    flags = vars(build_parser().parse_args(argv))
    for name in ("gpus", "nodes", "max_len", "train_batch_size", "micro_train_batch_size"):
        if flags[name] < 1:
            raise UserError(f"--{name}", str(flags[name]), "1 or more")
    model = flags.pop("model")
    work = Work(flags.pop("train_batch_size"), flags.pop("micro_train_batch_size"), flags.pop("max_len"))
    return model, machine_of(**flags), flags["gpu_memory"], work


def run(argv: list[str]) -> None:
    name, machine, gpu_memory, work = read_flags(argv)
    print(report(meta_model(name), name, machine, gpu_memory, work))
