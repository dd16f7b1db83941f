"""Expert parallelism against the plain loop, on forked ranks: `python expert_parallel_checks.py FOLDER MODEL...`.

Each model of the zoo trains two steps in each layout. A run is compared with the plain loop: losses, gradients of the
first step, final weights. The verdicts go to FOLDER/rows.json.
"""

import json
import sys
from pathlib import Path

from trainer.compare import zoo
from trainer.compare.forked_ranks import import_libraries
from trainer.compare.matrix import Configuration

EP2, EP4 = (("--backend", "fsdp2", "--expert_parallel_size", size) for size in "24")
PACKED = ("--packing_samples",)
LAYOUTS = {
    "ep2": EP2,  # four ranks: each expert is on two of them, half of it on each
    "ep4": EP4,
    "ep2-ring2": (*EP2, *zoo.RING),
    "ep2-hsdp2": (*EP2, "--dp_replicate_size", "2"),
}
zoo.CONFIGURATIONS = (
    *(Configuration(name, 4, flags) for name, flags in LAYOUTS.items()),
    *(Configuration(f"{name}-packed", 4, (*flags, *PACKED)) for name, flags in LAYOUTS.items()),
)


def main(folder: Path, models: list[str], names: list[str]) -> None:
    import_libraries()
    rows = dict(zoo.run_zoo(models, names, folder, timeout=120, jobs=1))
    (folder / "rows.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(","))
