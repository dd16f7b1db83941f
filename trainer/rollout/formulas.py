"""Whether two answers are the same formula, by math-verify (extra `math`), in a process that a monstrous answer may kill.

As a script, it reads a JSON list of [found, wanted] and prints 1 or 0 for each. A policy may well write 10^{10^{10}}, on
which sympy never comes back, nor ever lets another thread run: a watchdog ends the process, and the next one goes on.
"""

import faulthandler
import importlib.util
import json
import subprocess
import sys

SECONDS = 5  # for one pair


def equal_as_formulas(pairs: list[tuple[str, str]]) -> list[bool]:
    """Of each (found, wanted): equal as LaTeX expressions, sets, intervals or equations. All False without math-verify."""
    if importlib.util.find_spec("math_verify") is None:
        return [False] * len(pairs)
    verdicts: list[bool] = []
    while len(verdicts) < len(pairs):
        command, rest = [sys.executable, __file__], json.dumps(pairs[len(verdicts) :])
        done = subprocess.run(command, input=rest, capture_output=True, text=True)
        verdicts += [line == "1" for line in done.stdout.split()]
        if done.returncode:  # one that could not be told, or a process that cannot start: never the same pair again
            verdicts.append(False)
    return verdicts


def main() -> None:
    from math_verify import parse, verify

    for found, wanted in json.load(sys.stdin):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        gold, answer = (parse(f"${text}$") for text in (wanted, found))
        print(int(verify(gold, answer)), flush=True)


if __name__ == "__main__":
    main()
