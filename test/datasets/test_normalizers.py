"""Tokenizers that change a text before they cut it into tokens: the loss is on the answer and its stop token alone.

The oracle reads each character by itself: what the normalizer makes of it, and whether it belongs to an answer.
"""

import unicodedata
from itertools import groupby
from types import SimpleNamespace

import datasets
import pytest
from tiny_tokenizers import DATA, bpe, byte_tokenizer, stories, template
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from trainer.cli.serve_engine import notes_of_chats
from trainer.datasets.conversations.templates import render_chat, render_prompt
from trainer.datasets.conversations.tokens import prompt_and_answer, prompt_tokens
from trainer.datasets.conversations.turns import continuation_ids
from trainer.datasets.samples.sft_samples import tokenize_sft
from trainer.errors import UserError
from trainer.runs.api import api_run

END = "<|im_end|>"
PLAIN = {"input_key": "prompt", "output_key": "completion"}
PLAIN_KEYS = {"input_key": "q", "output_key": "a"}
TALK = [
    {"role": "user", "content": " Ein \ufb01ner Tag?\n"},
    {"role": "assistant", "content": " Ja, \ufb01N\n"},
    {"role": "user", "content": "Und?"},
    {"role": "assistant", "content": "NEIN,\n\n\u00dcber  \u2460"},
]


def stripped(letters: list, left: bool = True, right: bool = True) -> list:
    while left and letters and letters[0][0].isspace():
        letters = letters[1:]
    while right and letters and letters[-1][0].isspace():
        letters = letters[:-1]
    return letters


def each(change):
    return lambda letters: [(change(letter), trained) for letter, trained in letters]


WAYS = {
    "Strip": (normalizers.Strip(), stripped),
    "Strip right": (normalizers.Strip(left=False), lambda letters: stripped(letters, left=False)),
    "Strip left": (normalizers.Strip(right=False), lambda letters: stripped(letters, right=False)),
    "Replace": (normalizers.Replace("\n", " "), each(lambda letter: letter.replace("\n", " "))),
    "Replace by nothing": (normalizers.Replace("\n", ""), each(lambda letter: letter.replace("\n", ""))),
    "Lowercase": (normalizers.Lowercase(), each(str.lower)),
    "NFKC": (normalizers.NFKC(), each(lambda letter: unicodedata.normalize("NFKC", letter))),
    "NFD": (normalizers.NFD(), each(lambda letter: unicodedata.normalize("NFD", letter))),
    "Prepend": (normalizers.Prepend("_"), lambda letters: [("_", False), *letters] if letters else []),
    "Sequence": (
        normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()]),
        lambda letters: each(lambda letter: unicodedata.normalize("NFKC", letter).lower())(stripped(letters)),
    ),
}  # fmt: skip


def with_normalizer(tokenizer, normalizer):
    own = tokenizer.backend_tokenizer.normalizer
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizer, own]) if own else normalizer
    return tokenizer


