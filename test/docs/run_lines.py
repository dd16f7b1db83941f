"""Run command lines and Python snippets of several folders one after the other: `[torchrun] test/docs/run_lines.py FILE`.

FILE is a JSON list of {"id", "folder", "env", "line" or "code", "name"}. A line is a command of trainer.cli and its flags,
run by trainer.compare.runs.many_runs. Rank 0 appends {"error", "seconds", "ends"} of each to FILE.results; a marker line precedes its
output. An error ends the launch of several ranks, since others may wait for this one.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from trainer.compare.runs import many_runs
from trainer.entry import run_command
from trainer.errors import UserError


def run_entry(entry: dict, line_file: Path) -> None:
    os.chdir(entry["folder"])
    if "code" in entry:
        sys.path.insert(0, entry["folder"])
        exec(compile(entry["code"], entry["name"], "exec"), {"__name__": "__main__"})
        sys.path.remove(entry["folder"])
        return
    line_file.write_text(json.dumps([entry["line"]]))
    many_runs.main([str(line_file)])


def main(argv: list[str]) -> None:
    file, rank = Path(argv[0]), int(os.environ.get("RANK", 0))

    def tell(error: str | None, ends: bool = False) -> None:
        if rank == 0:
            with open(f"{file}.results", "a") as results:
                outcome = {"error": error, "seconds": time.monotonic() - started, "ends": ends}
                results.write(json.dumps(outcome) + "\n")

    for entry in json.loads(file.read_text()):
        started = time.monotonic()
        if rank == 0:
            print(f"\n=== {entry['id']}", flush=True)
        os.environ.update(entry["env"])
        error = None
        try:
            run_entry(entry, Path(f"{file}.rank{rank}"))
        except UserError as reason:
            error = f"error: {reason}"
            if int(os.environ.get("WORLD_SIZE", 1)) > 1:
                tell(error, ends=True)
                raise
        except BaseException:
            traceback.print_exc()
            tell(traceback.format_exc(limit=-1), ends=True)
            raise
        tell(error)
        for name in entry["env"]:
            os.environ.pop(name)


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
