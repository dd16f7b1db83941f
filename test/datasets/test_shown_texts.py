"""A template that leaves out a message, a call or the tools is refused; arguments of calls fit the template."""

import json

import pytest
from tiny_tokenizers import byte_tokenizer

from trainer.datasets.conversations import training_templates
from trainer.datasets.conversations.templates import render_chat, render_prompt
from trainer.errors import UserError

TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}" + ASK
NO_TOOL = NO_SYSTEM.replace("'system'", "'tool'")
FIRST_SYSTEM = CHATML.replace(TURN, "{% if loop.first or m.role != 'system' %}" + TURN + "{% endif %}")
NO_START = CHATML.replace(TURN, "{% if not (loop.first and messages | length > 2) %}" + TURN + "{% endif %}")
QUESTION, ANSWER = {"role": "user", "content": "is it hi?"}, {"role": "assistant", "content": "yes"}
SYSTEM, RESULT = {"role": "system", "content": "Be short."}, {"role": "tool", "content": "3.5"}


def text_of(template: str, messages: list[dict], tools: list | None = None, multiturn: bool = False) -> str:
    tokenizer = byte_tokenizer(template)
    return tokenizer.decode(render_chat(tokenizer, messages, multiturn=multiturn, tools=tools)[0])


def refusal(template: str, messages: list[dict], tools: list | None = None) -> str:
    with pytest.raises(UserError) as caught:
        text_of(template, messages, tools)
    asked = [*messages, QUESTION] if messages[-1]["role"] == "assistant" else messages
    if "leaves out" in str(caught.value):  # the prompt of a rollout, too
        with pytest.raises(UserError, match="leaves out"):
            render_prompt(byte_tokenizer(template), asked, tools)
    return str(caught.value)


def test_a_message_that_the_template_leaves_out():
    assert "leaves out 'Be short.' of message 1 (system)" in refusal(NO_SYSTEM, [SYSTEM, QUESTION, ANSWER])
    short = [{"role": "system", "content": "hi"}, QUESTION, ANSWER]  # the question has this text by chance
    assert "'hi' of message 1 (system)" in refusal(NO_SYSTEM, short)
    assert "message 2 (tool)" in refusal(NO_TOOL, [QUESTION, RESULT, ANSWER])
    assert "message 2 (system)" in refusal(FIRST_SYSTEM, [SYSTEM, {**SYSTEM, "content": "More."}, QUESTION, ANSWER])
    assert "message 1 (user)" in refusal(NO_START, [{**QUESTION, "content": "first"}, ANSWER, QUESTION, ANSWER])
    for talk in ([SYSTEM, QUESTION, ANSWER], [QUESTION, RESULT, ANSWER], [{**QUESTION, "content": " a \n"}, ANSWER]):
        assert text_of(CHATML, talk)


def test_what_a_template_may_change():
    """White space, JSON around a text, and earlier turns of the assistant without their thoughts."""
    trimmed = CHATML.replace("m.content", "(m.content | trim)")
    assert text_of(trimmed, [{"role": "system", "content": "  a\n b "}, {**QUESTION, "content": "\nx\n"}, ANSWER])
    as_json = CHATML.replace("m.content", "(m.content | tojson if m.role == 'tool' else m.content)")
    assert text_of(as_json, [QUESTION, {**RESULT, "content": 'a "b"\nö'}, ANSWER])
    shorter = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")
    thought = {"role": "assistant", "content": "<think>a</think>One."}
    assert "Two." in text_of(shorter, [QUESTION, thought, QUESTION, {**thought, "content": "<think>b</think>Two."}])


def test_calls_and_tools_that_the_template_leaves_out():
    call = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"city": "Bern"}}}
    talk = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT, ANSWER]
    assert "leaves out 'add' of message 2 (assistant)" in refusal(CHATML, talk)
    named = CHATML.replace("m.content +", "m.content + (m.tool_calls[0].function.name if m.tool_calls else '') +")
    assert "leaves out 'city' of message 2" in refusal(named, talk)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    assert "does not show the tool 'weather'" in refusal(CHATML, [QUESTION, ANSWER], tools)
    shown = training_templates.read("qwen2_5")
    assert "weather" in text_of(shown, talk, tools)


OBJECTS = {"city": 'Bern "x"', "days": 2, "deep": {"a": [1, None]}}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5", "glm4_5", "llama3_1", "gpt_oss", "deepseek_v3"])
def test_arguments_are_the_same_as_an_object_and_as_a_text(name):
    """Qwen2.5's template quotes a JSON text again; DeepSeek's cannot write an object; GLM's takes its keys."""
    texts = []
    for arguments in (OBJECTS, json.dumps(OBJECTS)):
        call = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": arguments}}
        talk = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT, ANSWER]
        texts.append(text_of(training_templates.read(name), talk, multiturn=True))
    assert texts[0] == texts[1] and "days" in texts[0] and '"{' not in texts[0]


def test_a_template_that_would_write_pythons_form_of_an_object():
    plain = CHATML.replace(
        "m.content +", "m.content + (m.tool_calls[0].function.arguments | string if m.tool_calls else '') +"
    )
    call = {"function": {"name": "", "arguments": {"city": "Bern"}}}
    talk = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '{"city": "Bern"}' in text_of(plain, talk)


def test_arguments_that_are_no_object():
    call = {"type": "function", "function": {"name": "add", "arguments": "a = 1"}}
    talk = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert "message 2: the arguments of a call of add: the text 'a = 1'" in refusal(
        training_templates.read("qwen2_5"), talk
    )
    assert "a = 1" in text_of(training_templates.read("qwen3"), talk), "it writes the text as it is"


def test_an_earlier_turn_without_what_closes_a_conversation():
    """Phi-3's template writes eos behind the last message only."""
    phi = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    tokenizer = byte_tokenizer(phi)
    ids, mask = render_chat(tokenizer, [QUESTION, ANSWER, QUESTION, ANSWER], multiturn=True)
    assert tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]) == "yes<|im_end|>yes<|im_end|>\n</s>"


def test_a_generation_prompt_that_opens_thoughts():
    """Nemotron's prompt opens thoughts unless enable_thinking is false. An answer without thoughts has an empty block."""
    opens = (
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>\n' if enable_thinking | default(true)"
    )
    opens += " else '<think></think>') }}{% endif %}"
    turn = TURN.replace(
        "m.content", "('<think></think>' if m.role == 'assistant' and '<think>' not in m.content else '') + m.content"
    )
    tokenizer = byte_tokenizer("{% for m in messages %}" + turn + "{% endfor %}" + opens)
    for answer, learned in (("yes", "yes<|im_end|>"), ("<think>\na</think>yes", "a</think>yes<|im_end|>")):
        talk = [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": answer}]
        ids, mask = render_chat(tokenizer, talk, multiturn=True)
        assert tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]) == "yes<|im_end|>" + learned
