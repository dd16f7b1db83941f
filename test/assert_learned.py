"""Exit with 1 unless a run's loss fell under half of its start: `python assert_learned.py RUN_FOLDER`."""

import sys
from pathlib import Path

from launch import read_steps

losses = [row["loss"] for row in read_steps(Path(sys.argv[1]))]
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
sys.exit(losses[-1] >= losses[0] / 2)
