"""Random damage to files, and the endings that are right. For `fuzz_folders.py` and `fuzz_readers.py`."""

import contextlib
import copy
import functools
import io
import json
import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from trainer.compare.machines.forked_ranks import run_ranks
from trainer.errors import UserError

SECONDS = 30  # of one case
VALUES = [
    None,
    True,
    -1,
    0,
    3,
    10**30,
    10**400,
    1e308,
    float("nan"),
    "",
    "x",
    "../x",
    "/dev/zero",
    "\x1b[2J\n",
    [],
    {},
    [[]],
    ["x"],
    "[" * 5000,
    functools.reduce(lambda inner, _: [inner], range(300), 0),
]


# --- damage


def damage(dice: random.Random, path: Path) -> str:
    """Change one file. Returns what was done."""
    data = bytearray(path.read_bytes())
    kinds = ["flip", "flip", "cut", "insert", "zero"] + ["edit"] * 6 * (path.suffix in (".json", ".jsonl"))
    kind = dice.choice(kinds) if data else "insert"
    at = dice.randrange(len(data)) if data else 0
    if kind == "edit":
        lines = data.splitlines() if path.suffix == ".jsonl" else [data]
        number = dice.randrange(len(lines))
        try:
            content = json.loads(lines[number])
        except ValueError:
            kind = "flip"
        else:
            where = edit(dice, content)
            lines[number] = json.dumps(content).encode()
            path.write_bytes(b"\n".join(lines))
            return f"edit of {where} in {path.name}"
    if kind == "flip":
        for place in {at, *(dice.randrange(len(data)) for _ in range(dice.choice([0, 0, 3])))}:
            data[place] ^= 1 << dice.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = dice.choice([b"\0", b"{", b'"', b"\n", b"\xff\xfe", b"[" * 5000])
    else:
        data[at : at + 16] = bytes(len(data[at : at + 16]))
    path.write_bytes(bytes(data))
    return f"{kind} at byte {at} of {len(data)} in {path.name}"


def edit(dice: random.Random, content) -> str:
    """Replace, remove or add one value, at any depth. Returns where."""
    where = ""
    while True:
        keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else []
        if not keys:
            return where or "nothing"
        key = dice.choice(keys)
        where = f"{where}/{key}"
        inner = content[key]
        if isinstance(inner, (dict, list)) and inner and dice.random() < 0.8:
            content = inner
            continue
        action = dice.choice(["replace", "replace", "remove", "add"])
        if action == "replace":
            content[key] = copy.deepcopy(dice.choice(VALUES))
        elif action == "remove":
            del content[key]
        elif isinstance(content, dict):
            content[f"{key}x"] = copy.deepcopy(inner)
        else:
            content.append(copy.deepcopy(dice.choice(VALUES)))
        return f"{where} ({action})"


# --- cases


class Cases:
    """Counts the endings of cases, and prints those that are failures."""

    def __init__(self, seed: int):
        self.dice, self.endings, self.failures = random.Random(seed), Counter(), 0

    def case(self, kind: str, what: str, read: Callable[[], str]) -> None:
        """`read` returns how the case ended, or raises."""

        def late(*_) -> None:
            raise TimeoutError(f"no end after {SECONDS} s")

        signal.signal(signal.SIGALRM, late)
        signal.alarm(SECONDS)
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                ending = read()
        except UserError as error:
            ending = "noticed" if len(str(error).splitlines()) == 1 and str(error).isprintable() else "not one line"
            output.write(str(error))
        except Exception:
            ending = "traceback"
            output.write(traceback.format_exc())
        signal.alarm(0)
        self.endings[f"{kind}: {ending}"] += 1
        if ending not in ("noticed", "harmless", "read"):
            self.failures += 1
            print(f"--- {kind}, {what}: {ending}\n{output.getvalue()[-3000:]}", flush=True)

    def report(self, seconds: float) -> None:
        for name in sorted(self.endings):
            print(f"{name}: {self.endings[name]}", flush=True)
        print(f"{self.endings.total()} cases, {self.failures} failures, {seconds:.0f} s", flush=True)


def run_in_rank(run: Callable[[], None], log: Path, seconds: float) -> None:
    """Run cases in a fork with the imports, and print its report. Raises AssertionError for a failure or without a report."""
    ending = run_ranks(run, 1, log, seconds)
    print(log.read_text())
    assert "cases, 0 failures" in log.read_text(), ending
