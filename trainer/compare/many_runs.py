"""Run several training command lines one after the other in one set of ranks: `torchrun -m trainer.compare.many_runs FILE`.

FILE is a JSON list of lists of flags. A list may begin with the name of a command; without one it is train_sft. The imports
of torch, transformers and DeepSpeed cost more than a tiny run, and this pays them once for a whole matrix. A command line
that is refused (UserError, on every rank alike) does not end the others. A line before each run says which one begins, so
that a reader of the output can tell whose error an error is.
"""

import gc
import importlib
import json
import os
import sys

from trainer.cli.entry import run_command
from trainer.errors import UserError

RUN_BEGINS = "run {} of this launch begins"


def main(argv: list[str]) -> None:
    with open(argv[0]) as file:
        command_lines = json.load(file)
    refused, tells = None, os.environ.get("RANK", "0") == "0"
    for number, command_line in enumerate(command_lines):
        if tells:
            print(RUN_BEGINS.format(number), flush=True)
        try:
            command = "train_sft" if command_line[0].startswith("--") else command_line[0]
            flags = command_line[command_line[0] == command :]
            importlib.import_module(f"trainer.cli.{command}").run(flags)
        except UserError as error:
            refused = error
            if tells:
                print(f"error: {error} [{' '.join(command_line)}]", flush=True)
        gc.collect()  # DeepSpeed engines hold reference cycles
    if refused:
        raise refused


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
