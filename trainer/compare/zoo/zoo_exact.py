"""The cells `exact` and `exact-split` of the zoo: do the layouts of `--exact` give a tiny model the same bits?"""

from collections.abc import Callable
from pathlib import Path

from trainer.compare.machines.forked_ranks import Ending, run_ranks
from trainer.compare.runs.exact_bits import bits_of, first_difference
from trainer.compare.runs.many_runs import run_here
from trainer.compare.runs.matrix import Configuration

EXACT = Configuration("exact", 2, ("--exact",))
EXACT_SPLIT = Configuration("exact-split", 2, ("--exact",))
FIRST = "exact-1r"  # what the others are compared with
FSDP2 = ("--backend", "fsdp2")
LAYOUTS = {
    EXACT: {FIRST: (1, FSDP2), "exact-zero3-2r": (2, ("--backend", "deepspeed", "--zero_stage", "3"))},
    EXACT_SPLIT: {
        "exact-tp2": (2, (*FSDP2, "--tensor_parallel_size", "2")),
        "exact-ring2": (2, (*FSDP2, "--ring_attn_size", "2")),
    },
}


def run_exact(cell: Configuration, flags: Callable[[str], list[str]], folder: Path, timeout: float) -> Ending:
    """Train on each layout of a cell, and on `FIRST`. `flags` gives those of a run by its name.

    The ending is that of the first run that does not end well, else of the last one.
    """
    seconds = 0.0
    for run, (nproc, layout) in ({FIRST: LAYOUTS[EXACT][FIRST]} | LAYOUTS[cell]).items():
        if (folder / run / "parity").exists():
            continue
        line = [*flags(run), *layout, "--no_save", "--exact", "--device", "cpu"]
        ending = run_ranks(lambda line=line: run_here("train_sft", line), nproc, folder / f"{run}.log", timeout)
        seconds += ending.seconds
        if ending.kind != "done":
            break
    return Ending(ending.kind, ending.text, seconds)


def judge_exact(cell: Configuration, ending: Ending, folder: Path) -> tuple[str, str]:
    """(verdict, note) of the runs of a cell."""
    if ending.kind != "done":
        return ("refused" if ending.kind == "refused" else "crash"), ending.text
    first = bits_of(folder / FIRST)
    for run in LAYOUTS[cell]:
        if difference := first_difference(first, bits_of(folder / run)):
            return "wrong", f"{run}: {difference}"
    return "pass", f"losses {first.of_curve('loss')}"
