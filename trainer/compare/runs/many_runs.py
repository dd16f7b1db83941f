"""Run several training commands one after the other in one launch: `torchrun -m trainer.compare.runs.many_runs FILE`.

FILE is a JSON list of lists of flags. A list may begin with the name of a command; the default is train_sft. Imports
of torch, transformers and DeepSpeed take longer than a tiny run. Here a whole matrix needs them only once. If a command
line is refused (UserError on every rank), the others still run. A line before each run gives its number, so that a
reader of the output knows which run an error comes from.
"""

import gc
import importlib
import json
import os
import sys

from trainer.entry import run_command
from trainer.errors import UserError

RUN_BEGINS = "run {} of this launch begins"


def run_here(command: str, flags: list[str]) -> None:
    """Run a command in this process. It is imported by name, since commands are above this floor."""
    importlib.import_module(f"trainer.cli.{command}").run(flags)


def main(argv: list[str]) -> None:
    with open(argv[0]) as file:
        command_lines = json.load(file)
    refused, is_rank_0 = None, os.environ.get("RANK", "0") == "0"
    for number, command_line in enumerate(command_lines):
        if is_rank_0:
            print(RUN_BEGINS.format(number), flush=True)
        try:
            command = "train_sft" if command_line[0].startswith("--") else command_line[0]
            flags = command_line[command_line[0] == command :]
            run_here(command, flags)
        except UserError as error:
            refused = error
            if is_rank_0:
                print(f"error: {error} [{' '.join(command_line)}]", flush=True)
        gc.collect()  # DeepSpeed engines hold reference cycles
    if refused:
        raise refused


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
