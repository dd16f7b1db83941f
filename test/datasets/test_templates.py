"""render_chat: the template's own tokens, loss on the assistant's words and their stop token, and never by a guess."""

import json
import re
from itertools import groupby
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.datasets.conversations.templates import load_chat_template, render_chat
from trainer.datasets.samples.sft_samples import tokenize_sft
from trainer.errors import UserError

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="real tokenizers absent: ../shared/data")

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
CHATML += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
# One block per assistant turn, around its content and stop token.
MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' -%}
{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"""
# Like Qwen3 or DeepSeek: the thoughts of all turns but the last are taken out.
FORGETFUL = """{% for m in messages %}{% set text = m.content if loop.last else m.content.split('</think>')[-1] -%}
{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor -%}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
INST = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Hello there."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "It is 2\nor so."},
]


def tiny(template=CHATML, **special):
    file = DATA / "tokenizers" / "torchtune-tiny-bpe-2k" / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|im_end|>", **special)
    tokenizer.chat_template = template
    return tokenizer


def spans(tokenizer, input_ids, loss_mask) -> list[str]:
    """The decoded runs of loss tokens."""
    assert len(input_ids) == len(loss_mask) and set(loss_mask) <= {0, 1}
    runs = groupby(zip(loss_mask, input_ids, strict=True), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for marked, run in runs if marked]


def by_hand(messages) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def refusal(tokenizer, messages=TALK, multiturn=False) -> str:
    with pytest.raises(UserError) as caught:
        render_chat(tokenizer, messages, multiturn=multiturn)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["difference", "generation markers"])
def test_last_turn_or_every_turn_with_its_stop_token_and_nothing_behind_it(template):
    tokenizer = tiny(template)
    input_ids, last = render_chat(tokenizer, TALK, multiturn=False)
    assert input_ids == tokenizer(by_hand(TALK), add_special_tokens=False)["input_ids"]
    assert spans(tokenizer, input_ids, last) == ["It is 2\nor so.<|im_end|>"]
    same_ids, every = render_chat(tokenizer, TALK, multiturn=True)
    assert same_ids == input_ids
    assert spans(tokenizer, input_ids, every) == ["Hello there.<|im_end|>", "It is 2\nor so.<|im_end|>"]
    assert tokenizer.decode(input_ids[-1:]) == "\n" and every[-1] == 0


@pytest.mark.parametrize("multiturn", [False, True])
def test_real_conversations_by_both_ways(multiturn):
    plain, marked = tiny(CHATML), tiny(MARKED)
    lines = (DATA / "oasst100" / "sft.jsonl").read_text(encoding="utf-8").splitlines()
    talks = [json.loads(line)["messages"] for line in lines]
    talks = [talk for talk in talks if all(m["content"].isascii() for m in talk)][:60]  # the vocabulary lacks the rest
    assert any(len(talk) > 2 for talk in talks)
    for messages in talks:
        input_ids, loss_mask = render_chat(plain, messages, multiturn=multiturn)
        answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert spans(plain, input_ids, loss_mask) == (answers if multiturn else answers[-1:])
        assert render_chat(marked, messages, multiturn=multiturn) == (input_ids, loss_mask)


def test_a_template_without_generation_prompt_and_one_bos():
    tokenizer = AutoTokenizer.from_pretrained(DATA / "models" / "stories260K-hf")
    tokenizer.chat_template = INST
    input_ids, loss_mask = render_chat(tokenizer, TALK[1:], multiturn=True)
    assert input_ids.count(tokenizer.bos_token_id) == 1 and input_ids[0] == tokenizer.bos_token_id
    assert [text.strip() for text in spans(tokenizer, input_ids, loss_mask)] == [
        "Hello there.</s>",
        "It is 2\nor so.</s>",
    ]


def test_messages_after_the_last_answer_are_left_out():
    tokenizer = tiny()
    more = [*TALK, {"role": "user", "content": "thanks"}]
    assert render_chat(tokenizer, more, multiturn=False) == render_chat(tokenizer, TALK, multiturn=False)


def test_no_answer_and_empty_answers_have_no_loss():
    tokenizer = tiny()
    input_ids, loss_mask = render_chat(tokenizer, TALK[:2], multiturn=True)
    assert input_ids == tokenizer(by_hand(TALK[:2]))["input_ids"] and sum(loss_mask) == 0
    empty = [*TALK[:4], {"role": "assistant", "content": " \n"}]
    assert sum(render_chat(tokenizer, empty, multiturn=False)[1]) == 0
    assert spans(tokenizer, *render_chat(tokenizer, empty, multiturn=True)) == ["Hello there.<|im_end|>"]
    assert render_chat(tokenizer, [], multiturn=True) == ([], [])


