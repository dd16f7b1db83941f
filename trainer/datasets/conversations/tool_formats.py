"""The formats in which models write calls of tools: a table of marks, and a small parser for each kind of text between them.

The formats follow vLLM's tool parsers and the chat templates of the models. Calls inside thoughts do not count. A call
that cannot be read is found too, with its fault.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

from trainer.datasets.conversations.thoughts import without_thoughts

SHOWN = 80  # characters of a malformed call in its fault
MOST_ENDS = 8  # marks inside arguments that are tried as the end of a call

Call = tuple[str, dict]  # name and arguments
Schemas = dict[str, dict]  # the schema of each argument, by the name of the tool


class Malformed(Exception):
    """A call that cannot be read: its fault, and the name of the tool if it is known."""

    def __init__(self, fault: str, name: str = ""):
        super().__init__(fault)
        self.fault, self.name = " ".join(fault.split()), name


def tool_calls(text: str, tools: Optional[list] = None, in_thoughts: bool = False) -> list[dict]:
    """The calls in a generated turn with its special tokens: [{"name": ..., "arguments": {...}}], in their order.

    Formats without types give texts; the schemas of `tools` say what they mean. `in_thoughts`: the prompt has opened
    thoughts. A malformed call has the name "" if that is unknown, no arguments, and an "error", which names the fault.
    """
    schemas = _schemas(tools)
    text = STOPS.sub("", without_thoughts(text, in_thoughts)).strip()
    found = [*_marked(text, schemas)] or [*_bare(text, schemas)]
    return [
        {"name": call.name, "arguments": {}, "error": call.fault}
        if isinstance(call, Malformed)
        else {"name": call[0], "arguments": call[1]}
        for call in found
    ]


# --- values


def _schemas(tools: Optional[list]) -> Schemas:
    found = {}
    for tool in tools or []:
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        parameters = function.get("parameters") or function.get("input_schema") or {}
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found[function.get("name", "")] = properties if isinstance(properties, dict) else {}
    return found


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type", [])
    types = {given} if isinstance(given, str) else {kind for kind in given if isinstance(kind, str)}
    for part in ("anyOf", "oneOf"):
        types |= {kind for option in schema.get(part) or [] for kind in _types(option)}
    if "enum" in schema and not types:
        types = {_type_of(value) for value in schema["enum"]}
    return types | {"null"} if schema.get("nullable") else types


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else kinds.get(type(value), "")


def _typed(text: str, schema: Any, guess: bool) -> Any:
    """The value that a text means by its schema: a number for "2" of the type number. A text that fits no type stays.

    Without a schema it stays a text, or with `guess` is the JSON that it may be.
    """
    types = _types(schema)
    if types == {"string"} or not (types or guess):
        return text
    for read in (json.loads, ast.literal_eval):  # models also write True and None
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        kind = _type_of(value)
        if kind == "number" and "integer" in types and "number" not in types and value.is_integer():
            return int(value)
        if kind == "string" and "string" in types:
            return text  # the quotes belong to it
        if not types or kind in types or (kind == "integer" and "number" in types):
            return value
    lowered = {"true": True, "false": False, "null": None, "none": None}.get(text.strip().lower(), text)
    return lowered if _type_of(lowered) in types else text


# --- parsers of the text between two marks


def _json(text: str, what: str = "the call", name: str = "") -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{what} is not valid JSON ({error}): {text.strip()[:SHOWN]}", name or _name_in(text)) from None


def _name_in(text: str) -> str:
    match = re.search(r'"(?:name|tool_name)"\s*:\s*"([^"\n]+)"', text)
    return match[1] if match else ""


def _object(value: Any, name: str) -> dict:
    """The arguments of a call, which some models write as the text of an object."""
    value = _json(value, f"the arguments of {name}", name) if isinstance(value, str) and value.strip() else value
    value = {} if value in (None, "") else value
    if not isinstance(value, dict):
        raise Malformed(f"the arguments of {name} are no JSON object", name)
    return value


def read_json(body: str, _schemas: Schemas) -> list[Call]:
    """{"name": "f", "arguments": {...}}, or a list of them. Llama says parameters, Cohere says tool_name."""
    several = re.sub(r'\}\s*;?\s*(?=\{\s*"name")', "},", body)  # as Llama writes them
    value, calls = _json(body if several == body else f"[{several}]"), []
    for call in value if isinstance(value, list) else [value]:
        call = call.get("function", call) if isinstance(call, dict) and isinstance(call.get("function"), dict) else call
        name = (call.get("name") or call.get("tool_name")) if isinstance(call, dict) else None
        if not isinstance(name, str):
            raise Malformed(f"the call has no name: {body.strip()[:SHOWN]}")
        calls.append((name, _object(call.get("arguments", call.get("parameters")), name)))
    return calls


def named(pattern: str) -> Callable[[str, Schemas], list[Call]]:
    """A parser of a name and the JSON of its arguments, the groups `name` and `given` of a pattern."""
    form = re.compile(pattern, re.DOTALL)

    def read(body: str, _schemas: Schemas) -> list[Call]:
        match = form.fullmatch(body.strip())
        if match is None:
            raise Malformed(f"the call has no name or no arguments: {body.strip()[:SHOWN]}")
        name = match["name"].strip()
        return [(name, _object(match["given"].strip() or "{}", name))]

    return read


MISTRAL = named(r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?(?P<given>.*)")
KIMI = named(r"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(?P<given>.*)")
HARMONY = named(r"(?P<name>[\w.-]+)[^{}]*?<\|message\|>(?P<given>.*)")


def read_mistral(body: str, schemas: Schemas) -> list[Call]:
    """A list of calls up to v7; from v11 on a name and its arguments after each mark."""
    return read_json(body, schemas) if body.lstrip().startswith(("[", "{")) else MISTRAL(body, schemas)


def read_deepseek(body: str, _schemas: Schemas) -> list[Call]:
    name, separator, rest = body.strip().partition("<｜tool▁sep｜>")
    if name.strip() == "function":  # V3 has the type there, and a fence around the arguments
        name, _, rest = rest.strip().partition("\n")
        rest = rest.strip().removeprefix("```json").removesuffix("```")
    if not separator or not name.strip():
        raise Malformed(f"the call has no name: {body.strip()[:SHOWN]}")
    return [(name.strip(), _object(rest.strip() or "{}", name.strip()))]


def elements(function: str, parameter: str) -> Callable[[str, Schemas], list[Call]]:
    """A parser of elements of functions with elements of parameters. Each pattern has groups `name` and `body`."""
    functions, parameters = re.compile(function, re.DOTALL), re.compile(parameter, re.DOTALL)

    def read(body: str, schemas: Schemas) -> list[Call]:
        calls, rest = [], functions.sub("", body).strip()
        for match in functions.finditer(body):
            name, inside = match["name"].strip(), match["body"]
            if inside.strip().startswith("{"):  # Llama 3.1 writes <function=f>{"a": 1}</function>
                calls.append((name, _object(inside.strip(), name)))
                continue
            if left := parameters.sub("", inside).strip():
                raise Malformed(f"in the call of {name}, no parameter ends or begins at: {left[:SHOWN]}", name)
            given = {}
            for found in parameters.finditer(inside):
                key, value = found["name"].strip(), found["body"].removeprefix("\n").removesuffix("\n")
                as_is = found.groupdict().get("text") == "true"
                given[key] = (
                    value if as_is else _typed(value, schemas.get(name, {}).get(key), "text" in found.groupdict())
                )
            calls.append((name, given))
        if rest or not calls:
            name = re.search(r"<(?:function=|invoke name=\"?)([\w.-]+)", rest)
            raise Malformed(f"the call does not end, or is none: {rest[:SHOWN]}", name[1] if name else "")
        return calls

    return read


QWEN_CODER = elements(
    r"<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>", r"<parameter=(?P<name>[^>\n]+)>(?P<body>.*?)</parameter>"
)
INVOKE = elements(  # MiniMax-M2
    r"<invoke name=[\"']?(?P<name>[^>\"']+)[\"']?>(?P<body>.*?)</invoke>",
    r"<parameter name=[\"']?(?P<name>[^>\"']+)[\"']?>(?P<body>.*?)</parameter>",
)
DSML = elements(  # DeepSeek-V3.2 says of each parameter whether it is a text
    r"<｜DSML｜invoke name=\"(?P<name>[^\"]+)\"\s*>(?P<body>.*?)</｜DSML｜invoke>",
    r"<｜DSML｜parameter name=\"(?P<name>[^\"]+)\"(?: string=\"(?P<text>true|false)\")?\s*>(?P<body>.*?)</｜DSML｜parameter>",
)
GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def read_glm(body: str, schemas: Schemas) -> list[Call]:
    """f<arg_key>a</arg_key><arg_value>1</arg_value>: texts are bare, other values are JSON."""
    name, mark, pairs = body.partition("<arg_key>")
    name, pairs = name.strip(), mark + pairs
    if not re.fullmatch(r"[\w.-]+", name):
        raise Malformed(f"the call is none: {body.strip()[:SHOWN]}")
    if left := GLM_PAIR.sub("", pairs).strip():
        raise Malformed(f"in the call of {name}, no argument ends or begins at: {left[:SHOWN]}", name)
    schema = schemas.get(name, {})
    return [
        (name, {key.strip(): _typed(value, schema.get(key.strip()), True) for key, value in GLM_PAIR.findall(pairs)})
    ]


def read_tool_call(body: str, schemas: Schemas) -> list[Call]:
    """Between <tool_call> marks: JSON (Qwen, Hermes, Granite), elements (Qwen3-Coder), or pairs (GLM)."""
    start = body.lstrip()
    if start.startswith(("{", "[")):
        return read_json(body, schemas)
    return QWEN_CODER(body, schemas) if start.startswith("<function") else read_glm(body, schemas)


def read_pythonic(body: str, _schemas: Schemas) -> list[Call]:
    """[f(a=1), g()], or one call in each line: Llama 4, LFM2, Olmo 3."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes such as \\d in texts
            lines = ast.parse(body.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        name = re.search(r"[A-Za-z_][\w.]*(?=\()", body)
        raise Malformed(f"the call is not valid Python ({error})", name[0] if name else "") from None
    parsed = [line.value if isinstance(line, ast.Expr) else line for line in lines]
    parsed = parsed[0].elts if len(parsed) == 1 and isinstance(parsed[0], ast.List) else parsed
    if not parsed or not all(isinstance(call, ast.Call) for call in parsed):
        raise Malformed(f"it is no list of calls: {body.strip()[:SHOWN]}")
    calls = []
    for call in parsed:
        name = re.match(r"[^(]*", ast.get_source_segment(body.strip(), call) or "")[0].strip()
        if call.args or any(word.arg is None for word in call.keywords):
            raise Malformed(f"the arguments of {name} have no names", name)
        try:
            calls.append((name, {word.arg: ast.literal_eval(_plain(word.value)) for word in call.keywords}))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise Malformed(f"the arguments of {name} are no plain values", name) from None
    return calls


def read_llama(body: str, schemas: Schemas) -> list[Call]:
    return (read_json if body.lstrip().startswith("{") else read_pythonic)(body, schemas)


def _plain(node: ast.expr) -> ast.expr:
    """The same value with the names of JSON as Python's."""
    names = {"true": True, "false": False, "null": None}
    for inner in ast.walk(ast.Expression(node)):
        for field, value in ast.iter_fields(inner):
            places = value if isinstance(value, list) else [value]
            fit = [ast.Constant(names[v.id]) if isinstance(v, ast.Name) and v.id in names else v for v in places]
            setattr(inner, field, fit if isinstance(value, list) else fit[0])
    return ast.Constant(names[node.id]) if isinstance(node, ast.Name) and node.id in names else node


def gemma(quote: str) -> Callable[[str, Schemas], list[Call]]:
    """A parser of call:f{a:1,b:Qx Q}, where Q is the mark around texts, and keys have no quotes."""

    def read(body: str, schemas: Schemas) -> list[Call]:
        match = re.fullmatch(r"call:\s*([\w.-]+)\s*(\{.*\})", body.strip(), re.DOTALL)
        if match is None:
            name = re.match(r"\s*call:\s*([\w.-]+)", body)
            raise Malformed(f"the call does not end, or is none: {body.strip()[:SHOWN]}", name[1] if name else "")
        name, parts = match[1], match[2].split(quote)
        for i, part in enumerate(parts):  # every second part is a text
            keyed = re.sub(r"([{,]\s*)([\w.-]+)\s*:", lambda key: f"{key[1]}{json.dumps(key[2])}:", part)
            parts[i] = json.dumps(part, ensure_ascii=False) if i % 2 else keyed
        given, schema = _object("".join(parts), name), schemas.get(name, {})
        fit = {key: _typed(value, schema.get(key), False) for key, value in given.items() if isinstance(value, str)}
        return [(name, given | fit)]

    return read


# --- the table


@dataclass(frozen=True)
class Format:
    models: str
    begin: str  # patterns of the marks; a call may also end with the turn
    end: str
    read: Callable[[str, Schemas], list[Call]]


FORMATS = (
    Format("Qwen, Hermes, Qwen3-Coder, GLM-4.5, Granite 3.1 and 4", "<tool_call>", "</tool_call>", read_tool_call),
    Format("Seed-OSS", "<seed:tool_call>", "</seed:tool_call>", QWEN_CODER),
    Format("MiniMax-M2", "<minimax:tool_call>", "</minimax:tool_call>", INVOKE),
    Format("Qwen3-Coder without its outer mark, Llama 3.1", "(?=<function=)", "(?<=</function>)", QWEN_CODER),
    Format("Kimi-K2", r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>", KIMI),
    Format("DeepSeek-V3 and V3.1", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>|<｜tool▁calls▁end｜>", read_deepseek),
    Format("DeepSeek-V3.2", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", DSML),
    Format("Mistral", r"\[TOOL_CALLS\]", r"(?=\[TOOL_CALLS\])", read_mistral),
    Format("gpt-oss", r"to=functions\.(?=[\w.-]+[^<>{}\n]*<\|)", r"<\|call\|>|<\|end\|>|<\|start\|>", HARMONY),
    Format("FunctionGemma", "<start_function_call>", "<end_function_call>", gemma("<escape>")),
    Format("Gemma 4", r"<\|tool_call>", r"<tool_call\|>", gemma('<|"|>')),
    Format("Llama 3.1", r"<\|python_tag\|>(?=\s*\{)", r"<\|eom_id\|>|<\|eot_id\|>", read_json),
    Format("Llama 4", r"<\|python_start\|>(?=\s*[\[{])", r"<\|python_end\|>", read_llama),
    Format("LFM2", r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", read_pythonic),
    Format("Olmo 3", "<function_calls>", "</function_calls>", read_pythonic),
    Format("Granite 3.0, Phi-4-mini", r"<\|tool_call\|>", r"<\|/tool_call\|>", read_json),
    Format("Nemotron", "<TOOLCALL>", "</TOOLCALL>", read_json),
    Format("Jamba", "<tool_calls>", "</tool_calls>", read_json),
    Format("Cohere", r"<\|START_ACTION\|>", r"<\|END_ACTION\|>", read_json),
)
BEGINS = re.compile("|".join(f"(?P<f{i}>{form.begin})" for i, form in enumerate(FORMATS)))
STOPS = re.compile(
    r"(?:\s*(?:<\|(?!message)[\w ]+\|>|<｜(?!DSML)[^｜<>]+｜>|</s>|<eos>|<end_of_turn>|<turn\|>|<seed:eos>|\[e~\[))+\s*\Z"
)


def _marked(text: str, schemas: Schemas) -> Iterator[Call | Malformed]:
    place = 0
    while begins := BEGINS.search(text, place):
        form = FORMATS[int(begins.lastgroup[1:])]
        calls, place = _one(text, begins, form, schemas)
        yield from calls


def _one(text: str, begins: re.Match, form: Format, schemas: Schemas) -> tuple[list[Call | Malformed], int]:
    """The calls of a mark, and where they end.

    An argument may hold the mark of an end. So later ends are tried too, up to the next call's begin.
    """
    start = begins.end()
    inside = start + (begins.start() == start)  # a mark may have no width
    following = re.compile(form.begin).search(text, inside)
    most = following.start() if following else len(text)
    ends = [end.span() for end in re.compile(form.end).finditer(text, inside) if end.start() <= most]
    fault = None
    for end, place in [*ends[:MOST_ENDS], (most, most)]:
        try:
            return form.read(text[start:end], schemas), max(place, inside)
        except Malformed as error:
            fault = fault or (error, place)
    return [fault[0]], max(fault[1], inside)


def names_format(text: str) -> bool:
    """Whether a text, such as a system prompt with tools, has the mark of a format."""
    return BEGINS.search(text) is not None


def _bare(text: str, schemas: Schemas) -> list[Call | Malformed]:
    """Calls without a mark, of Llama 3: a turn that is nothing but the JSON of calls, or a list of calls in Python."""
    text = re.sub(r"^<\|python_start\|>.*?<\|python_end\|>", "", text).strip()  # Llama 4 writes words there
    is_json = bool(re.match(r"(?:functools)?\s*(?:\[\s*)?\{", text))
    if not is_json and not re.match(r"\[\s*[A-Za-z_][\w.]*\(", text):
        return []
    asks = re.search(r'"(?:parameters|arguments)"\s*:', text) if is_json else True  # an answer may be JSON, too
    try:
        calls = read_json(text.removeprefix("functools"), schemas) if is_json else read_pythonic(text, schemas)
        return calls if asks or all(name in schemas for name, _ in calls) else []
    except Malformed as error:
        return [error] if asks and error.name and (error.name in schemas or (is_json and not schemas)) else []
