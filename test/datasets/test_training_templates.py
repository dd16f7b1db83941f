"""The training versions of chat templates give the stock texts, and mark what the model writes at inference.

The stock templates come from the installed packages trl and transformers. For those that no package holds there are
digests of what the stock template renders (chat_templates/rendered.json, with its source).
"""

import ast
import hashlib
import importlib.util
import json
from itertools import groupby
from pathlib import Path

import pytest
from tiny_tokenizers import byte_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.datasets.conversations import training_templates
from trainer.datasets.conversations.templates import load_chat_template, render_chat
from trainer.errors import UserError

spec = importlib.util.spec_from_file_location("chat_corpus", Path(__file__).with_name("chat_corpus.py"))
chat_corpus = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chat_corpus)

PAIRS = {  # the stock template in trl, and our name
    "qwen2_5": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3_instruct_2507": "qwen3_instruct_2507",
    "qwen3_5_think": "qwen3_5",
    "qwen3_5_nothink": "qwen3_5",
    "qwen3_6": "qwen3_6",
    "gptoss": "gpt_oss",
    "deepseekv3": "deepseek_r1",
    "deepseek_r1_distill": "deepseek_r1_distill",
    "glm4moe": "glm4_5",
    "llama3": "llama3",
    "llama3_1": "llama3_1",
    "llama3_2": "llama3_2",
    "llama4": "llama4",
    "gemma": "gemma2",
    "gemma3": "gemma3",
    "gemma4_v5": "gemma4",
}
RENDERED = json.loads(Path(__file__).with_name("chat_templates").joinpath("rendered.json").read_text())
OPTIONS = {"bos_token": "<s>", "eos_token": "</s>", "strftime_now": lambda pattern: "26 Jul 2025"}