def test_an_empty_turn_between_marked_ones_is_not_trained():
    talk = [*TALK[:2], {"role": "assistant", "content": ""}, *TALK[3:]]
    for template in (
        MARKED,
        CHATML,
        MARKED.replace("{{ m.content + '<|im_end|>' }}{% endgen", "{{ m.content }}{% endgen"),
    ):
        texts = spans(tiny(), *render_chat(tiny(template), talk, multiturn=True))
        assert [text.removesuffix("<|im_end|>") for text in texts] == ["It is 2\nor so."]


def test_a_template_that_rewrites_history_trains_the_last_turn_or_is_refused():
    tokenizer = tiny(FORGETFUL)
    talk = [dict(m) for m in TALK]
    talk[2]["content"], talk[4]["content"] = "<think>a</think>Hello.", "<think>b</think>It is 2."
    masked = spans(tokenizer, *render_chat(tokenizer, talk, multiturn=False))
    assert masked == ["<think>b</think>It is 2.<|im_end|>"]
    text = refusal(tokenizer, talk, multiturn=True)
    assert "differently" in text and "{% generation %}" in text and "--train_on last" in text


def test_markers_on_a_template_that_drops_thoughts_are_refused():
    tokenizer = tiny(MARKED.replace("m.content", "m.content.split('</think>')[-1]"))
    talk = [*TALK[:2], {"role": "assistant", "content": "<think>a</think>Hello."}]
    assert "message 3" in refusal(tokenizer, talk)


def test_a_generation_prompt_that_the_answer_does_not_have_is_refused():
    tokenizer = tiny(CHATML.replace("assistant\n", "assistant\n<think>\n"))
    for multiturn in (False, True):
        assert "{% generation %}" in refusal(tokenizer, multiturn=multiturn)


def test_a_template_that_ignores_the_generation_prompt_would_train_its_header():
    assert "add_generation_prompt" in refusal(tiny(CHATML.split("{% if add_gen")[0]))


def test_markers_that_mark_nothing_or_the_wrong_words_are_refused():
    nothing = MARKED.replace("m.role == 'assistant'", "m.role == 'robot'")
    assert "0 runs of tokens for 2 assistant turns" in refusal(tiny(nothing), multiturn=True)
    users = MARKED.replace("m.role == 'assistant'", "m.role == 'user'")
    assert "do not hold its text" in refusal(tiny(users))
    everything = "{% generation %}" + CHATML + "{% endgeneration %}"
    assert "1 run of tokens for 2 assistant turns" in refusal(tiny(everything))


def test_a_conversation_that_opens_with_the_assistant():
    talk = [{"role": "assistant", "content": "Welcome."}, *TALK[1:]]
    assert "opens" in refusal(tiny(), talk, multiturn=True)
    assert spans(tiny(), *render_chat(tiny(), talk, multiturn=False)) == ["It is 2\nor so.<|im_end|>"]
    assert len(spans(tiny(), *render_chat(tiny(MARKED), talk, multiturn=True))) == 3


def test_a_token_that_spans_prompt_and_answer_is_the_answers():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(DATA / "tokenizers" / "gpt2" / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':\n' + m.content + '<|endoftext|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    )
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\n\nyes"}]
    input_ids, loss_mask = render_chat(tokenizer, talk, multiturn=False)
    assert input_ids == tokenizer("user:\nhi<|endoftext|>assistant:\n\n\nyes<|endoftext|>")["input_ids"]
    assert spans(tokenizer, input_ids, loss_mask) == ["\n\n\nyes<|endoftext|>"]  # GPT-2 has one token for two newlines


def test_what_the_template_itself_refuses_is_told_in_its_words():
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('must start\nwith a user') }}{% endif %}" + CHATML
    assert "must start with a user" in refusal(tiny(strict))


def test_no_template():
    assert "--tokenizer_chat_template" in refusal(tiny(None))
    assert "--tokenizer_chat_template" in refusal(tiny({"tool_use": CHATML}))
    assert render_chat(tiny({"default": CHATML}), TALK, multiturn=True) == render_chat(tiny(), TALK, multiturn=True)


def test_load_chat_template(tmp_path):
    tokenizer = tiny(None)
    load_chat_template(None, tokenizer)
    assert tokenizer.chat_template is None
    load_chat_template(CHATML, tokenizer)
    assert tokenizer.chat_template == CHATML
    (tmp_path / "t.jinja").write_text(MARKED)
    load_chat_template(str(tmp_path / "t.jinja"), tokenizer)
    assert tokenizer.chat_template == MARKED
    (tmp_path / "plain.txt").write_text("no template")
    for value in (str(tmp_path / "absent.jinja"), str(tmp_path / "plain.txt"), "\n\n{% for m in %}"):
        with pytest.raises(UserError, match=r"^--tokenizer_chat_template: "):
            load_chat_template(value, tokenizer)


