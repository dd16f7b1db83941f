"""The environment of scripts/demo_tools.sh: a tool that adds. The model calls it in its first turn and quotes it in its second.

python scripts/adder_env.py FOLDER writes data: conversations to imitate, and questions to train and to test on.
"""

import json
import random
import sys
from pathlib import Path

NUM_ROWS = {"sft": 3000, "prompts": 2000, "prompts_eval": 100}
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


def row(rng: random.Random) -> dict:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    messages = [{"role": "user", "content": f"{a} and {b}"}]
    return {"messages": messages, "numbers": [a, b], "answer": str(a + b)}


def talk(row: dict, rng: random.Random) -> dict:
    """A conversation of a careless assistant, for train_sft --multiturn. Of five, three calls and three answers are wrong:
    a call has the first number twice, and an answer is that number."""
    a, b = row["numbers"]
    b = a if rng.random() < 0.6 else b
    answer = str(a if rng.random() < 0.6 else a + b)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": str(a + b)},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": [*row["messages"], *turns], "tools": TOOLS}


if __name__ == "__main__":
    folder, rng = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in NUM_ROWS.items():
        rows = [row(rng) for _ in range(count)]
        rows = [talk(one, rng) for one in rows] if name == "sft" else rows
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
