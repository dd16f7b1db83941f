"""Run several training command lines one after the other in one set of ranks: `torchrun -m trainer.compare.many_runs FILE`.

FILE is a JSON list of lists of flags, before which may stand the name of a command other than train_sft. The imports of torch, transformers and DeepSpeed cost more than a tiny run; this
pays them once for a whole matrix. A command line that is refused (UserError, on every rank alike) does not end the others.
"""

import gc
import importlib
import json
import sys

from trainer.cli.entry import run_command
from trainer.errors import UserError


def main(argv: list[str]) -> None:
    with open(argv[0]) as file:
        command_lines = json.load(file)
    refused = None
    for command_line in command_lines:
        try:
            command = "train_sft" if command_line[0].startswith("--") else command_line[0]
            flags = command_line[command_line[0] == command :]
            importlib.import_module(f"trainer.cli.{command}").run(flags)
        except UserError as error:
            refused = error
            print(f"error: {error} [{' '.join(command_line)}]", flush=True)
        gc.collect()  # DeepSpeed engines hold reference cycles
    if refused:
        raise refused


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
