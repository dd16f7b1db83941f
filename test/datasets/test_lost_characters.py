"""Characters that a tokenizer drops are named, for every kind of row. The oracle is the set of bytes that it lacks."""

import datasets
import pytest
from tiny_tokenizers import bpe, byte_tokenizer, template
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.prompts import tokenize_prompts
from trainer.datasets.samples.sft_samples import tokenize_sft
from trainer.datasets.samples.unpaired import tokenize_unpaired
from trainer.errors import UserError
from trainer.metrics import in_words

END = "<|im_end|>"
COMMON = {"flag": "--dataset", "max_len": 500, "input_template": None, "apply_chat_template": False}
SFT = {"input_key": None, "output_key": None, "train_on": None, "pretrain_mode": False}
PAIRS = {"prompt_key": None, "chosen_key": "chosen", "rejected_key": "rejected", "margin_key": None}
ANSWER = {"prompt_key": None, "completion_key": "completion", "label_key": "label"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))


def without(letters: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose vocabulary lacks the bytes of `letters`."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    lacking = {char for letter in letters for part, _ in level.pre_tokenize_str(letter) for char in part}
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(set(level.alphabet()) - lacking))}, []))
    backend.pre_tokenizer, backend.decoder = level, byte_tokenizer(None).backend_tokenizer.decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    tokenizer.chat_template = template(END)
    return tokenizer


def talk(question: str, answer: str | None = None) -> list[dict]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns[: 1 + (answer is not None)]


def warnings(tokenize, rows: list[dict], tokenizer, **flags) -> list[str]:
    _, ledger = tokenize(datasets.Dataset.from_list(rows), tokenizer, **COMMON, **flags)
    return [line for line in ledger.lines if line.startswith("WARNING")]


def test_dropped_characters_are_named_once_with_the_number_of_their_rows():
    tokenizer = without("é,😀")
    named = "WARNING: the tokenizer drops these characters, in {:row}: {}"
    for tokenize, flags, rows in (
        (tokenize_sft, SFT, [{"messages": talk("café\n", "b")}, {"messages": talk("a", "b")}]),
        (tokenize_sft, SFT, [{"text": "café"}, {"text": "b"}]),
        (tokenize_sft, SFT, [{"prompt": "a", "completion": "x é b"}, {"prompt": "a", "completion": "b"}]),
        (tokenize_preference, PAIRS, [{"prompt": "a", "chosen": "b", "rejected": "cé d"}]),
        (
            tokenize_unpaired,
            ANSWER,
            [{"prompt": "é a", "completion": "b", "label": True}, {"prompt": "a", "completion": "b", "label": False}],
        ),
        (tokenize_prompts, {"input_key": "messages", "label_key": None}, [{"messages": talk("é")}]),
    ):
        assert warnings(tokenize, rows, tokenizer, **flags) == [in_words(named, 1, "é")], rows
    rows = [{"messages": talk("é, a", "b")}, {"messages": talk("a", "b 😀 c")}]
    assert warnings(tokenize_sft, rows, tokenizer, **SFT) == [in_words(named, 2, "U+002C é 😀")]
    assert not warnings(tokenize_sft, rows, byte_tokenizer(template(END)), **SFT)
    with pytest.raises(UserError, match="row 1: the tokenizer: drops 😀 of message 2"):  # a border of the loss
        warnings(tokenize_sft, [{"messages": talk("a", "😀 b")}], tokenizer, **SFT)


def test_characters_of_calls_and_tools_count_too():
    tools = [{"type": "function", "function": {"name": "tide", "description": "é", "parameters": {}}}]
    called = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "tide", "arguments": {"ß": 1}}}]}
    ]
    chat = "{{ tools|tojson if tools }}" + template(END).replace(
        "m.content", "m.content + (m.tool_calls|default('')|string)"
    )
    tokenizer = without("éß")
    tokenizer.chat_template = chat
    [line] = warnings(tokenize_sft, [{"messages": talk("a") + called, "tools": tools}], tokenizer, **SFT)
    assert line.endswith("in 1 row: ß é")


def test_what_a_normalizer_drops_and_unknown_words_are_named():
    tokenizer = byte_tokenizer(template(END))
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("b", "")
    [line] = warnings(tokenize_sft, [{"messages": talk("ab", "c")}], tokenizer, **SFT)
    assert line.endswith("in 1 row: b")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "user": 1, "assistant": 2, "Fog": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="[UNK]")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    tokenizer.chat_template = template(END)
    [line] = warnings(tokenize_sft, [{"messages": talk("Fog", "rain")}], tokenizer, **SFT)
    assert "[UNK], its unknown token" in line
    assert not warnings(tokenize_sft, [{"messages": talk("Fog", "Fog")}], tokenizer, **SFT)
    assert not warnings(tokenize_sft, [{"messages": talk("Fog", "rain")}], bpe("<|endoftext|>", template(END)), **SFT)


NORMALIZED = {
    "Strip": (normalizers.Strip(), "at the ends of texts", "U+0020"),
    "NFKC": (normalizers.NFKC(), "as others", "\u2460 \ufb01"),
    "NFKC of spaces": (normalizers.NFKC(), "as a space", "U+00A0"),
    "Lowercase": (normalizers.Lowercase(), "as others", "F Q"),
    "Bert": (normalizers.BertNormalizer(lowercase=False), "as a space", "U+0009 U+000A U+00A0"),
    "Bert of controls": (normalizers.BertNormalizer(lowercase=False), "drops these characters,", "U+0007 U+200B"),
    "Replace": (normalizers.Replace("\n", " "), "as a space", "U+000A"),
    "runs": (normalizers.Replace(Regex(" +"), " "), "as one", "U+0020"),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_what_a_normalizer_makes_of_white_space_controls_and_letters_is_named(name):
    normalizer, text, letters = NORMALIZED[name]
    tokenizer = byte_tokenizer(template(END))
    tokenizer.backend_tokenizer.normalizer = normalizer
    rows = [
        {"prompt": "Q\t\u00a0\u2460\nu", "completion": "F\x07\u200b\ufb01  e "},
        {"prompt": "q", "completion": "e\u0301 a"},
    ]
    own = [line for line in warnings(tokenize_sft, rows, tokenizer, **SFT) if text in line]
    assert [line.partition(", in ")[2] for line in own] == [f"1 row: {letters}"]


def test_unicode_forms_of_one_character_and_byte_tokenizers_lose_nothing():
    rows = [{"messages": talk(" \t\u00e9 e\u0301\r\n", " F\x07\u200b\ufeff\u2028  ")}]
    for normalizer in (None, normalizers.NFC(), normalizers.NFD()):
        tokenizer = byte_tokenizer(template(END))
        if normalizer:
            tokenizer.backend_tokenizer.normalizer = normalizer
        assert not warnings(tokenize_sft, rows, tokenizer, **SFT)


def test_a_template_that_trims_messages_is_named_with_the_number_of_rows():
    tokenizer = byte_tokenizer(template(END).replace("m.content", "m.content|trim"))
    rows = [{"messages": talk(question, answer)} for question, answer in ((" a", "b"), ("a", "b\n"), ("a", "b"))]
    _, ledger = tokenize_sft(datasets.Dataset.from_list(rows), tokenizer, **COMMON, **SFT)
    named = "the chat template leaves out white space at the ends of messages ({} rows)"
    assert named.format(2) in ledger.lines
    _, ledger = tokenize_sft(datasets.Dataset.from_list(rows), byte_tokenizer(template(END)), **COMMON, **SFT)
    assert not [line for line in ledger.lines if "white space" in line]