# The small vocabulary lacks most characters beyond these and drops them.
words = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=30)
texts = st.lists(words, min_size=1, max_size=3).map("\n".join).map(str.strip).filter(bool)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4), st.sampled_from([CHATML, MARKED]))
def test_the_masked_spans_are_the_answers(pairs, template):
    messages = []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    tokenizer = tiny(template)
    masked = spans(tokenizer, *render_chat(tokenizer, messages, multiturn=True))
    assert masked == [answer + "<|im_end|>" for _, answer in pairs]


def test_chatml_is_a_name_and_a_name_needs_its_tokens():
    tokenizer = tiny(None)
    load_chat_template("chatml", tokenizer)
    assert render_chat(tokenizer, TALK, multiturn=True) == render_chat(tiny(CHATML), TALK, multiturn=True)
    for name, mark in (("llama3", "<|start_header_id|>"), ("gemma2", "<start_of_turn>"), ("deepseek_v3", "<｜User｜>")):
        with pytest.raises(UserError, match=re.escape(mark)):
            load_chat_template(name, tiny(None))
    load_chat_template("qwen2_5", tiny(None))
    load_chat_template("mistral_v1", tiny(None))  # its marks are words
    gpt2 = PreTrainedTokenizerFast(tokenizer_file=str(DATA / "tokenizers" / "gpt2" / "tokenizer.json"))
    with pytest.raises(UserError, match=r"chatml writes <\|im_start\|>, <\|im_end\|>, and the tokenizer has no such"):
        load_chat_template("chatml", gpt2)


def test_a_name_without_a_value_is_one_line_with_its_cure():
    template = "{{ bos_token + '' }}" + CHATML
    said = refusal(tiny(template))
    assert "writes bos_token, and the tokenizer has none" in said and "\n" not in said
    assert '--template_args \'{"bos_token": ""}\' to leave it out' in said
    tokenizer = tiny(template)
    tokenizer.template_args = {"bos_token": ""}
    assert render_chat(tokenizer, TALK, multiturn=False) == render_chat(tiny(), TALK, multiturn=False)
    said = refusal(tiny("{{ 'Today: ' + date_string }}" + CHATML))
    assert "uses date_string, which nothing sets" in said and "--template_args '{\"date_string\": ...}'" in said


def test_arguments_of_a_row_are_those_of_the_template_for_this_row():
    template = CHATML.replace("{% for", "{{ '<|im_start|>' if deep else '' }}{% for", 1)
    for value, is_deep in ((None, False), ({"deep": True}, True), ('{"deep": false}', False)):
        tokenizer = tiny(template)
        talk = [TALK[1], TALK[2]]
        row = {"messages": talk, "chat_template_kwargs": value}
        rows = datasets.Dataset.from_list([row])
        flags = {"input_key": None, "output_key": None, "input_template": None, "apply_chat_template": False}
        flags |= {"train_on": None, "pretrain_mode": False, "max_len": 90, "flag": "--dataset"}
        [sample], _ = tokenize_sft(rows, tokenizer, **flags)
        plain = tiny(template).apply_chat_template(talk, deep=is_deep, return_dict=True)["input_ids"]
        assert sample["input_ids"] == plain[: len(sample["input_ids"])] and not hasattr(tokenizer, "template_args")
    rows = datasets.Dataset.from_list([{"messages": talk, "chat_template_kwargs": {"depth": 1}}])
    with pytest.raises(
        UserError, match="row 1: column chat_template_kwargs: the chat template has no argument 'depth'"
    ):
        tokenize_sft(rows, tiny(template), **flags)


def test_one_of_several_templates_is_named_and_chosen(tmp_path):
    """A program sets a list, and a folder has a file for each. Rows without tools take the default one."""
    other = CHATML.replace("<|im_start|>", "<|im_start|>*")
    named = [{"name": "default", "template": CHATML}, {"name": "other", "template": other}]
    tokenizer, options = tiny(), {"flag": "--dataset", "max_len": 512, "input_key": None, "output_key": None}
    options |= {"input_template": None, "train_on": None, "pretrain_mode": False, "apply_chat_template": False}
    rows = datasets.Dataset.from_list([{"messages": TALK}])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "other.jinja").write_text(other)
    folder = AutoTokenizer.from_pretrained(tmp_path)
    assert set(folder.chat_template) == {"default", "other"}
    wanted = render_chat(tiny(), TALK, multiturn=False)
    tokenizer.chat_template = named
    for found in (tokenizer, folder):
        [sample], ledger = tokenize_sft(rows, found, **options)
        assert (sample["input_ids"], sample["loss_mask"]) == wanted
        assert "rows without tools: chat template 'default' of default, other" in ledger.lines
    load_chat_template("other", folder)
    assert folder.chat_template == other
    for templates, word in ((named[1:], "multiple chat templates"), ([CHATML], "a list of something else")):
        tokenizer.chat_template = templates
        with pytest.raises(UserError, match=word) as error:
            tokenize_sft(rows, tokenizer, **options)
        assert "\n" not in str(error.value)
