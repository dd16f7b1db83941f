"""Run several train_sft command lines one after the other in one set of ranks: `torchrun many_runs.py RUNS.json`.

The imports of torch, transformers and DeepSpeed cost more than a tiny run; this pays them once for a whole grid.
"""

import gc
import json
import sys

from trainer.cli.entry import close_process_group, run_command
from trainer.cli.train_sft import run


def main(argv: list[str]) -> None:
    with open(argv[0]) as file:
        command_lines = json.load(file)
    for command_line in command_lines:
        run(command_line)
        gc.collect()  # DeepSpeed engines hold reference cycles


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
    close_process_group()
