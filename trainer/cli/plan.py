"""`plan`: which layouts fit a machine, and how fast are they? The work is in `trainer/compare/plan_report.py`.

python -m trainer.cli.plan MODEL --gpus 64 --gpu_memory 80 --nodes 8 --host_memory 2000
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("trainer.compare.plan_report", run_name="__main__")