def stock(name: str) -> str:
    if name == "llama4":
        folder = Path(importlib.util.find_spec("transformers").submodule_search_locations[0])
        code = ast.parse((folder / "models/llama4/processing_llama4.py").read_text())
        texts = [n.value for n in code.body if isinstance(n, ast.Assign) and n.targets[0].id == "chat_template"]
        return ast.literal_eval(texts[0])
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl, which holds the stock templates, is not installed")
    folder = Path(importlib.util.find_spec("trl").submodule_search_locations[0])
    return (folder / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def text_of(template: str, messages: list[dict], tools: list | None, **options) -> str | None:
    """None if the template refuses the conversation."""
    try:
        return render_jinja_template([messages], tools, chat_template=template, **OPTIONS, **options)[0][0]
    except Exception:
        return None


def conversations(template: str, number: int):
    """The first conversations of the corpus that the template accepts: (messages, tools, text)."""
    seed = found = 0
    while found < number:
        messages, tools = chat_corpus.conversation(seed)
        text = text_of(template, messages, tools)
        if text is not None:
            found += 1
            yield messages, tools, text
        seed += 1
        assert seed < 3000, "the template refuses nearly everything"


@pytest.mark.parametrize("name", PAIRS)
def test_the_text_and_the_prompt_are_those_of_the_stock_template(name):
    template, ours = stock(name), training_templates.read(PAIRS[name])
    thinking = {"enable_thinking": True} if name == "qwen3_5_nothink" else {}  # its prompt has another default
    for messages, tools, text in conversations(template, 200):
        assert text_of(ours, messages, tools) == text
        prompt = text_of(template, messages, tools, add_generation_prompt=True, **thinking)
        assert text_of(ours, messages, tools, add_generation_prompt=True, **thinking) == prompt


def digest(template: str, seed: int) -> str | None:
    messages, tools = chat_corpus.conversation(seed)
    texts = [text_of(template, messages, tools, add_generation_prompt=prompt) for prompt in (False, True)]
    return None if texts[0] is None else hashlib.sha256("\0".join(map(str, texts)).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", RENDERED)
def test_the_text_is_the_one_that_was_rendered_with_the_stock_template(name):
    expected = RENDERED[name]["digests"]
    assert sum(value is not None for value in expected) >= 200
    found = [digest(training_templates.read(name), seed) for seed in range(len(expected))]
    assert found == expected


def own_turn(name: str, template: str, messages: list[dict], tools: list | None) -> tuple[str, str] | None:
    """What the template gives for the last message at its own time: (the prompt, what the model wrote after it)."""
    text, before = text_of(template, messages, tools), messages[:-1]
    if name in ("mistral_v3", "mistral_nemo"):  # the system text is in the prompt only
        before = [message for message in before if message["role"] != "system"]
    switches = [{}, {"enable_thinking": False}, {"enable_thinking": True}]
    prompts = [text_of(template, before, tools, add_generation_prompt=True, **switch) or "" for switch in switches]
    if name == "glm4_5":
        prompts = [prompt.replace("/nothink", "") for prompt in prompts]
    if name.startswith("deepseek_r1"):  # the template opens thoughts in the prompt, and never in a conversation
        prompts += [prompt.removesuffix("<think>\n") for prompt in prompts]
    prompts = [prompt for prompt in prompts if prompt and text.startswith(prompt)]
    return (max(prompts, key=len), text[len(max(prompts, key=len)) :]) if prompts else None


@pytest.mark.parametrize("name", [*PAIRS, *RENDERED])
def test_a_mark_is_what_the_model_writes_after_its_prompt(name):
    template = training_templates.read(name) if name in RENDERED else stock(name)
    name = PAIRS.get(name, name)
    ours = training_templates.read(name)
    num_marked = 0
    for messages, tools, text in conversations(template, 70):
        rendered, blocks = training_templates.with_blocks(ours, messages, tools, OPTIONS)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        assert rendered == text and len(blocks) == len(turns)
        for turn, (start, end) in zip(turns, blocks, strict=True):
            own = own_turn(name, template, messages[: turn + 1], tools) if turn else None
            if own is None:  # the history is another one at that time: two answers in a row, dropped thoughts
                continue
            prompt, written = own
            marked = text[start:end]
            if not marked:  # then the text does not show the turn as it was written, or nothing was
                differs = not text.startswith((prompt + written).rstrip("\n"))
                drops = name.startswith("deepseek")
                assert differs or drops or not written
                continue
            num_marked += 1
            if name == "glm4_5" and not written.startswith(marked):  # the first token of the next message ends the turn
                marked = marked.removesuffix("<|user|>").removesuffix("<|observation|>")
            rest = written.removeprefix(marked)
            assert written.startswith(marked) and rest.strip() in ("", "<|return|>" if name == "gpt_oss" else "")
            assert not rest.strip() or turn != turns[-1]
    assert num_marked > 60


@pytest.mark.parametrize("name", PAIRS)
def test_a_stock_template_is_known_by_its_texts_and_masked_with_every_turn(name):
    """Ids are those of the stock template. The masked tokens are the marked text, also at the ends of long characters."""
    tokenizer = byte_tokenizer(stock(name))
    ours = training_templates.read(PAIRS[name])
    assert training_templates.training_version(tokenizer, tokenizer.chat_template) == ours
    for number in range(3):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "größer 🙂"}] * (number + 1)
        input_ids, mask = render_chat(tokenizer, messages, multiturn=True)
        assert input_ids == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        runs = groupby(zip(mask, input_ids, strict=True), key=lambda pair: pair[0])
        texts = [tokenizer.decode([token for _, token in run]) for marked, run in runs if marked]
        text, blocks = training_templates.with_blocks(
            ours, messages, None, training_templates.special_tokens(tokenizer)
        )
        assert texts == [text[start:end] for start, end in blocks] and len(texts) == number + 1
        assert all("größer 🙂" in one for one in texts)
        last = render_chat(tokenizer, messages, multiturn=False)[1]
        assert sum(last) and last.index(1) > mask.index(1) - (number == 0)


