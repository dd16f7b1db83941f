"""Which layouts of a model fit a machine, what each phase needs, and how long a step takes at given rates: `plan`."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Optional

import torch
from transformers import AutoModelForCausalLM

from trainer.errors import UserError, one_line
from trainer.metrics import counted, shown_number
from trainer.model_folders.model_folder import read_config
from trainer.planning.plan_engines import EngineNeeds, engine_needs, engine_report
from trainer.planning.plan_inputs import GB, Machine, Rollouts, Work
from trainer.planning.plan_memory import Layout, Needs, Sizes, needs, refusal, sizes_of, with_adapter
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
            if offload and ((backend, stage) != ("fsdp2", 3) or work.lora_rank):  # an adapter's states are small
                continue
            if once and (backend != "fsdp2" or offload or not accumulates):
                continue
            found.append(Layout(backend, stage, replicate, shard, sp, tp, ep, offload, checkpointing, once))
    return found


def with_engine(found: Needs, engine: EngineNeeds) -> Needs:
    """What a layout needs with a rollout engine: it is there in the step too, or only while a rollout is generated."""
    return replace(
        found, step=found.step + engine.training, generate=found.save + engine.generating, host=found.host + engine.host
    )


def judge(
    layout: Layout, s: Sizes, machine: Machine, work: Work, model: torch.nn.Module, engine: Optional[EngineNeeds] = None
) -> Choice:
    """Predict memory, bytes and time of one layout."""
    tokens = work.micro * work.max_len // layout.sp
    num_micro, rest = divmod(work.samples, layout.dp * work.micro)
    if work.by_tokens:
        num_micro, rest = num_micro + bool(rest), 0
    found = needs(layout, s, tokens, work.dtype, work.num_frozen, accumulates=num_micro > 1, length=work.max_len)
    found = with_engine(found, engine) if engine else found
    room, host_room = machine.room, machine.host_memory / machine.gpus_per_node
    problem = (engine and engine.problem) or refusal(layout, s, model)
    if not problem and (rest or not num_micro):
        unit = layout.dp * work.micro
        problem = f"--train_batch_size {work.samples} is no multiple of {unit} = dp x micro-batch"
    for phase in ("load", "step", "save", "generate"):
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


def speed(choice: Choice, work: Work) -> float:
    """Tokens per second that a layout trains."""
    return work.samples * work.max_len / choice.seconds


def table(choices: list[Choice], work: Work) -> str:
    phases = ["load", "step", "save"] + ["generate"] * any(choice.needs.generate for choice in choices)
    rows = [f"| Layout | {' | '.join(phases)} | host a rank | sent a step | step time | tokens/s |"]
    rows.append("|---|" + "---:|" * (len(phases) + 4))
    for choice in choices:
        n, size = choice.needs, [f"{getattr(choice.needs, phase) / GB:.1f} GB" for phase in phases]
        size += [f"{n.host / GB:.1f} GB", f"{choice.sent / GB:.1f} GB"]
        rate = f"{choice.seconds:.1f} s", f"{speed(choice, work):,.0f}"
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


def command(layout: Layout, machine: Machine, work: Work, model: str, rollouts: Optional[Rollouts] = None) -> str:
    """The command line of a layout, on each node."""
    flags = ["torchrun", f"--nproc_per_node {machine.gpus_per_node}"]
    if machine.nodes > 1:
        flags += [f"--nnodes {machine.nodes}", "--rdzv_backend c10d", "--rdzv_endpoint FIRST_NODE:29500"]
    flags += [f"-m trainer.cli.{'train_ppo' if rollouts else 'train_sft'}", as_text(layout), "--packing_samples"]
    flags += rollout_flags(rollouts) if rollouts else [f"--max_len {work.max_len} --train_batch_size {work.samples}"]
    flags += [f"--lora_rank {work.lora_rank}"] * bool(work.lora_rank)
    flags += [f"--micro_train_batch_size {work.micro}", f"--pretrain {model}"]
    return " ".join([*flags, "--dataset DATA --output_dir RUN"])


def rollout_flags(rollouts: Rollouts) -> list[str]:
    """The flags of `train_ppo` for rollouts, with one optimizer step for each."""
    r = rollouts
    flags = [f"--rollout_engine {r.engine} --rollout_batch_size {r.prompts} --n_samples_per_prompt {r.group}"]
    flags += [f"--train_batch_size {r.prompts * r.group} --micro_rollout_batch_size {r.slots}"]
    flags += [f"--prompt_max_len {r.prompt_len} --generate_max_len {r.longest - r.prompt_len}"]
    flags += [f"--max_staleness {r.max_staleness} --tis_cap 2"] * bool(r.max_staleness)
    flags += [f"--engine_urls {','.join(f'URL{n}' for n in range(1, r.servers + 1))}"] * bool(r.servers)
    flags += ["--sync_deltas"] * r.sync_deltas
    if r.engine == "vllm":
        flags += [f"--engine_tensor_parallel_size {r.engine_tp} --vllm_gpu_memory_utilization {r.memory_share:g}"]
    return flags


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


def sizes_of_work(model: torch.nn.Module, work: Work) -> Sizes:
    return with_adapter(sizes_of(model), model, work.lora_rank) if work.lora_rank else sizes_of(model)


def make_plan(
    model: torch.nn.Module, machine: Machine, work: Work, rollouts: Optional[Rollouts] = None
) -> list[Choice]:
    """All layouts, the quickest first. Within 2 %, the one that sends least comes first."""
    s = sizes_of_work(model, work)
    engine = engine_needs(s, machine, rollouts, work.dtype) if rollouts else None
    found = [judge(layout, s, machine, work, model, engine) for layout in layouts(machine, s.expert_params > 0, work)]
    return sorted(found, key=lambda choice: (round(math.log(choice.seconds, 1.02)), choice.sent))


def report(
    model: torch.nn.Module,
    name: str,
    machine: Machine,
    gpu_memory: float,
    work: Work,
    rollouts: Optional[Rollouts] = None,
) -> str:
    """What `plan` prints. `name` is MODEL on the command line; `gpu_memory` counts the reserve too (GB)."""
    s, choices = sizes_of_work(model, work), make_plan(model, machine, work, rollouts)
    adapter = f"an adapter of {shown_number(s.adapter_params)}; " if s.adapter_params else ""
    fits, unfit = [c for c in choices if not c.problem], [c for c in choices if c.problem]
    parts = [
        f"{shown_number(s.num_params)} parameters, {shown_number(s.active_params)} of them for each token; {adapter}"
        f"{counted(machine.gpus, 'GPU')} of {gpu_memory:g} GB on {counted(machine.nodes, 'node')}; "
        f"{counted(work.samples, 'packed sample')} of {counted(work.max_len, 'token')} a step",
        f"{len(fits)} of {len(choices)} layouts fit. The quickest:",
        table(fits[:SHOWN], work) if fits else "none",
        *([f"{n}. `{command(c.layout, machine, work, name, rollouts)}`" for n, c in enumerate(fits[:3], 1)]),
        *(
            [engine_report(fits[0].layout, s, machine, rollouts, speed(fits[0], work), work.dtype)]
            if rollouts and fits
            else []
        ),
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
        raise UserError(flag, f"{name}: {one_line(error)}", "a folder of a model that generates") from None
