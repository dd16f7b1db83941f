"""Save on one layout at step 10 of 20, go on on another: `python test/resume_matrix.py [--sample N] [--seed S]`.

Every source layout trains 20 steps and saves at step 10; every chosen target resumes there, with a --pretrain whose
weights are no numbers. Steps 11 to 20 must be those of the plain loop within 1e-5 (fp32). Where source and target are the
same, they are bitwise those of the source's own run.
A new layout is one more line in LAYOUTS.
"""

import argparse
import itertools
import math
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from launch import ROOT, forked, read_steps, train_many
from safetensors.torch import load_file, save_file

from trainer.datasets.demos.demo import make_demo
from trainer.model_folders.folder_names import SINGLE

BACKENDS = {f"z{n}": ["--backend", "deepspeed", "--zero_stage", str(n)] for n in (1, 2, 3)} | {
    "fsdp2": ["--backend", "fsdp2"]
}
TP, SP = ["--tensor_parallel_size", "2"], ["--ring_attn_size", "2"]
MESHES = {"dp2": (2, []), "dp4": (4, []), "tp2": (2, TP), "sp2": (2, SP), "dp2tp2": (4, TP)}
# name: (ranks, flags)
LAYOUTS = {
    f"{backend}-{mesh}": (ranks, [*flags, *more])
    for backend, flags in BACKENDS.items()
    for mesh, (ranks, more) in MESHES.items()
} | {"fsdp2-dp1": (1, BACKENDS["fsdp2"]), "z0-dp2": (2, ["--backend", "deepspeed", "--zero_stage", "0"])}
ALWAYS = ["fsdp2-dp2", "z2-dp2", "z3-dp2tp2", "fsdp2-dp2tp2", "z1-sp2"]  # to themselves, in every sample
STEPS = 20  # half of them before the checkpoint
TOLERANCE = 1e-5


def base_flags(folder: Path, steps: int) -> list[str]:
    demo = folder / "demo"
    flags = [
        "--pretrain",
        f"{demo}/model",
        "--dataset",
        f"{demo}/sft.jsonl",
        "--apply_chat_template",
        "--max_len",
        "128",
    ]
    flags += ["--max_samples", "60", "--train_batch_size", "8", "--micro_train_batch_size", "2", "--no_save"]
    flags += ["--learning_rate", "2e-3", "--weight_decay", "0.1", "--param_dtype", "fp32", "--max_steps", str(steps)]
    return flags


def run_lines(lines: list[tuple[str, list[str]]], folder: Path) -> None:
    """Run command lines, each given with its layout, up to 40 of the same number of ranks in one launch."""
    for ranks in sorted({LAYOUTS[layout][0] for layout, _ in lines}):
        of_size = [[*LAYOUTS[layout][1], *line] for layout, line in lines if LAYOUTS[layout][0] == ranks]
        for start in range(0, len(of_size), 40):
            part = of_size[start : start + 40]
            train_many(ranks, part, folder, timeout=300 + 60 * len(part))


def make_unread(source: Path, target: Path) -> Path:
    """A copy of a model folder whose weights are no numbers: a resume must not use them."""
    shutil.copytree(source, target)
    weights = {name: torch.full_like(tensor, math.nan) for name, tensor in load_file(source / SINGLE).items()}
    save_file(weights, target / SINGLE, metadata={"format": "pt"})
    return target


def run_pairs(
    pairs: list[tuple[str, str]], folder: Path, steps: int = STEPS
) -> dict[tuple[str, str], tuple[float, bool]]:
    """For each (source, target): the largest relative difference of the second half of the steps from the plain loop, and
    whether they are bitwise those of the source's own run."""
    make_demo(str(folder / "demo"))
    base, saved_at = base_flags(folder, steps), steps // 2
    reference = [*base, "--output_dir", str(folder / "reference")]
    code, output = forked(1, str(ROOT / "test/reference.py"), *reference, timeout=120)
    assert code == 0, output[-4000:]
    sources = sorted({source for source, _ in pairs})
    lines = []
    for number, source in enumerate(sources):
        line = [*base, "--save_steps", str(saved_at), "--output_dir", str(folder / source)]
        line += ["--ckpt_format", "portable"] if number % 3 == 2 else []  # a third of them
        lines.append((source, line))
    run_lines(lines, folder)
    resumed, unread = [], make_unread(folder / "demo/model", folder / "unread")
    for source, target in pairs:
        line = [*base, "--pretrain", str(unread), "--load_checkpoint", f"{folder}/{source}/checkpoints/step_{saved_at}"]
        resumed.append((target, [*line, "--output_dir", f"{folder}/{source}-to-{target}"]))
    run_lines(resumed, folder)
    expected = read_steps(folder / "reference")[saved_at:]
    results = {}
    for source, target in pairs:
        own, rows = read_steps(folder / source)[saved_at:], read_steps(folder / f"{source}-to-{target}")
        assert [row["step"] for row in rows] == list(range(saved_at + 1, steps + 1)), (source, target)
        assert [row["batch_hash"] for row in rows] == [row["batch_hash"] for row in expected], (source, target)
        assert all(math.isfinite(row["loss"]) for row in rows), (source, target)  # max() passes over what is not
        worst = max(abs(row["loss"] - other["loss"]) / other["loss"] for row, other in zip(rows, expected))
        same = all(row[key] == other[key] for row, other in zip(rows, own) for key in ("loss", "grad_norm", "lr"))
        results[source, target] = (worst, same)
    return results


def sample_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Some layouts to themselves, and `count` pairs of different ones; 0: every layout to every layout."""
    if not count:
        return list(itertools.product(LAYOUTS, repeat=2))
    different = list(itertools.permutations(LAYOUTS, 2))
    return [(name, name) for name in ALWAYS] + random.Random(seed).sample(different, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=0, help="pairs of different layouts; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = run_pairs(sample_pairs(args.sample, args.seed), Path(folder))
    failed = 0
    for (source, target), (worst, same) in results.items():
        good = worst <= TOLERANCE and (same or source != target)
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {source:10} -> {target:10} {worst:.2e}{' bitwise' if same else ''}")
    print(f"{len(results) - failed} of {len(results)} pairs pass")
    return failed > 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
