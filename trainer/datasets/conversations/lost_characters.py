"""What a row loses on its way to ids: characters that a tokenizer drops, unknown words, thoughts. Its notes name them."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any
from unicodedata import normalize

from trainer.datasets.conversations.control_tokens import BREAK
from trainer.datasets.conversations.messages import CONTENTS, THOUGHTS, role_of
from trainer.datasets.shapes.notes import Notes, summed

_fates: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by tokenizer: {character: its sets of `Notes`}


def note_lost(notes: Notes, tokenizer: Any, values: Iterable[Any], *ids: list[int]) -> None:
    """Note what the `ids` of a row lack of the texts and messages in its `values`: see `fates_of`.

    Thoughts of the assistant are searched in the decoded ids, without white space.
    """
    values = list(values)
    for name, letters in fates_of(tokenizer, values).items():
        getattr(notes, name).update(letters)
    if _lost_thoughts(tokenizer, values, ids):
        notes.facts.add(summed("the chat template leaves out the thoughts of earlier turns ({:row})"))
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
    """The characters in the texts of `values` that give no token, for a line of a run."""
    return fates_of(tokenizer, values)["lost"]


def fates_of(tokenizer: Any, values: Iterable[Any]) -> dict[str, set[str]]:
    """The characters in the texts of `values` that do not become tokens of their own: see LINES of `notes`.

    Byte-level tokenizers without all 256 bytes drop characters. Normalizers clean texts, or make a space of a tab. Each
    character is tried between two letters, and at both ends. The breaks of `control_tokens` do not count.
    """
    tokenizer = getattr(tokenizer, "of_texts", tokenizer)
    known = _fates.setdefault(tokenizer, {})
    found: dict[str, set[str]] = {name: set() for name in ("lost", "spaces", "changed", "runs", "ends")}
    texts = list(_texts(list(values)))
    for letter in set().union(*texts) - {BREAK}:
        if letter not in known:
            known[letter] = _fate(tokenizer, letter)
        for fate in known[letter]:
            if _is_met(fate, letter, texts):
                shown = letter.isprintable() and letter not in ", "
                found[fate].add(letter if shown else f"U+{ord(letter):04X}")
    return found


def _is_met(fate: str, letter: str, texts: list[str]) -> bool:
    """Whether texts with a character have it where its fate meets it: twice in turn, or at an end."""
    if fate == "runs":
        return any(letter * 2 in text for text in texts)
    return fate != "ends" or any(letter in (text[:1], text[-1:]) for text in texts)


def _fate(tokenizer: Any, letter: str) -> tuple[str, ...]:
    """What happens to a character: the names of its sets in `Notes`."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    alone, inside, without = ids(letter), ids(f"a{letter}b"), ids("ab")
    is_space, is_odd = letter.isspace(), tokenizer.unk_token_id in inside or not without
    if (not alone and not is_space) or (inside == without and not is_odd):
        return ("lost",)
    if is_odd:
        return ()
    if not is_space:
        return ("changed",) if _is_changed(tokenizer, letter) else ()
    found = ["spaces"] if letter != " " and inside == ids("a b") else []
    found += ["runs"] if ids(f"a{letter * 2}b") == inside else []
    return (*found, "ends") if ids(f"a{letter}") == ids("a") else tuple(found)


def _is_changed(tokenizer: Any, letter: str) -> bool:
    """Whether a normalizer makes another character of this one, such as a small letter. NFC and NFD have the same ones."""
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    return normalizer is not None and normalize("NFD", letter) not in normalize(
        "NFD", normalizer.normalize_str(f"a{letter}b")
    )


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
