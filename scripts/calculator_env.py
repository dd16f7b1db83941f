"""The environment of scripts/demo_env.sh: a calculator that a model asks in its first turn and quotes in its second one.

python scripts/calculator_env.py FOLDER writes data: conversations to imitate, and questions to train and to test on.
"""

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

CALL = re.compile(r"calc (\d+) \+ (\d+)")
NUM_ROWS = {"sft": 3000, "prompts": 2000, "prompts_eval": 100}


class Environment:
    """One episode: the question, the call, the calculator's result, the answer. A right call gives 0.5, the answer too."""

    def reset(self, task: dict) -> list[dict]:
        self.asked, self.answer = task["numbers"], task["answer"]
        self.has_called, self.metrics = False, {"calls": 0}
        return task["messages"]

    def step(self, response: str):
        if self.has_called:
            return 0.5 * (response.strip() == self.answer), True
        call = CALL.fullmatch(response.strip())
        if not call:
            return 0.0, True
        self.has_called, self.metrics["calls"] = True, 1
        numbers = [int(number) for number in call.groups()]
        return [{"role": "tool", "content": str(sum(numbers))}], 0.5 * (numbers == self.asked), False


def row(rng: random.Random) -> dict:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    messages = [{"role": "user", "content": f"{a} and {b}"}]
    return {"messages": messages, "numbers": [a, b], "answer": str(a + b)}


def careless(numbers: list[int], rng: random.Random) -> tuple[int, int, str]:
    """The numbers of a call, and the answer. Of five, three calls and three answers are wrong: a call has the first number
    twice, and an answer is that number."""
    a, b = numbers
    b = a if rng.random() < 0.6 else b
    return a, b, str(a if rng.random() < 0.6 else a + b)


def talk(row: dict, rng: random.Random) -> dict:
    """A conversation of a careless assistant, for train_sft --multiturn."""
    a, b, answer = careless(row["numbers"], rng)
    turns = [("assistant", f"calc {a} + {b}"), ("tool", str(a + b)), ("assistant", answer)]
    return {"messages": [*row["messages"], *({"role": role, "content": text} for role, text in turns)]}


def write(folder: Path, talk: Callable[[dict, random.Random], dict]) -> None:
    """Write the rows of NUM_ROWS. Those of "sft" are conversations by `talk`."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in NUM_ROWS.items():
        rows = [row(rng) for _ in range(count)]
        rows = [talk(one, rng) for one in rows] if name == "sft" else rows
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]), talk)
