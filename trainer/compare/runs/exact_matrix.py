"""`compare_backends.py --exact`: every layout gives the same bits, and so does a run that is resumed on other layouts."""

import itertools
import random
import re
import shutil
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.compare.runs.comparison_report import check_markers, write_between_markers, write_json, write_text
from trainer.compare.runs.exact_bits import Bits, bits_of, first_difference
from trainer.compare.runs.launch import error_of_run, run_jobs, shared_job
from trainer.compare.runs.matrix import FSDP2, ZERO, Choice, Configuration, configuration_of
from trainer.errors import UserError
from trainer.metrics import counted

FSDP2_STAGE_2 = Choice("fsdp2-z2", ("--backend", "fsdp2", "--zero_stage", "2"))
PACKED = Choice("packed", ("--packing_samples",))


def _micro(size: int) -> Choice:
    return Choice(f"mb{size}", ("--micro_train_batch_size", str(size)))


def _hybrid(replicas: int, shards: int) -> Choice:
    return Choice(f"hsdp{replicas}x{shards}", ("--dp_replicate_size", str(replicas)), ranks=replicas * shards)


def _tensor(replicas: int, tp: int) -> Choice:
    return Choice(f"dp{replicas}-tp{tp}", ("--tensor_parallel_size", str(tp)), ranks=replicas * tp)


def _sequence(replicas: int, mode: str, sp: int, tp: int = 1) -> Choice:
    flags = ("--ring_attn_size", str(sp), "--sp_mode", mode, "--tensor_parallel_size", str(tp))
    return Choice(f"dp{replicas}-{mode}{sp}" + f"-tp{tp}" * (tp > 1), flags, ranks=replicas * sp * tp)


SEQUENCES = tuple(_sequence(*sizes) for sizes in itertools.product((1, 2), ("ring", "ulysses"), (2,)))
BACKENDS = (*ZERO, FSDP2, FSDP2_STAGE_2)
RANKS = tuple(Choice(f"{n}r", ranks=n) for n in (1, 2, 4))
PRODUCTS = (
    (BACKENDS, RANKS, ((_micro(1),), (_micro(2), PACKED))),
    ((*ZERO, FSDP2), (_tensor(1, 2), _tensor(2, 2), _tensor(1, 4)), ((_micro(1),),)),
    ((ZERO[3], FSDP2), (_tensor(4, 2), _tensor(2, 4)), ((_micro(2), PACKED),)),
    ((*ZERO, FSDP2), SEQUENCES, ((_micro(1),),)),
    ((ZERO[3], FSDP2), (_sequence(1, "ring", 4), _sequence(1, "ulysses", 4)), ((_micro(2), PACKED),)),
    ((ZERO[1], FSDP2), (_sequence(1, "ring", 2, 2), _sequence(1, "ulysses", 2, 2)), ((_micro(2), PACKED),)),
    ((ZERO[3], FSDP2), (_sequence(2, "ring", 2, 2), _sequence(2, "ring", 4)), ((_micro(1),),)),
    (BACKENDS, (Choice("8r", ranks=8),), ((_micro(1),), (_micro(1), PACKED))),
    ((ZERO[3], FSDP2), (_hybrid(2, 2), _hybrid(2, 4), _hybrid(4, 2)), ((_micro(1),), (_micro(1), PACKED))),
    ((ZERO[3], FSDP2), RANKS[:2], ((_micro(4), Choice("recomputed", ("--gradient_checkpointing",))),)),
    ((ZERO[1], FSDP2), RANKS[1:], ((Choice("tokens", ("--max_tokens_per_micro_batch", "600")),),)),
)


def exact_layouts(only: str | None = None) -> list[Configuration]:
    """The layouts that --exact covers, on 1 to 8 ranks. `only` keeps the names that the pattern matches."""
    found = [
        configuration_of((backend, ranks, *shape))
        for backends, sizes, shapes in PRODUCTS
        for backend, ranks, shape in itertools.product(backends, sizes, shapes)
    ]
    kept = [layout for layout in found if re.search(only or "", layout.name)]
    if not kept:
        raise UserError("--only", f"{only!r} matches no layout", ", ".join(layout.name for layout in found))
    return kept


@dataclass(frozen=True)
class Places:
    """Where and how runs are launched."""

    cwd: Path
    output_dir: Path
    jobs: int = 1
    timeout: float = 600


def run_exact(models: list[str], train_args: list[str], only: str | None, places: Places, table: str | None) -> bool:
    """Run every layout with every model, write report.json and .md, and return whether all bits are equal.

    The first layout is what the others are compared with. `table` is a file with markers; the table goes there too.
    """
    if table:
        check_markers(table)
    layouts = exact_layouts(only)
    cells: dict[str, dict[str, str]] = {layout.name: {} for layout in layouts}
    passed = True
    for model in models:
        folder = places.output_dir / Path(model).name
        reference: Bits | None = None
        for layout, bits in _runs(layouts, [*train_args, "--pretrain", model, "--exact"], folder, places):
            reference = reference or (bits if isinstance(bits, Bits) else None)
            fault = bits if isinstance(bits, str) else first_difference(reference, bits)
            passed = passed and not fault
            cells[layout.name][model] = f"**FAIL** {fault}" if fault else f"`{' '.join(bits.shown())}`"
            print(
                f"{'FAIL' if fault else 'PASS'} {Path(model).name} {layout.name}: {fault or bits.shown()}", flush=True
            )
    text = _table(layouts, models, cells)
    write_json(places.output_dir / "report.json", {"passed": passed, "train_args": train_args, "bits": cells})
    write_text(places.output_dir / "report.md", text)
    if table:
        write_between_markers(table, text)
    return passed


