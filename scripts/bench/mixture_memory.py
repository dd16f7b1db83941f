"""Measure the host memory of ranks that load, save and resume a mixture of 300 M parameters.

    python scripts/bench/mixture_memory.py [--layers 29] [--update docs/benchmarks.md]

It takes some 12 GB of memory. test/checkpoints/test_mixture_memory.py runs the same with 4 layers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sft_speed import HERE, command_line, update

sys.path.insert(0, str(HERE.parents[1]))
from scripts.measured_memory import GLIBC
from trainer.planning.predicted_memory import BUFFER_BYTES, predict

PHASES = {"load": "load", "write": "write a checkpoint", "read": "read a checkpoint", "save": "save the model"}


def measure(layers: int) -> list[list]:
    """[backend, ranks, parameters, elements of the largest tensor, bytes by phase] of each layout."""
    script = str(HERE.parents[1] / "test/checkpoints/mixture_memory.py")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, folder, str(layers)]
        output = subprocess.run(
            command,
            env=os.environ | GLIBC | {"PYTHONPATH": str(HERE.parents[1])},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith('["')]


def table(found: list[list]) -> list[str]:
    names = [f"{name} (allowed)" for name in PHASES.values()]
    lines = [f"| backend | ranks | {' | '.join(names)} |", f"|---|---:|{'---:|' * len(PHASES)}"]
    for backend, ranks, num_params, largest, peaks in found:
        tensor, share = 4 * largest, predict(backend, 3, "bf16", ranks, num_params).load
        gathered = tensor if ranks == 1 else 2 * tensor  # gloo copies what it gathers
        allowed = {"load": share + tensor, "write": BUFFER_BYTES, "read": tensor, "save": gathered}
        cells = [f"{peaks[phase] / 2**20:.0f} ({allowed[phase] / 2**20:.0f})" for phase in PHASES]
        lines.append(f"| {backend} | {ranks} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=29)
    parser.add_argument("--update", type=Path, metavar="MD")
    options = parser.parse_args()
    found = measure(options.layers)
    millions, largest = found[0][2] / 1e6, 4 * found[0][3] / 2**20
    text = [
        f"`{command_line()}`: a Qwen3-MoE of {millions:.0f} M parameters, 16 experts in a layer, ZeRO 3, bf16 with fp32 masters.",
        f"The largest tensor takes {largest:.0f} MiB in fp32. MiB of the rank that needs most, beyond what it held before.",
        "",
        *table(found),
    ]
    print("\n".join(text))
    if options.update:
        update(options.update, "mixture_memory", "\n".join(text))


if __name__ == "__main__":
    main()
