"""Which layouts of a model fit a machine, what each phase needs, and how long a step takes at given rates: `plan`."""

import itertools
import math
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from trainer.errors import UserError
from trainer.metrics import shown_number
from trainer.model_folders.model_folder import read_config
from trainer.planning.plan_inputs import GB, Machine, Work
from trainer.planning.plan_memory import Layout, Needs, Sizes, needs, refusal, sizes_of
from trainer.planning.plan_traffic import step_seconds, traffic

BACKENDS = (("fsdp2", 3), ("fsdp2", 2), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3))
MIN_LOCAL_TOKENS = 1024  # of a sequence that is sharded over sp: with less, a ring of tiny blocks mostly waits
SHOWN = 10


@dataclass(frozen=True)
class Choice:
    """A layout with its prediction. `problem` says why it cannot run, or is None."""

    layout: Layout
    needs: Needs
    sent: float  # bytes of a rank per step
    seconds: float
    problem: str | None


def layouts(machine: Machine, has_experts: bool, work: Work) -> list[Layout]:
    """Every layout worth judging. tp stays within a node."""
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
    """The flags of a layout on a command line, without defaults."""
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
    """For each backend, stage and kind of problem, the smallest layout that does not fit, and why."""
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
    """All layouts, the quickest first. Within 2 %, the one that sends least comes first."""
    s = sizes_of(model)
    found = [judge(layout, s, machine, work, model) for layout in layouts(machine, s.expert_params > 0, work)]
    return sorted(found, key=lambda choice: (round(math.log(choice.seconds, 1.02)), choice.sent))


def report(model: torch.nn.Module, name: str, machine: Machine, gpu_memory: float, work: Work) -> str:
    """What `plan` prints. `name` is MODEL on the command line; `gpu_memory` counts the reserve too (GB)."""
    s, choices = sizes_of(model), make_plan(model, machine, work)
    fits, unfit = [c for c in choices if not c.problem], [c for c in choices if c.problem]
    parts = [
        f"{shown_number(s.num_params)} parameters, {shown_number(s.active_params)} of them for each token; "
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
