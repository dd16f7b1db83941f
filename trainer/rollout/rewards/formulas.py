"""Compare two answers as formulas with math-verify (extra `math`), in a separate process that may hang and be killed.

As a script, it reads a JSON list of [found, wanted] and prints 1 or 0 for each. A policy may write 10^{10^{10}}. sympy
never returns from it and never lets another thread run. So a watchdog ends the process, and a new one continues.
"""

import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

SECONDS = 5  # for one pair
ALL_SECONDS = 40  # for all pairs of a call, below the default of --reward_timeout
MOST_PROCESSES = 8


def can_compare() -> bool:
    """Whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def equal_as_formulas(pairs: list[tuple[str, str]]) -> list[bool]:
    """Whether (found, wanted) are equal as LaTeX expressions, sets, intervals, equations. False without math-verify.

    False also for a pair that takes longer than 5 s, and for those that have no verdict after 40 s.
    """
    different = list(dict.fromkeys(pairs))
    if not different or not can_compare():
        return [False] * len(pairs)
    num, deadline = min(MOST_PROCESSES, os.cpu_count() or 1, len(different)), time.monotonic() + ALL_SECONDS
    shares = [different[first::num] for first in range(num)]
    with ThreadPoolExecutor(num) as pool:
        found = pool.map(lambda share: _verdicts(share, deadline), shares)
        equal = {pair: verdict for share, verdicts in zip(shares, found) for pair, verdict in zip(share, verdicts)}
    if missing := len(different) - len(equal):
        print(f"warning: {missing} of {len(different)} formulas had no verdict after {ALL_SECONDS} s and score 0")
    return [equal.get(pair, False) for pair in pairs]


def _verdicts(pairs: list[tuple[str, str]], deadline: float) -> list[bool]:
    """The verdicts that one process after the other finds before the deadline, in order."""
    verdicts: list[bool] = []
    command = [sys.executable, __file__]
    while len(verdicts) < len(pairs) and (seconds := deadline - time.monotonic()) > 0:
        rest = json.dumps(pairs[len(verdicts) :])
        try:
            done = subprocess.run(command, input=rest, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired as late:
            return verdicts + [line in (b"1", "1") for line in (late.stdout or b"").split()]
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
