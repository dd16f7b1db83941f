"""Python runs this file first where it is on PYTHONPATH: note which of the places that GPU_BRANCH_LINES asks for run.

GPU_BRANCH_LINES is a JSON file {path of a file: [[line, column], ...]}. The column is -1 for a whole line. Each place that
runs is appended to GPU_BRANCH_FOUND as "path:line:column", once in a process, and at once: a process of the trainer may
end without its exit functions.
"""

import functools
import json
import os
import sys
import threading


@functools.cache
def positions(code):
    """The (line, column) of each instruction."""
    return [(line, column) for line, _, column, _ in code.co_positions()]


def start(wanted_file: str, found_file: str) -> None:
    with open(wanted_file) as file:
        wanted = {path: set(map(tuple, places)) for path, places in json.load(file).items()}

    def in_function(frame, event, _):
        places = wanted[frame.f_code.co_filename]
        here = [(frame.f_lineno, -1)] if event == "line" else []
        here += [positions(frame.f_code)[frame.f_lasti // 2]] if event == "opcode" else []
        for place in places.intersection(here):
            places.remove(place)
            with open(found_file, "a") as file:
                file.write(f"{frame.f_code.co_filename}:{place[0]}:{place[1]}\n")
        return in_function

    def at_call(frame, event, _):
        places = wanted.get(frame.f_code.co_filename)
        if not places:
            return None
        frame.f_trace_opcodes = not places.isdisjoint(positions(frame.f_code))  # slow, so only where it is needed
        return in_function

    sys.settrace(at_call)
    threading.settrace(at_call)


if "GPU_BRANCH_LINES" in os.environ:
    start(os.environ["GPU_BRANCH_LINES"], os.environ["GPU_BRANCH_FOUND"])
