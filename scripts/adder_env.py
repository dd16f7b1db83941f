"""The environment of scripts/demo_tools.sh: a tool that adds. The model calls it in its first turn and quotes it in its second.

python scripts/adder_env.py FOLDER writes data: conversations to imitate, and questions to train and to test on.
"""

import random
import sys
from pathlib import Path

from calculator_env import careless, write

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a + b", "parameters": NUMBERS}}]


class Environment:
    """One episode: the question, the call, its result, the answer. A right call gives 0.5, the right answer too."""

    tools = TOOLS

    def reset(self, task: dict) -> list[dict]:
        self.asked, self.answer = task["numbers"], task["answer"]
        self.has_called, self.metrics = False, {"calls": 0}
        return task["messages"]

    def step(self, response):
        if self.has_called:
            return 0.5 * (response.strip() == self.answer), True
        numbers = [list(call["arguments"].values()) for call in response.tool_calls if call["name"] == "add"]
        if len(numbers) != 1 or [type(number) for number in numbers[0]] != [int, int]:
            return 0.0, True
        self.has_called, self.metrics["calls"] = True, 1
        return [{"role": "tool", "name": "add", "content": str(sum(numbers[0]))}], 0.5 * (numbers[0] == self.asked)


def talk(row: dict, rng: random.Random) -> dict:
    """A conversation of the careless assistant of scripts/demo_env.sh, with a real call."""
    a, b, answer = careless(row["numbers"], rng)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": str(a + b)},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": [*row["messages"], *turns], "tools": TOOLS}


if __name__ == "__main__":
    write(Path(sys.argv[1]), talk)
