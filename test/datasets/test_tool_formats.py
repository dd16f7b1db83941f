"""Calls of tools in the formats of models, as the model writes them: one, several, by the types of a schema, and malformed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.datasets.conversations.thoughts import opens_thoughts, without_thoughts
from trainer.datasets.conversations.tool_formats import FORMATS, tool_calls


def tool(name: str, **properties) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
TOOLS = [
    tool(
        "find",
        query=TEXT,
        limit=WHOLE,
        share=NUMBER,
        exact={"type": "boolean"},
        tags={"type": "array"},
        when={"anyOf": [TEXT, {"type": "null"}]},
    ),
    tool("now"),
]
GIVEN = {"query": "12", "limit": 3, "share": 0.5, "exact": True, "tags": ["a", "b"], "when": None}
FIND, NOW = {"name": "find", "arguments": GIVEN}, {"name": "now", "arguments": {}}
JSON = '{"query": "12", "limit": 3, "share": 0.5, "exact": true, "tags": ["a", "b"], "when": null}'
PYTHON = "find(query='12', limit=3, share=0.5, exact=True, tags=['a', 'b'], when=None)"
OBJECT = f'{{"name": "find", "arguments": {JSON}}}'
WRITTEN = dict(zip(GIVEN, ["12", "3", "0.5", "true", '["a", "b"]', "null"]))
XML = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in WRITTEN.items())
GLM = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in WRITTEN.items())
INVOKE = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in WRITTEN.items())
DSML = "".join(
    f'<｜DSML｜parameter name="{key}" string="{str(key == "query").lower()}">{text}</｜DSML｜parameter>\n'
    for key, text in WRITTEN.items()
)
BARE = "query:{q}12{q},limit:3,share:0.5,exact:true,tags:[{q}a{q},{q}b{q}],when:null"
GEMMA3, GEMMA4 = BARE.format(q="<escape>"), BARE.format(q='<|"|>')
KIMI_NOW = "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"

# model: (a call of find, as the model writes it; calls of find and now; a malformed call of find)
MODELS = {
    "Hermes": (
        f"<tool_call>\n{OBJECT}\n</tool_call><|im_end|>",
        f'I look.\n<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{{"name": "now"}}\n</tool_call><|im_end|>',
        f"<tool_call>\n{OBJECT[:-2]}\n</tool_call><|im_end|>",
    ),
    "Qwen3-Coder": (
        f"<tool_call>\n<function=find>\n{XML}</function>\n</tool_call><|im_end|>",
        f"I look.\n<tool_call>\n<function=find>\n{XML}</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>",
        "<tool_call>\n<function=find>\n<parameter=limit>\n3\n</function>\n</tool_call><|im_end|>",
    ),
    "Qwen3-Coder without its first mark": (
        f"<function=find>\n{XML}</function>\n</tool_call><|im_end|>",
        f"<function=find>\n{XML}</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        f"<function=find>\n{XML}",
    ),
    "GLM-4.5": (
        f"<tool_call>find\n{GLM}</tool_call><|observation|>",
        f"\n<tool_call>find\n{GLM}</tool_call>\n<tool_call>now\n</tool_call><|observation|>",
        "<tool_call>find\n<arg_key>limit</arg_key>\n<arg_value>3</tool_call>",
    ),
    "GLM-4.7": (
        f"<tool_call>find{GLM}</tool_call>".replace("\n", "") + "<|observation|>",
        f"<tool_call>find{GLM}</tool_call><tool_call>now</tool_call><|observation|>",
        "<tool_call>find<arg_key>limit</arg_key></tool_call><|observation|>",
    ),
    "DeepSeek-V3.1": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        "<｜end▁of▁sentence｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{JSON[:-1]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "DeepSeek-V3": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{JSON[:-1]}\n```<｜tool▁call▁end｜>",
    ),
    "DeepSeek-V3.2": (
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n{DSML}</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n{DSML}</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls><｜end▁of▁sentence｜>',
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n{DSML[:-9]}</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    "Kimi-K2": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{JSON}"
        "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        f"I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{JSON}"
        f"<|tool_call_end|>{KIMI_NOW}<|tool_calls_section_end|><|im_end|>",
        f"<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{JSON[1:]}<|tool_call_end|>",
    ),
    "MiniMax-M2": (
        f'<minimax:tool_call>\n<invoke name="find">\n{INVOKE}</invoke>\n</minimax:tool_call>[e~[',
        f'<minimax:tool_call>\n<invoke name="find">\n{INVOKE}</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>[e~[",
        f'<minimax:tool_call>\n<invoke name="find">\n{INVOKE}</minimax:tool_call>[e~[',
    ),
    "Mistral v3": (
        f"[TOOL_CALLS] [{OBJECT}]</s>",
        f'[TOOL_CALLS] [{OBJECT}, {{"name": "now", "arguments": {{}}, "id": "call00001"}}]</s>',
        f"[TOOL_CALLS] [{OBJECT}</s>",
    ),
    "Mistral v11": (
        f"[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{JSON}</s>",
        f"I look.[TOOL_CALLS]find{JSON}[TOOL_CALLS]now{{}}</s>",
        f"[TOOL_CALLS]find[ARGS]{JSON[:-1]}</s>",
    ),
    "Mistral v13": (
        f"[TOOL_CALLS]find[ARGS]{JSON}</s>",
        f"[TOOL_CALLS]find[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}</s>",
        "[TOOL_CALLS]find[ARGS][1]</s>",
    ),
    "Llama pythonic": (f"[{PYTHON}]<|eot_id|>", f"[{PYTHON}, now()]<|eot_id|>", f"[{PYTHON[:-1]}]<|eot_id|>"),
    "Llama 4": (
        f"<|python_start|>[{PYTHON}]<|python_end|><|eot|>",
        f"<|python_start|>[{PYTHON}, now()]<|python_end|><|eot|>",
        "<|python_start|>[find(3)]<|python_end|><|eot|>",
    ),
    "Llama 3.1": (
        f"{OBJECT.replace('arguments', 'parameters')}<|eot_id|>",
        f'<|python_tag|>{OBJECT}; {{"name": "now", "parameters": {{}}}}<|eom_id|>',
        f"{OBJECT[:-3]}<|eot_id|>",
    ),
    "Llama 4 by its template": (
        f"<|python_start|><|python_end|>{OBJECT.replace('arguments', 'parameters')}<|eot|>",
        f'<|python_start|>I look.<|python_end|>{OBJECT}{{"name": "now", "parameters": {{}}}}<|eot|>',
        f"<|python_start|>{OBJECT[:-3]}<|python_end|><|eot|>",
    ),
    "Jamba": (
        f"<tool_calls>[\n{OBJECT}\n]</tool_calls><|endoftext|>",
        f'<tool_calls>[\n{OBJECT},\n{{"name": "now", "arguments": {{}}}}\n]</tool_calls><|endoftext|>',
        f"<tool_calls>[\n{OBJECT}\n</tool_calls><|endoftext|>",
    ),
    "LFM2": (
        f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|><|im_end|>",
        f"<|tool_call_start|>[{PYTHON}, now()]<|tool_call_end|>I look.<|im_end|>",
        f"<|tool_call_start|>[{PYTHON}<|tool_call_end|><|im_end|>",
    ),
    "Olmo 3": (
        f"<function_calls>{PYTHON}</function_calls><|im_end|>",
        f"<function_calls>{PYTHON}\nnow()</function_calls><|im_end|>",
        "<function_calls>find(limit=other)</function_calls><|im_end|>",
    ),
    "FunctionGemma": (
        f"<start_function_call>call:find{{{GEMMA3}}}<end_function_call><start_function_response>",
        f"<start_function_call>call:find{{{GEMMA3}}}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call><start_function_response>",
        f"<start_function_call>call:find{{{GEMMA3}<end_function_call>",
    ),
    "Gemma 4": (
        f"<|tool_call>call:find{{{GEMMA4}}}<tool_call|><turn|>",
        f"<|tool_call>call:find{{{GEMMA4}}}<tool_call|><|tool_call>call:now{{}}<tool_call|>",
        "<|tool_call>call:find{limit:}<tool_call|>",
    ),
    "Granite 3.0": (
        f"<|tool_call|>[{OBJECT}]<|end_of_text|>",
        f'<|tool_call|>[{OBJECT}, {{"name": "now", "arguments": {{}}}}]<|end_of_text|>',
        f"<|tool_call|>[{OBJECT}<|end_of_text|>",
    ),
    "Granite 3.1": (
        f"<tool_call>[{OBJECT}]<|end_of_text|>",
        f'<tool_call>[{OBJECT}, {{"name": "now", "arguments": {{}}}}]<|end_of_text|>',
        f"<tool_call>[{OBJECT}<|end_of_text|>",
    ),
    "Seed-OSS": (
        f"<seed:tool_call>\n<function=find>\n{XML}</function>\n</seed:tool_call><seed:eos>",
        f"<seed:tool_call>\n<function=find>\n{XML}</function>\n<function=now>\n</function>\n</seed:tool_call><seed:eos>",
        f"<seed:tool_call>\n<function=find>\n{XML}</seed:tool_call><seed:eos>",
    ),
    "harmony": (
        f" to=functions.find<|channel|>commentary json<|message|>{JSON}<|call|>",
        f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{JSON}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        f"<|channel|>commentary to=functions.find<|message|>{JSON[:-1]}<|call|>",
    ),
    "Nemotron": (
        f"<TOOLCALL>[{OBJECT}]</TOOLCALL>",
        f'<TOOLCALL>[{OBJECT}, {{"name": "now", "arguments": {{}}}}]</TOOLCALL>',
        f"<TOOLCALL>[{OBJECT}</TOOLCALL>",
    ),
    "Cohere": (
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "find", "parameters": {JSON}}}]<|END_ACTION|>',
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "find", "parameters": {JSON}}}, '
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "find", "parameters": {JSON}}}<|END_ACTION|>',
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_calls_as_models_write_them(model):
    one, two, malformed = MODELS[model]
    assert tool_calls(one, TOOLS) == [FIND]
    assert [type(value) for value in tool_calls(one, TOOLS)[0]["arguments"].values()] == [*map(type, GIVEN.values())]
    assert tool_calls(two, TOOLS) == [FIND, NOW]
    [call] = tool_calls(malformed, TOOLS)
    assert call["name"] == "find" and call["arguments"] == {} and len(call["error"]) > 10 and "\n" not in call["error"]
    # the tools decide only types: without them, no call is missed
    assert [call["name"] for call in tool_calls(two)] == ["find", "now"]


@pytest.mark.parametrize("model", sorted({*MODELS} - {"harmony"}))
def test_calls_in_thoughts_do_not_count(model):
    one = MODELS[model][0]
    marked = one if not model.startswith("Llama") else f"<tool_call>{OBJECT}</tool_call>"
    for opens, closes in (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]")):
        assert tool_calls(f"{opens}Perhaps {marked}{closes}It is 5.", TOOLS) == []
        assert tool_calls(f"Perhaps {marked}{closes}It is 5.", TOOLS) == []  # the prompt has opened them
        assert tool_calls(f"{opens}Perhaps {marked}", TOOLS) == []
        assert tool_calls(f"{opens}Perhaps {marked}{closes}\n\n{one}", TOOLS) == [FIND]
    assert tool_calls(f"Perhaps {marked}", TOOLS, in_thoughts=True) == []


def test_thoughts_of_gpt_oss_are_a_channel():
    thoughts = "<|channel|>analysis<|message|>I could write to=functions.find<|message|>{}<|end|>"
    assert tool_calls(thoughts + "<|start|>assistant<|channel|>final<|message|>5<|return|>", TOOLS) == []
    assert tool_calls(thoughts + "<|start|>assistant" + MODELS["harmony"][0], TOOLS) == [FIND]
    assert opens_thoughts("<|im_start|>assistant\n<think>\n") and not opens_thoughts("<think>\n\n</think>\n\n")
    assert without_thoughts("a<think>b</think>c<think>d") == "ac"


def test_marks_inside_arguments():
    text = "<tool_call>\\n</tool_call> </function> [TOOL_CALLS]"
    call = {"name": "find", "arguments": {"query": text.replace("\\n", "\n").removeprefix("<tool_call>\n")}}
    given = f'{{"query": "{text.removeprefix("<tool_call>")[2:]}"}}'
    assert tool_calls(f'<tool_call>{{"name": "find", "arguments": {given}}}</tool_call>', TOOLS) == [call]
    coded = f"<tool_call><function=find><parameter=query>\n{call['arguments']['query'].replace('</function>', '')}\n"
    [found] = tool_calls(f"{coded}</parameter></function></tool_call>", TOOLS)
    assert "</tool_call>" in found["arguments"]["query"]


@pytest.mark.parametrize(
    "answer", ["It is 5.", "[1, 2]", '{"name": "Bob"}', "[f(x), f(2)]", '{"a": [1', "to=functions.", ""]
)
def test_answers_are_no_calls(answer):
    assert tool_calls(answer, TOOLS) == [] and tool_calls(f"{answer}<|im_end|>") == []


@given(
    st.sampled_from([form.begin.replace("\\", "") for form in FORMATS]),
    st.text(),
    st.sampled_from(["", "{", "[f(", "<function=a>"]),
)
def test_no_text_breaks_the_reading(mark, text, start):
    for call in tool_calls(f"{mark}{start}{text}{mark}{text}", TOOLS):
        assert isinstance(call["name"], str) and isinstance(call["arguments"], dict)


def test_harmony_may_name_the_type_of_its_content_without_a_mark():
    text = f"<|channel|>commentary to=functions.find json<|message|>{JSON}<|call|>"
    assert tool_calls(text, TOOLS) == [FIND]


def test_quotes_of_an_optional_text_belong_to_it():
    tools = [tool("search", query={"type": "string", "nullable": True})]
    text = '<tool_call>\n<function=search>\n<parameter=query>\n"exact phrase"\n</parameter>\n</function>\n</tool_call>'
    assert tool_calls(text, tools)[0]["arguments"] == {"query": '"exact phrase"'}
