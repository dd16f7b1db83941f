"""Compare two answers as formulas with math-verify (extra `math`), in separate processes that may hang and be killed.

As a script, it reads a JSON list of [found, wanted] and prints the number and the verdict, 1 or 0, of each. A policy may
write 10^{10^{10}}. sympy never returns from it and never lets another thread run. So forked processes read the pairs, and a
watchdog ends those that hang. A pair that hangs is tried once more, after all others.
"""

import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

SECONDS = (1, 5)  # for one pair, at the first and at the second try
CALL_SECONDS, PAIR_SECONDS, MOST_SECONDS = 40, 0.5, 600  # of a process: at least, more with many pairs, at most
MOST_PROCESSES = 8


def can_compare() -> bool:
    """Whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def equal_as_formulas(pairs: list[tuple[str, str]]) -> list[bool]:
    """Whether (found, wanted) are equal as LaTeX expressions, sets, intervals, equations. False without math-verify.

    False also for a pair that takes longer than 5 s, and for those that have no verdict when the time of the call is over.
    That is after 40 s. A process with more than 80 pairs has 0.5 s for each, at most 600 s.
    """
    different = list(dict.fromkeys(pairs))
    if not different or not can_compare():
        return [False] * len(pairs)
    num = min(MOST_PROCESSES, os.cpu_count() or 1, len(different))
    shares = [different[first::num] for first in range(num)]
    seconds = min(max(CALL_SECONDS, PAIR_SECONDS * len(shares[0])), MOST_SECONDS)
    with ThreadPoolExecutor(num) as pool:
        found = pool.map(lambda share: _verdicts(share, seconds), shares)
        equal = {
            share[number]: verdict for share, verdicts in zip(shares, found) for number, verdict in verdicts.items()
        }
    if missing := len(different) - len(equal):
        print(f"warning: {missing} of {len(different)} formulas had no verdict in time and score 0")
    return [equal.get(pair, False) for pair in pairs]


def _verdicts(pairs: list[tuple[str, str]], seconds: float) -> dict[int, bool]:
    """The verdicts that a process finds in this time, by the number of the pair."""
    command = [sys.executable, __file__]
    try:
        lines = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True, timeout=seconds).stdout
    except subprocess.TimeoutExpired as late:
        lines = (late.stdout or b"").decode()
        lines = lines[: lines.rfind("\n") + 1]  # the last one may be cut
    return {int(number): verdict == "1" for number, verdict in map(str.split, lines.splitlines())}


def _judge(pairs: dict[int, tuple[str, str]], seconds: int) -> list[int]:
    """Print the verdicts of the pairs. Returns the numbers of those that take longer."""
    from math_verify import parse, verify  # an optional extra

    waiting, late = list(pairs), []
    while waiting:
        reading, writing = os.pipe()
        if not (child := os.fork()):
            for number in waiting:
                faulthandler.dump_traceback_later(seconds, exit=True)
                gold, answer = (parse(f"${text}$") for text in reversed(pairs[number]))
                print(number, int(verify(gold, answer)), flush=True)
                os.write(writing, b".")
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as dots:
            done = len(dots.read())
        os.waitpid(child, 0)
        late += waiting[done : done + 1]
        waiting = waiting[done + 1 :]
    return late


def main() -> None:
    pairs = dict(enumerate(json.load(sys.stdin)))
    for seconds in SECONDS:
        pairs = {number: pairs[number] for number in _judge(pairs, seconds)}
    for number in pairs:
        print(number, 0, flush=True)


if __name__ == "__main__":
    main()