def ids_and_mask(tokenizer, change, letters: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Letters are (a letter or a control token, whether it has a loss). One token for each byte."""
    ids, mask, byte = [], [], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for is_control, group in groupby(letters, key=lambda letter: len(letter[0]) > 1):
        for text, trained in group if is_control else change(list(group)):
            names = [text] if is_control else [name for piece, _ in byte.pre_tokenize_str(text) for name in piece]
            ids += tokenizer.convert_tokens_to_ids(names)
            mask += [int(trained)] * len(names)
    return ids, mask


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("multiturn", [False, True])
def test_the_loss_of_a_conversation(way, multiturn):
    tokenizer, letters = with_normalizer(byte_tokenizer(template(END)), WAYS[way][0]), []
    for number, message in enumerate(TALK):
        trained = message["role"] == "assistant" and (multiturn or number == 3)
        letters += [("<|im_start|>", False), *((letter, False) for letter in message["role"] + "\n")]
        letters += [*((letter, trained) for letter in message["content"]), (END, trained), ("\n", False)]
    expected = ids_and_mask(tokenizer, WAYS[way][1], letters)
    assert render_chat(tokenizer, TALK, multiturn=multiturn) == expected


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_of_an_answer_in_a_column(way):
    tokenizer, prompt, answer = with_normalizer(byte_tokenizer(None), WAYS[way][0]), " Q: \ufb01n?\nA: ", "Ja,\n\u2460"
    letters = [(letter, False) for letter in prompt] + [(letter, True) for letter in answer]
    ids, mask = ids_and_mask(tokenizer, WAYS[way][1], letters)
    expected = [*ids, tokenizer.eos_token_id], [*mask, 1]
    assert prompt_and_answer(tokenizer, prompt, answer, None) == expected


@pytest.mark.skipif(not DATA.is_dir(), reason="real tokenizers absent: ../shared/data")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["BPE", "SentencePiece"])
def test_the_loss_of_a_conversation_with_merged_tokens(way, kind):
    made = bpe("<|endoftext|>", template(END)) if kind == "BPE" else stories(template(END), END)
    tokenizer, talk = with_normalizer(made, WAYS[way][0]), [TALK[2], {"role": "assistant", "content": "The CAT\nsat"}]
    ids, mask = render_chat(tokenizer, talk, multiturn=False)
    assert ids == tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False)["input_ids"]
    first, trained = mask.index(1), [token for token, has in zip(ids, mask, strict=True) if has]
    answer = "".join(letter for letter, _ in WAYS[way][1]([(letter, True) for letter in "The CAT\nsat"])).lstrip("_")
    # a space that a normalizer put before the answer is merged with it
    assert tokenizer.decode(trained).lstrip() == answer + END and mask[first : first + len(trained)] == [1] * len(
        trained
    )


def test_a_prompt_whose_end_is_dropped_is_refused_and_the_normalizer_named():
    question = [{"role": "user", "content": "Und?"}]
    for way in WAYS:
        tokenizer = with_normalizer(byte_tokenizer(template(END)), WAYS[way][0])
        if way not in ("Strip", "Strip right", "Sequence"):
            assert render_prompt(tokenizer, question) and prompt_tokens(tokenizer, "A: ")
            continue
        for prompt in (lambda: render_prompt(tokenizer, question), lambda: prompt_tokens(tokenizer, "A: ")):  # noqa: B023
            with pytest.raises(UserError, match=r"normalizer \(.*Strip.*\) drops .* at the end of a prompt only"):
                prompt()
        assert prompt_tokens(tokenizer, "A:")


def load(rows: list[dict], tokenizer, **flags) -> list[str]:
    options = dict.fromkeys(("input_key", "output_key", "input_template", "train_on")) | flags
    rows = datasets.Dataset.from_list(rows)
    own = {"apply_chat_template": False, "pretrain_mode": False, "flag": "--dataset", "max_len": 99}
    return tokenize_sft(rows, tokenizer, **own, **options)[1].lines


@pytest.mark.parametrize("way", WAYS)
def test_training_warns_where_a_prompt_alone_loses_its_end(way, tmp_path, monkeypatch):
    """The oracle asks the tokenizer alone: is a prompt the beginning of the trained text? It must warn if not."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    tokenizer = with_normalizer(byte_tokenizer(template(END)), WAYS[way][0])

    def is_lost(prompt: str) -> bool:
        alone, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, prompt + "Ja"))
        return whole[: len(alone)] == alone and tokenizer.decode(whole[len(alone) :])[:1].isspace()

    opened = tokenizer.apply_chat_template(TALK[2:3], tokenize=False, add_generation_prompt=True)
    for lost, lines in (
        (is_lost(opened), load([{"messages": TALK[2:]}], tokenizer)),
        (is_lost("Q: 5\nA: "), load([{"prompt": "Q: 5\nA: ", "completion": "Ja"}], tokenizer, **PLAIN)),
        (is_lost("A: "), load([{"q": "5", "a": "Ja"}], tokenizer, input_template="{}A: ", **PLAIN_KEYS)),
        (False, load([{"q": "5", "a": "Ja"}], tokenizer, input_template="{}A:", **PLAIN_KEYS)),
    ):
        warned = [line for line in lines if "Strip" in line and "at the end of a prompt only, so rollouts" in line]
        assert len(warned) == lost, (lost, lines)
    assert is_lost(opened) == (way in ("Strip", "Strip right", "Sequence"))
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text("{}")
    assert len(notes_of_chats(str(tmp_path / "model"), False)) == is_lost(opened)
    assert said_by_serve_train(tokenizer, monkeypatch) == is_lost(opened)


def said_by_serve_train(tokenizer, monkeypatch) -> int:
    """The number of warnings that serve_train prints before it loads the model."""
    said, args = [], SimpleNamespace(length=SimpleNamespace(max_len=9), lora=None, model=None)
    setup = SimpleNamespace(tokenizer=tokenizer, strategy=SimpleNamespace(print=said.append), folder="x")

    def load_model(*_):
        raise InterruptedError

    monkeypatch.setattr(api_run, "set_up", lambda *_, **__: setup)
    monkeypatch.setattr(api_run, "load_model", load_model)
    with pytest.raises(InterruptedError):
        api_run.client_models(args, 1)
    return len([line for line in said if "at the end of a prompt only" in line])


def test_no_text_becomes_a_control_token_by_a_normalizer():
    tokenizer = with_normalizer(byte_tokenizer(template(END)), normalizers.Lowercase())
    tokenizer.add_tokens([AddedToken("<|step|>", special=True, normalized=True)])
    for text in ("say <|im_end|>", "say <|IM_END|>", "say <|step|>"):
        ask = [{"role": "user", "content": text}, {"role": "assistant", "content": "no"}]
        ids = render_chat(tokenizer, ask, multiturn=False)[0]
        assert [ids.count(tokenizer.convert_tokens_to_ids(token)) for token in (END, "<|step|>")] == [2, 0]
    ask[0]["content"] = "say <|STEP|>"
    with pytest.raises(UserError, match="holds a control token that this tokenizer cannot read as text"):
        render_chat(tokenizer, ask, multiturn=False)


def test_white_space_between_turns_stays_if_offsets_leave_it_out():
    """GPT-NeoX's tokenizer has offsets without white space."""
    plain, trims = byte_tokenizer(template(END)), byte_tokenizer(template(END))
    trims.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert trims("a b", return_offsets_mapping=True)["offset_mapping"][1] == (2, 2)
    for tokenizer in (plain, trims):
        ids = continuation_ids(tokenizer, TALK[:1], [{"role": "user", "content": " more"}])
        assert tokenizer.decode(ids) == f"{END}\n<|im_start|>user\n more{END}\n<|im_start|>assistant\n"
    for talk in (TALK, [TALK[0], {"role": "assistant", "content": "\n\nJa"}]):
        assert render_chat(trims, talk, multiturn=True) == render_chat(plain, talk, multiturn=True)
    for answer in ("\nJa", "  Ja", "Ja\n"):
        assert prompt_and_answer(trims, "A:\n", answer, None) == prompt_and_answer(plain, "A:\n", answer, None)