def _runs(layouts, train_args: list[str], folder: Path, places: Places) -> Iterable[tuple[Configuration, Bits | str]]:
    """(layout, its bits or why it failed), one launch for each number of ranks."""
    if folder.exists():
        raise UserError("--output_dir", f"{folder} exists", "a new folder")
    folder.mkdir(parents=True)
    groups = [[x for x in layouts if x.nproc == nproc] for nproc in sorted({x.nproc for x in layouts})]
    sharing = {}
    for group in groups:
        job = shared_job(group, train_args, folder)
        sharing[job.name] = (job, group)
    with closing(run_jobs([job for job, _ in sharing.values()], places.cwd, places.jobs, places.timeout)) as finished:
        for job, outcome in finished:
            for number, layout in enumerate(sharing[job.name][1]):
                weights = folder / layout.name / "parity/weights_final.safetensors"
                fault = error_of_run(job.log, number) or f"not run: {outcome.error}"
                yield layout, bits_of(folder / layout.name) if weights.exists() else fault
                shutil.rmtree(folder / layout.name / "model", ignore_errors=True)


def _table(layouts: list[Configuration], models: list[str], cells: dict[str, dict[str, str]]) -> str:
    """Rows are layouts, columns are models. A cell has the hashes of losses, norms, gradients and weights."""
    names = [Path(model).name for model in models]
    distinct = {model: {cells[layout.name].get(model) for layout in layouts} for model in models}
    lines = [
        f"- {name}: {counted(len(layouts), 'layout')}, {counted(len(distinct[model]), 'set')} of bits"
        for model, name in zip(models, names)
    ]
    lines += ["", f"| layout | ranks | {' | '.join(names)} |", "|---|---|" + "---|" * len(models)]
    for layout in layouts:
        shown = " | ".join(cells[layout.name].get(model, "-") for model in models)
        lines.append(f"| {layout.name} | {layout.nproc} | {shown} |")
    return "\n".join(lines) + "\n"


def run_resumes(count: int, model: str, train_args: list[str], only: str | None, places: Places) -> bool:
    """Stop a run twice at random steps and resume it on other layouts, `count` times. Are all bits those of one run?

    `train_args` have the number of steps of the whole run, --max_steps. Parts with one number of ranks share a launch.
    """
    chance, layouts, steps = random.Random(0), exact_layouts(only), _max_steps(train_args)
    flags = [*train_args, "--pretrain", model, "--exact"]
    saved = [*flags, "--save_steps", "1", "--max_ckpt_num", str(steps)]
    [(_, undisturbed)] = _runs([layouts[0]], saved, places.output_dir / "undisturbed", places)
    if isinstance(undisturbed, str):
        raise UserError("--resumes", f"the undisturbed run failed: {undisturbed}")
    chains = [
        list(zip(chance.sample(layouts, min(2, len(layouts))), sorted(chance.sample(range(1, steps), 2))))
        for _ in range(count)
    ]
    faults: dict[int, str] = {}
    first = places.output_dir / "first"
    for part, folder in enumerate((first, places.output_dir / "second")):
        resumed = {}
        for number, chain in enumerate(chains):
            if part < len(chain) and number not in faults:
                source = first / f"chain{number}" if part else undisturbed.folder
                (layout, stop), later = chain[part], [stop for _, stop in chain[part + 1 :]]
                more = ["--load_checkpoint", str(source / f"checkpoints/step_{stop}")]
                more += [text for stop in later for text in ("--save_steps", str(stop), "--max_ckpt_num", str(steps))]
                resumed[f"chain{number}"] = (number, stop, replace(layout, name=f"chain{number}"), more)
        runs = [replace(layout, args=(*layout.args, *more)) for _, _, layout, more in resumed.values()]
        for run, bits in _runs(runs, flags, folder, places) if runs else ():
            number, stop, *_ = resumed[run.name]
            fault = bits if isinstance(bits, str) else first_difference(undisturbed, _from(bits, stop, undisturbed))
            faults |= {number: fault} if fault else {}
    for number, chain in enumerate(chains):
        shown = " -> ".join(f"step {stop} on {layout.name}" for layout, stop in chain)
        fault = f": {faults[number]}" if number in faults else ""
        print(f"{'FAIL' if fault else 'PASS'} {layouts[0].name} -> {shown}{fault}", flush=True)
    for folder in (first, places.output_dir / "second"):
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{count - len(faults)} of {counted(count, 'resumed run has', 'resumed runs have')} the bits of the undisturbed one"
    )
    return not faults


def _max_steps(train_args: list[str]) -> int:
    given = [train_args[place + 1] for place, flag in enumerate(train_args[:-1]) if flag == "--max_steps"]
    if not given or not given[-1].isdecimal() or int(given[-1]) < 3:
        raise UserError("--resumes", f"--max_steps {given[-1] if given else 'is missing'}", "3 or more after --")
    return int(given[-1])


def _from(bits: Bits, start: int, whole: Bits) -> Bits:
    """The bits of a resumed run, with what the whole run has of the steps before `start`."""
    first = min(bits.samples, default=len(whole.samples))
    samples = {n: hashed for n, hashed in whole.samples.items() if n < first}
    rows = {step: row for step, row in whole.rows.items() if step <= start}
    return replace(bits, rows=rows | bits.rows, samples=samples | bits.samples)
