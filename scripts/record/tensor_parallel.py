"""Do the losses of a reward model depend on the size of tensor parallelism? `python scripts/record/tensor_parallel.py`.

Each trainer trains on the same eight pairs with 1, 2 and 4 ranks, in fp32 and in bf16. Writes docs/record_tensor_parallel.json,
{trainer: {dtype: {size: losses}}}, which page.py shows. With --eps, another epsilon of AdamW, ours alone runs in fp32, and
nothing is written.
"""

import argparse
import json
import shutil
from pathlib import Path

import cases
import methods
from judge import read_log
from record import HERE, METHOD_TRAINERS, OURS, ROOT, launch, python_of

RESULT = ROOT / "docs/record_tensor_parallel.json"
SIZES = (1, 2, 4)


def losses(name: str, dtype: str, size: int, args: argparse.Namespace) -> list[float]:
    """The losses of four steps. Raises SystemExit if the run fails."""
    environment, script, kind, _ = METHOD_TRAINERS[name]
    condition = {
        **methods.METHODS["reward model, tensor parallelism 2"],
        "tp": size,
        "ranks": size,
        "dtype": dtype,
        "eps": args.eps,
    }
    condition |= {"epochs": cases.EPOCHS, "learning_rate": cases.LEARNING_RATE, "max_length": cases.MAX_LENGTH}
    output = args.folder / f"{name}-{dtype}-{size}".replace(" ", "_").replace(",", "")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    command = [
        str(HERE / script),
        *([kind] if kind else []),
        str(args.folder / "inputs"),
        str(output),
        json.dumps(condition),
    ]
    if launch(command, size, output, python_of(args.environments, environment), args.timeout):
        raise SystemExit(f"{output}.log has the error")
    return [row["loss"] for row in read_log(output) if "loss" in row]


def spread(by_size: dict[str, list[float]]) -> float:
    """The worst relative difference of a step's loss between two sizes."""
    return max((max(step) - min(step)) / min(step) for step in zip(*by_size.values(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainers", nargs="*", default=list(METHOD_TRAINERS))
    parser.add_argument("--environments", type=Path, default=ROOT / "runs/record/environments")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/record")
    parser.add_argument("--timeout", type=int, default=300, help="seconds of one run")
    parser.add_argument("--eps", type=float, default=1e-8, help="AdamW's epsilon, of this trainer only")
    args = parser.parse_args()
    only_shown = args.eps != parser.get_default("eps")
    if only_shown and set(args.trainers) - set(OURS):
        parser.error(f"--eps is for {', '.join(OURS)}")
    if not (args.folder / "inputs").exists():
        cases.make(args.folder / "inputs")
        methods.make(args.folder / "inputs")
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in args.trainers:
        for dtype in ("fp32",) if only_shown else ("fp32", "bf16"):
            by_size = {str(size): losses(name, dtype, size, args) for size in SIZES}
            first = spread({size: values[:1] for size, values in by_size.items()})
            text = f"{spread(by_size):.1e} between sizes, {first:.1e} before the first update; {by_size}"
            print(f"{name}, {dtype}: {text}", flush=True)
            if not only_shown:
                found.setdefault(name, {})[dtype] = by_size
                RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
