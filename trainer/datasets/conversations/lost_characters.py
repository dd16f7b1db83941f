"""What a row loses on its way to ids: characters that a tokenizer drops, unknown words, thoughts. Its notes name them."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from trainer.datasets.conversations.control_tokens import BREAK
from trainer.datasets.conversations.messages import CONTENTS, THOUGHTS, role_of
from trainer.datasets.shapes.notes import Notes, counted

_dropped: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by tokenizer: {character: whether it is dropped}


def note_lost(notes: Notes, tokenizer: Any, values: Iterable[Any], *ids: list[int]) -> None:
    """Note what the `ids` of a row lack of the texts and messages in its `values`: see `lost_letters`.

    Thoughts of the assistant are searched in the decoded ids, without white space.
    """
    values = list(values)
    notes.lost |= lost_letters(tokenizer, values)
    if _lost_thoughts(tokenizer, values, ids):
        notes.facts.add(counted("the chat template leaves out the thoughts of earlier turns ({} rows)"))
    unknown, others = tokenizer.unk_token_id, (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    if unknown is not None and unknown not in others and any(unknown in own for own in ids):
        found = f"reads some words or characters as {tokenizer.unk_token}, its unknown token"
        notes.facts.add(f"WARNING: the tokenizer {found}")


def _lost_thoughts(tokenizer: Any, values: Iterable[Any], ids: tuple[list[int], ...]) -> bool:
    messages = [m for value in values if isinstance(value, list) for m in value if isinstance(m, dict)]
    thoughts = [text for m in messages if role_of(m) == "assistant" for text in _thoughts(m)]
    if not thoughts:
        return False
    tokenizer = getattr(tokenizer, "of_texts", tokenizer)

    def plain(own: list[int]) -> str:
        return "".join(tokenizer.decode(own, clean_up_tokenization_spaces=False).split())

    shown = [plain(own) for own in ids]
    texts = [plain(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in thoughts]
    return not all(any(text in own for own in shown) for text in texts)


def _thoughts(message: dict) -> Iterator[str]:
    """The thoughts of a message of a row, under keys of their own and in its content."""
    for key in (*THOUGHTS, *CONTENTS):
        text = message.get(key)
        if isinstance(text, str) and (key in THOUGHTS or "</think>" in text):
            yield text if key in THOUGHTS else text.rpartition("</think>")[0].rpartition("<think>")[2].strip()


def lost_letters(tokenizer: Any, values: Iterable[Any]) -> set[str]:
    """The characters in the texts of `values` that give no token, for a line of a run.

    Byte-level tokenizers without all 256 bytes drop characters, and so do normalizers that clean texts. White space,
    ASCII control characters and the breaks of `control_tokens` do not count.
    """
    tokenizer = getattr(tokenizer, "of_texts", tokenizer)
    known = _dropped.setdefault(tokenizer, {})
    found = set()
    for letter in set().union(*_texts(list(values))):
        if letter not in known:
            known[letter] = _is_dropped(tokenizer, letter)
        if known[letter]:
            found.add(letter if letter.isprintable() and letter != "," else f"U+{ord(letter):04X}")
    return found


def _is_dropped(tokenizer: Any, letter: str) -> bool:
    if letter.isspace() or letter == BREAK or letter < " ":
        return False
    return not tokenizer(letter, add_special_tokens=False)["input_ids"]


def _texts(value: Any) -> Iterator[str]:
    """The texts in JSON values, with the keys of objects: the arguments of a tool have words there."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _texts(list(pair))
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _texts(child)
