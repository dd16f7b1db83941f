"""Compare two answers as formulas with math-verify (extra `math`), in a separate process that may hang and be killed.

As a script, it reads a JSON list of [found, wanted] and prints 1 or 0 for each. A policy may write 10^{10^{10}}. sympy
never returns from it and never lets another thread run. So a watchdog ends the process, and a new one continues.
"""

import faulthandler
import importlib.util
import json
import subprocess
import sys

SECONDS = 5  # for one pair


def equal_as_formulas(pairs: list[tuple[str, str]]) -> list[bool]:
    """Whether (found, wanted) are equal as LaTeX expressions, sets, intervals, equations. False without math-verify."""
    if importlib.util.find_spec("math_verify") is None:
        return [False] * len(pairs)
    verdicts: list[bool] = []
    while len(verdicts) < len(pairs):
        command, rest = [sys.executable, __file__], json.dumps(pairs[len(verdicts) :])
        done = subprocess.run(command, input=rest, capture_output=True, text=True)
        verdicts += [line == "1" for line in done.stdout.split()]
        if done.returncode:  # this pair has no verdict, or the process cannot start: do not try it again
            verdicts.append(False)
    return verdicts


def main() -> None:
    from math_verify import parse, verify  # an optional extra

    for found, wanted in json.load(sys.stdin):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        gold, answer = (parse(f"${text}$") for text in (wanted, found))
        print(int(verify(gold, answer)), flush=True)


if __name__ == "__main__":
    main()
