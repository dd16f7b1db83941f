"""Every stock template in trl's package: our text is transformers' own, our masks those of trl's training templates.

Where they differ, the tables below say how, and why ours is what the model writes at inference.
"""

import importlib.util
import re
from itertools import groupby
from pathlib import Path

import pytest
from jinja2 import TemplateError
from tiny_tokenizers import byte_tokenizer
from transformers.utils import chat_template_utils

from trainer.datasets.conversations.templates import render_chat
from trainer.datasets.conversations.turn_ends import openings_of
from trainer.errors import UserError

if importlib.util.find_spec("trl") is None:
    pytest.skip("trl, which holds the stock templates, is not installed", allow_module_level=True)
FOLDER = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))

QUESTION, ANSWER = {"role": "user", "content": "hi you"}, {"role": "assistant", "content": "yes me"}
MORE, LAST = {"role": "user", "content": "and more"}, {"role": "assistant", "content": "no he"}
FUNCTION = {"name": "add", "arguments": {"a": 1.5, "b": "x"}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3.5 is it"}
CONVERSATIONS = {
    "one turn": [QUESTION, ANSWER],
    "system": [{"role": "system", "content": "Be short"}, QUESTION, ANSWER],
    "two turns": [QUESTION, ANSWER, MORE, LAST],
    "tools": [QUESTION, CALL, RESULT, LAST],
}
# what trl trains before the answer, and a generation prompt holds
HEADERS = (
    "<｜Assistant｜>",
    "<|start|>assistant",
    "<think></think>",
    "<think>\n\n</think>\n\n",
    "\n</think>\n\n",  # Qwen3.8's prompt opens thoughts: ours trains to close them
    "\n",  # behind <|im_start|>assistant
)
OTHER = {
    "glm4moe": "trl's training template has another text: it adds empty thoughts and a mark behind the last answer",
    "diffusion_gemma": "trl does not train the token that ends a call, and opens no turn behind a tool's answer",
    "deepseek_r1_distill": "trl's stock template shows no arguments as an object, which become a text here",
}
REFUSED = {  # these leave calls of tools out of the text; so do the ones whose stock template refuses them
    ("lfm2", "tools"), ("llama3", "tools"), ("phi3", "tools"), ("phi3_5", "tools"), ("qwen2_5_vl", "tools"),
    ("idefics3", "tools"), ("smolvlm", "tools"),
}  # fmt: skip
if hasattr(
    chat_template_utils, "_normalize_chat_messages"
):  # transformers 5.24 drops content None, which this asks for
    REFUSED.add(("deepseek_r1_distill", "tools"))


def of_stock(name: str, template: str | None = None):
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    marks = set(re.findall(r"<[|｜][^\s<>{}'\"]+[|｜]>|<\w*turn\w*[|]?>|<end_of_utterance>", text))
    return byte_tokenizer(text if template is None else template, *sorted(marks))


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_is_rendered_already_is_known_by_its_beginning(name):
    tokenizer = of_stock(name)
    openings, bos = openings_of(tokenizer), tokenizer.bos_token or ""
    for messages in ([QUESTION], CONVERSATIONS["system"][:2]):
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError:  # of a system text
            continue
        assert text.startswith(openings), messages
        starts_with_text = name.startswith("deepseek") and len(messages) > 1  # behind bos: no mark of a system text
        assert text.removeprefix(bos).startswith(openings) is not starts_with_text
    assert not any(text.startswith(openings) for text in ("hi you", "", "The [INST] mark", "user", "system"))


def runs(tokenizer, ids: list[int], mask: list[int]) -> list[str]:
    groups = groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in group]) for marked, group in groups if marked]


def plain(texts: list[str]) -> list[str]:
    """Without the header of the answer and the white space behind its stop token."""
    for header in HEADERS:
        texts = [text.removeprefix(header) for text in texts]
    return [re.sub(r"\s+(?=</s>$)", "", text.rstrip()) for text in texts]


def as_parts(messages: list[dict]) -> list[dict]:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def test_there_are_enough_of_them():
    assert len(NAMES) >= 30


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_text_and_mask(name, kind):
    tokenizer, messages = of_stock(name), CONVERSATIONS[kind]
    try:
        if (name, kind) in REFUSED:
            raise ValueError("leaves out")
        takes_parts = name in ("idefics3", "smolvlm", "llava_next")
        given = as_parts(messages) if takes_parts else messages
        expected = tokenizer.apply_chat_template(given, return_dict=True)["input_ids"]
    except Exception:  # of many types: each template refuses in its own way
        if "deepseek" not in name:  # it takes only a text for arguments
            with pytest.raises(UserError):
                render_chat(tokenizer, messages, multiturn=False)
        return
    ids, mask = render_chat(tokenizer, messages, multiturn=True)
    answers = [m["content"] or FUNCTION["name"] for m in messages if m["role"] == "assistant"]
    texts = runs(tokenizer, ids, mask)
    assert len(texts) == len(answers) and all(answer in text for answer, text in zip(answers, texts, strict=True))
    if name in OTHER and kind == "tools":
        return
    assert ids == expected
    assert runs(tokenizer, *render_chat(tokenizer, messages, multiturn=False)) == texts[-1:]
    training = FOLDER / f"{name}_training.jinja"
    if name in OTHER or not training.exists():
        return
    out = of_stock(name, training.read_text(encoding="utf-8")).apply_chat_template(
        given, return_dict=True, return_assistant_tokens_mask=True
    )
    theirs = runs(tokenizer, out["input_ids"], out["assistant_masks"])
    if name == "gptoss":  # an earlier answer was ended by <|return|> at its time, which the text does not show
        theirs = [text.removesuffix("<|end|>") for text in theirs]
    assert plain(texts) == plain(theirs)
