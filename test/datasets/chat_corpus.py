"""Conversations made by code, for tests of chat templates: systems, thoughts, tools, unicode, white space, special texts."""

import json
import random

SPECIAL_TEXTS = [
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "<tool_response>x</tool_response>",
    "<|eot_id|>",
    "<|eot|>",
    "[INST] x [/INST]",
    "</s>",
    "<end_of_turn>",
    "<turn|>",
    "<|channel>x<channel|>",
    "<|end|>",
    "<｜Assistant｜>",
    "<|user|>",
    "{{ messages }}",
    "{% generation %}",
]
WORDS = [
    "hi",
    "Zwei",
    "größer",
    "数字",
    "🙂",
    "e\u0301",
    "x = 1",
    "'quoted \"text\"'",
    "\\n",
    "a\n\nb",
    "<b>",
    "né",
    "—",
]
STRING = {"type": "string", "description": "The name of a city"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather: \"now\" & 'später'",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": STRING,
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "days": {"type": "integer", "description": "How many", "default": 3},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object"}}},
    {
        "type": "function",
        "function": {
            "name": "plan",
            "description": "Plans",
            "parameters": {
                "type": "object",
                "properties": {
                    "stops": {"type": "array", "items": STRING, "description": "Cities"},
                    "legs": {"type": "array", "items": {"type": "object", "properties": {"km": {"type": "number"}}}},
                    "who": {"type": "object", "properties": {"name": STRING, "age": {"type": "integer"}}},
                    "id": {"oneOf": [{"type": "string"}, {"type": "integer", "description": "number"}]},
                    "fast": {"type": "boolean", "nullable": True},
                    "any": {"type": ["string", "null"]},
                },
                "required": ["stops", "who"],
            },
        },
    },
]
ARGUMENTS = [
    {"city": "Köln", "days": 2},
    {"stops": ["Bern", 'a "b"'], "who": {"name": "Zoë", "age": 7}, "fast": True, "id": None, "km": 1.5},
    {},
]


class Draw:
    """Choices that every version of Python repeats: only random.random() is sure to give the same numbers."""

    def __init__(self, seed: int):
        self.random = random.Random(seed).random

    def one(self, values):
        return values[int(self.random() * len(values))]

    def chance(self, share: float) -> bool:
        return self.random() < share


def text(draw: Draw) -> str:
    words = [draw.one(WORDS) for _ in range(1 + int(draw.random() * 4))]
    if draw.chance(0.12):
        words.insert(int(draw.random() * 3), draw.one(SPECIAL_TEXTS))
    return (
        draw.one(["", "", "", "", " ", "\n", "\n\n"]) + " ".join(words) + draw.one(["", "", "", "", " ", "\n", "\t\n"])
    )


def answer(draw: Draw, thoughts: str) -> dict:
    """thoughts: none, inline, or the name of the field that has them. `none` has an empty block now and then."""
    content = "" if draw.chance(0.04) else text(draw)
    message = {"role": "assistant", "content": content}
    if thoughts == "inline":
        message["content"] = draw.one(["<think>\n{}\n</think>\n\n", "<think>{}</think>", "{}</think>\n"]).format(
            text(draw)
        ) + (content)
    elif thoughts != "none" and draw.chance(0.85):
        message[thoughts] = "" if draw.chance(0.1) else text(draw)
    elif draw.chance(0.1):
        message["content"] = "<think>\n\n</think>\n\n" + content
    return message


def call(draw: Draw, number: int, as_text: bool) -> dict:
    arguments = draw.one(ARGUMENTS)
    function = {
        "name": draw.one(["weather", "now", "plan"]),
        "arguments": json.dumps(arguments) if as_text else arguments,
    }
    return {"type": "function", "id": f"call{number:05d}", "function": function}


def conversation(seed: int) -> tuple[list[dict], list[dict] | None]:
    """(messages, tools) of 1 to 5 turns. The same seed gives the same conversation."""
    draw = Draw(seed)
    kind = seed % 4  # 0 and 1: plain, 2: thoughts, 3: tools
    thoughts = (
        "none" if kind < 2 else draw.one(["none", "inline", "reasoning_content", "reasoning_content", "thinking"])
    )
    messages = [{"role": "system", "content": text(draw)}] if draw.chance(0.4) else []
    tools = [tool for tool in TOOLS if draw.chance(0.7)] if kind == 3 and draw.chance(0.8) else None
    as_text, is_none = draw.chance(0.4), draw.chance(0.3)
    for _ in range(1 + int(draw.random() * 5)):
        messages.append({"role": "user", "content": text(draw)})
        for _ in range(int(draw.random() * 3) if kind == 3 else 0):
            message = answer(draw, thoughts)
            if is_none or draw.chance(0.7):
                message["content"] = None if is_none else ""
            count = draw.one([1, 1, 1, 2, 3])
            message["tool_calls"] = [call(draw, len(messages) + i, as_text) for i in range(count)]
            messages.append(message)
            for made in message["tool_calls"] if draw.chance(0.95) else []:
                name = made["function"]["name"]
                messages.append({"role": "tool", "content": text(draw), "tool_call_id": made["id"], "name": name})
        if not draw.chance(0.03):
            messages.append(answer(draw, thoughts))
    return messages, tools or None
