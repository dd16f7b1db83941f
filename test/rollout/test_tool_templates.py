"""Episodes with a tool over the stock templates of models: the ids are what the model wrote, and the template's between."""

import importlib.util
import re
import runpy
from os.path import commonprefix
from pathlib import Path

import pytest
from tiny_tokenizers import byte_tokenizer

from trainer.datasets.batches.packing import IGNORE
from trainer.datasets.conversations import training_templates, turns
from trainer.datasets.conversations.rendering import render
from trainer.datasets.conversations.templates import as_data, render_prompt
from trainer.datasets.conversations.turns import check_call_format, continuation_ids
from trainer.errors import UserError
from trainer.rollout.engines.sampling import Completion, Sampling
from trainer.rollout.envs.environments import Caller
from trainer.rollout.envs.episodes import continue_episodes
from trainer.rollout.envs.one_episode import Environments
from trainer.rollout.micro_batches import SampleSet, collate_samples

if importlib.util.find_spec("trl") is None:
    pytest.skip("trl, which holds the stock templates, is not installed", allow_module_level=True)
FOLDER = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))

FUNCTION = {"name": "add", "arguments": {"a": 1.5, "b": "x"}}
QUESTION, LAST = {"role": "user", "content": "hi you"}, {"role": "assistant", "content": "no he"}
CALLS = [{"id": "call00000", "type": "function", "function": FUNCTION}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3.5 is it"}
PROPERTIES = {"a": {"type": "number"}, "b": {"type": "string"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
OWN = ("llama4", "mistral_nemo", "mistral_v3")  # templates of this project that the package trl lacks
SPECIAL = re.compile(r"<[|｜][^\s<>{}'\"]+[|｜]>|<[|][\w\"]+>|<\w+[|]>|</?s>|\[/?[A-Z_]+\]")
ENDS = ("<|observation|>", "<|user|>")  # GLM ends turns with the header of the next message
THOUGHTS = re.compile(r"<think>\s*</think>\s*")  # templates show empty thoughts of some turns only
REFUSED = {  # no call in the text, or the tool is not shown, or not this form of contents
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "lfm2", "llama3"),
    *("llava_next", "muse_glimmer", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
}


def tokenizer_of(name: str):
    text = training_templates.read(name) if name in OWN else Path(FOLDER, f"{name}.jinja").read_text(encoding="utf-8")
    return byte_tokenizer(text, *sorted({*SPECIAL.findall(text)} - {"<s>", "</s>"}))


def text_of(tokenizer, messages: list[dict], asks: bool) -> str:
    given, tools = as_data(tokenizer, messages, TOOLS)
    return render(tokenizer, given, tokenize=False, tools=tools, add_generation_prompt=asks)


def written(tokenizer, before: list[dict], turn: dict, end: str) -> str:
    """A turn as the model writes it behind the generation prompt, with the token that ends it."""
    prompt, whole = text_of(tokenizer, before, True), text_of(tokenizer, [*before, turn], False)
    text = whole[len(commonprefix([prompt, whole])) :].rstrip()  # noqa: RUF071
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text if ids[-1] in tokenizer.all_special_ids else text + end


class Adder:
    """Notes the calls that it gets, answers the first turn, and ends the episode after the second."""

    tools = TOOLS

    def __init__(self, calls: list):
        self.calls = calls

    def reset(self, task):
        return [QUESTION]

    def step(self, response):
        self.calls.append(response.tool_calls)
        return [dict(RESULT)] if len(self.calls) == 1 else (1.0, True)


class Writer:
    ranks_per_engine = 1

    def __init__(self, turns: list[list[int]]):
        self.turns, self.asked = turns, []

    def generate(self, prompts, sampling, seeds, limits):
        self.asked += prompts
        ids = self.turns[len(self.asked) - 1]
        return [Completion(list(ids), [-1.0] * len(ids), True)]


@pytest.mark.parametrize("name", [*NAMES, *OWN])
def test_ids_with_a_tool_are_those_that_were_written_and_those_of_the_template(name):
    tokenizer = tokenizer_of(name)
    if name in REFUSED:
        with pytest.raises(UserError):
            check_call_format(tokenizer, TOOLS)
            render_prompt(tokenizer, [QUESTION], TOOLS)
        return
    check_call_format(tokenizer, TOOLS)
    texts = [
        written(tokenizer, [QUESTION], CALL, ENDS[0]),
        written(tokenizer, [QUESTION, CALL, RESULT], LAST, ENDS[1]),
    ]
    turns = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    writer, calls, stops = Writer(turns), [], tuple({ids[-1] for ids in turns})
    made = Environments(lambda task: Adder(calls), Caller("--env x", 20.0, 4), "--env x", tokenizer, 4, 4096)
    prompt = {"row": 0, "label": None, "prompt_ids": [1]}
    [sample] = continue_episodes(made, writer, [(0, prompt)], Sampling(1.0, 4000, stops), 0, 0)
    assert calls == [[FUNCTION], []] and sample.score == 1.0
    # what was written is what is trained, and what the engine reads before it is all that came before
    for (start, end), ids, asked in zip(sample.turns, turns, writer.asked, strict=True):
        assert sample.response_ids[start:end] == ids and sample.prompt_ids + sample.response_ids[:start] == asked
    assert sample.prompt_ids == tokenizer.encode(text_of(tokenizer, [QUESTION], True), add_special_tokens=False)
    # each of these tokens has a loss, once, and no other one
    dataset = SampleSet([sample], "token", 4000)
    for packed in (False, True):
        batch = collate_samples([dataset[0]], 0, packed)
        trained = batch["labels"] != IGNORE
        assert batch["labels"][trained].tolist() == [token for ids in turns for token in ids]
        assert batch["response_index"][trained].tolist() == list(range(sum(map(len, turns))))
        assert ((batch["loss_weights"] > 0) == trained).all()
    # and the whole is the conversation in the template
    whole = text_of(tokenizer, [QUESTION, CALL, RESULT, LAST], False).rstrip()
    whole += "" if whole.endswith(texts[1][-5:]) else ENDS[1]
    found = tokenizer.decode(sample.prompt_ids + sample.response_ids)
    assert THOUGHTS.sub("", found) == THOUGHTS.sub("", whole)


def test_there_are_enough_of_them():
    assert len({*NAMES, *OWN} - REFUSED) >= 12


def test_no_text_of_a_tool_forges_the_place_where_a_turn_ends():
    """The mark of that place is another one in each run. Those of other runs are texts like any other."""
    others = [runpy.run_path(turns.__file__)["MARK"] for _ in range(2)]
    assert len({turns.MARK, *others}) == 3
    tokenizer = tokenizer_of("qwen3")
    for mark in others:
        told = f"a {mark} b"
        ids = continuation_ids(tokenizer, [QUESTION], [{**RESULT, "content": told}], tools=TOOLS)
        assert tokenizer.decode(ids).count(told) == 1