def test_every_template_is_known_as_itself_and_another_is_not_known():
    tokenizer = byte_tokenizer(None)
    for name in training_templates.names():
        assert training_templates.training_version(tokenizer, training_templates.read(name)) is not None
        assert set(training_templates.names()) == {*PAIRS.values(), *RENDERED}
    chatml = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    assert training_templates.training_version(tokenizer, chatml) is None
    changed = stock("qwen3").replace("# Tools", "# My tools")  # the probes see no difference, the rows do
    tokenizer.chat_template = changed
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    input_ids = render_chat(tokenizer, talk, multiturn=True, tools=chat_corpus.TOOLS)[0]
    assert "# My tools" in tokenizer.decode(input_ids)


def spans(template: str, messages: list[dict], multiturn: bool = True) -> list[str]:
    tokenizer = byte_tokenizer(template)
    runs = groupby(zip(*render_chat(tokenizer, messages, multiturn=multiturn), strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for marked, run in runs if marked]


def test_thoughts_are_trained_where_the_text_has_them():
    first = {"role": "assistant", "content": "<think>\na\n</think>\n\none"}
    second = {"role": "assistant", "content": "two", "reasoning_content": "b", "thinking": "b"}
    talk = [{"role": "user", "content": "1?"}, first, {"role": "user", "content": "2?"}, second]
    assert spans(stock("qwen3"), talk) == ["<think>\nb\n</think>\n\ntwo<|im_end|>"]
    assert spans(stock("qwen3_5_think"), talk) == ["b\n</think>\n\ntwo<|im_end|>"]
    assert spans(stock("qwen3_5_think"), talk[:2], False) == ["a\n</think>\n\none<|im_end|>"]
    assert spans(stock("glm4moe"), talk) == ["\n<think>b</think>\ntwo"]
    analysis = "<|channel|>analysis<|message|>b<|end|><|start|>assistant"
    assert spans(stock("gptoss"), talk)[1:] == [analysis + "<|channel|>final<|message|>two<|return|>"]
    channel = "<|channel>thought\nb\n<channel|>"
    assert spans(stock("gemma4_v5"), talk)[-1] == channel + "two<turn|>"
    plain = [*talk[:1], {"role": "assistant", "content": "one"}, *talk[2:3], {"role": "assistant", "content": "two"}]
    assert spans(stock("qwen3"), plain) == ["one<|im_end|>", "two<|im_end|>"]
    assert spans(stock("glm4moe"), plain) == ["\none<|user|>", "\ntwo"]


def test_what_the_text_does_not_show_is_refused_in_one_line():
    thought = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "<think>\na\n</think>\n\none"}]
    with pytest.raises(UserError, match="does not show message 2 as the model writes it: it drops the thoughts"):
        spans(stock("deepseekv3"), thought, multiturn=False)
    made = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1}}}
    call = [thought[0], {"role": "assistant", "content": "I add.", "tool_calls": [made]}]
    with pytest.raises(UserError, match=r"leaves out 'I add\.' of message 2"):  # as Llama 3.1 does
        spans(stock("llama3_1"), call)
    twice = [thought[0], {"role": "assistant", "content": "", "tool_calls": [made, made]}]
    with pytest.raises(UserError, match="do not hold its text"):  # gpt-oss renders one call of a message
        spans(stock("gptoss"), twice)
    assert spans(stock("qwen3"), twice)[0].count('"add"') == 2
    made["function"]["arguments"] = '{"a": 1}'
    assert '"a": 1' in spans(training_templates.read("deepseek_v3"), [*call[:1], {**call[1], "content": ""}])[0]


def test_a_template_by_its_name():
    tokenizer = byte_tokenizer(None)
    load_chat_template("qwen3", tokenizer)
    assert tokenizer.chat_template == training_templates.read("qwen3")
    with pytest.raises(UserError, match=r"neither a name, nor a file.*one of deepseek_r1, .*qwen3_thinking_2507"):
        load_chat_template("qwen4", tokenizer)
