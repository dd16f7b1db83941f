"""Token ids of a text in which data stays data: a control token that the data spells out is read as plain text.

Otherwise a user, a tool or a document could write <|im_end|> and open a turn of the assistant. A break inside each
such text, put there before the chat template is rendered, shows the tokenizer which control tokens are the data's.
"""

import json
import re
import weakref
from bisect import bisect_left
from itertools import accumulate
from typing import Any

from trainer.datasets.conversations.messages import CALL, role_of
from trainer.datasets.rows import HALF
from trainer.errors import UserError, one_line
from trainer.limits import limit, too_large
from trainer.metrics import counted

BREAK = "\ufdd0"  # a noncharacter of Unicode: no text holds it, and no template or tokenizer reads it
CONTROL_LIKE = re.compile(r"<[|｜].*[|｜]>")  # an added token of such a form is a control token, special or not
KEEPS_END = "a tokenizer that keeps it, or a prompt or chat template that does not end with it"
NO_TEXT = "holds a control token that this tokenizer cannot read as text"
# by tokenizer: its number of tokens, the pattern, and the control tokens (id: text) that it finds in normalized texts
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def is_control(token: Any) -> bool:
    """Whether an added token of a vocabulary is a control token."""
    return token.special or CONTROL_LIKE.fullmatch(str(token)) is not None


def is_stop_token(tokenizer: Any, token: int) -> bool:
    """Whether a token ends a turn or a text: the eos token or any control token of the vocabulary."""
    if token in tokenizer.all_special_ids:
        return True
    added = tokenizer.added_tokens_decoder.get(token)
    return added is not None and is_control(added)


def control_pattern(tokenizer: Any) -> re.Pattern | None:
    """What matches the text of a control token, or None if the tokenizer has none."""
    return _controls(tokenizer)[0]


def _controls(tokenizer: Any) -> tuple[re.Pattern | None, dict[int, str]]:
    tokenizer = getattr(tokenizer, "of_texts", tokenizer)
    size, *found = _known.get(tokenizer, (None,))
    if size != len(tokenizer):
        added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if is_control(token)}
        texts = {str(token) for token in added.values()} | set(tokenizer.all_special_tokens)
        texts = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        changes = changes_texts(tokenizer)
        found = [pattern, {number: str(token) for number, token in added.items() if changes and token.normalized}]
        _known[tokenizer] = len(tokenizer), *found
    return tuple(found)


def reads_controls(tokenizer: Any) -> bool:
    """Whether control tokens in texts stay control tokens: the flag --read_control_tokens."""
    return getattr(tokenizer, "reads_control_tokens", False)


def broken(tokenizer: Any, value: Any, only: frozenset[str] | None = None) -> Any:
    """`value`, a text or JSON values, with BREAK in each control token of its texts; `only`: in these alone."""
    pattern = control_pattern(tokenizer)
    if reads_controls(tokenizer) or pattern is None:
        return value
    return _mapped(value, lambda text: pattern.sub(lambda match: _split(match[0], only), text))


def broken_document(tokenizer: Any, text: str, *, opens: bool = True) -> str:
    """`text` with BREAK in its control tokens, except an eos at its end and, if it `opens` a sample, a bos at its start."""
    start = tokenizer.bos_token if opens and tokenizer.bos_token and text.startswith(tokenizer.bos_token) else ""
    end = tokenizer.eos_token if tokenizer.eos_token and text[len(start) :].endswith(tokenizer.eos_token) else ""
    return start + broken(tokenizer, text[len(start) : len(text) - len(end)]) + end


def broken_messages(tokenizer: Any, messages: list[dict], frame: str) -> list[dict]:
    """Messages with BREAK in the control tokens of their texts.

    An answer may hold control tokens of the model's own, such as those of a call. There, only tokens of `frame` are
    broken: the text of the template around a message.
    """
    pattern = control_pattern(tokenizer)
    of_frame = frozenset(pattern.findall(frame)) if pattern else frozenset()
    return [
        {
            key: value
            if key == "role"
            else broken(tokenizer, value, of_frame if message["role"] == "assistant" else None)
            for key, value in message.items()
        }
        for message in messages
    ]


def holds_controls(tokenizer: Any, *values: Any) -> bool:
    """Whether texts, or messages that are not the assistant's, hold control tokens that are read as plain text.

    The first text opens the sample; the others follow it. A bos or eos at the ends of a text is its own, but not at those of
    a message.
    """

    def holds(value: Any) -> bool:
        if isinstance(value, str):
            return BREAK in broken(tokenizer, value)
        if isinstance(value, dict):
            return role_of(value) not in ("assistant", CALL) and any(map(holds, value.values()))
        return isinstance(value, list) and any(map(holds, value))

    return any(
        BREAK in broken_document(tokenizer, value, opens=number == 0 or not values[0])
        if isinstance(value, str)
        else holds(value)
        for number, value in enumerate(values)
    )


def whole(text: str) -> str:
    """The text without breaks."""
    return text.replace(BREAK, "")


def is_escaped(text: str) -> bool:
    """Whether a template wrote a break as an escape of JSON, which `encode` would not find."""
    return "\\ufdd0" in text.lower()


def inside(blocks: list[tuple[int, int]], offsets: list[tuple[int, int]]) -> list[int]:
    """1 for each token that has a character of a block. Both have offsets (start, end)."""
    blocks = sorted(block for block in blocks if block[0] is not None)
    starts = [start for start, _ in blocks]
    ends = [-1, *accumulate((end for _, end in blocks), max)]  # the last end of the blocks before each
    return [int(ends[bisect_left(starts, b)] > a) for a, b in offsets]


def encode(tokenizer: Any, text: str, *, opens: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
    """(ids, offsets) of a text that may hold BREAK. Offsets (start, end) count characters of `text`, with its breaks.

    `opens`: with the tokenizer's opening tokens, unless the text has its bos, and without the eos that it may add.
    A broken control token gives the ids of its characters. Raises UserError if the tokenizer cannot do that, or if its
    normalizer makes a control token of another text (<|IM_END|>).
    """
    opens = opens and not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
    ids, offsets = _encoded(tokenizer, text, add_special_tokens=opens)
    eos = tokenizer.eos_token_id
    if opens and ids and ids[-1] == eos and tokenizer("a")["input_ids"][-1] == eos:
        ids, offsets = ids[:-1], offsets[:-1]
    normalized = {} if reads_controls(tokenizer) else _controls(tokenizer)[1]
    if normalized and any(
        token in normalized and text[a:b].strip() not in ("", normalized[token])
        for token, (a, b) in zip(ids, offsets, strict=True)
    ):
        raise UserError("a text", NO_TEXT, "another text, or --read_control_tokens")
    return _without_breaks(tokenizer, text, ids, offsets) if BREAK in text else (ids, offsets)


def ids_behind(tokenizer: Any, text: str, mark: str) -> list[int]:
    """The ids behind the last `mark` of a text. The whole is tokenized: SentencePiece begins a part with a space."""
    start = text.rindex(mark) + len(mark)
    if not tokenizer.is_fast:
        return encode(tokenizer, text[start:])[0]
    ids, offsets = encode(tokenizer, text)
    return ids[first_behind(offsets, start) :]


def first_behind(offsets: list[tuple[int, int]], place: int) -> int:
    """The number of the first token with a character behind `place` of the text. One that reaches over it counts."""
    return next((i for i, (_, end) in enumerate(offsets) if end > place), len(offsets))


def check_end(tokenizer: Any, text: str, offsets: list[tuple[int, int]]) -> None:
    """Check that `offsets`, of the tokens of a prompt, reach the end of its text.

    Raises: UserError if the normalizer drops the end here, but not before an answer (Strip). The answer would then follow
    other ids than in training.
    """
    if found := dropped_end(tokenizer, text, offsets):
        raise UserError("the tokenizer", f"its {found}", KEEPS_END)


def dropped_end(tokenizer: Any, text: str, offsets: list[tuple[int, int]]) -> str | None:
    """What the normalizer drops at the end of a prompt with these tokens, but not before an answer. None: nothing."""
    end = offsets[-1][1] if offsets else len(text)
    if end < len(text) and any(end < last <= len(text) for _, last in encode(tokenizer, text + "x")[1]):
        return f"normalizer ({_normalizers(tokenizer)}) drops {whole(text[end:])!r} at the end of a prompt only"
    return None


def notes_of_end(tokenizer: Any, text: str, opens: bool) -> set[str]:
    """The warning for a prompt whose end gets lost if it is tokenized without its answer. See `encode` for `opens`."""
    if not text[-1:].isspace() or not changes_texts(tokenizer):
        return set()
    found = dropped_end(tokenizer, text, encode(tokenizer, text, opens=opens)[1])
    places = "so rollouts and servers give the model other ids than training"
    return {f"WARNING: the tokenizer's {found}, {places}; use {KEEPS_END}"} if found else set()


def changes_texts(tokenizer: Any) -> bool:
    """Whether a tokenizer has a normalizer, which changes a text before it cuts it."""
    own = getattr(tokenizer, "of_texts", tokenizer)
    return own.is_fast and own.backend_tokenizer.normalizer is not None


def _normalizers(tokenizer: Any) -> str:
    """The names of what changes a text before it becomes tokens."""
    found = json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"] or {}
    return ", ".join(one["type"] for one in found.get("normalizers", [found]))


def _encoded(tokenizer: Any, text: str, **options: Any) -> tuple[list[int], list[tuple[int, int]]]:
    if half := HALF.search(text):
        raise UserError("a text", f"holds \\u{ord(half[0]):x}, one half of a character", "whole characters of Unicode")
    if len(text) > limit("text_mb") << 20:
        raise too_large("a text", counted(len(text), "character"), "text_mb")
    if not tokenizer.is_fast:
        if BREAK in text:
            found = "holds control tokens, which a tokenizer without a fast version reads as such"
            raise UserError("a text", found, "another text, or --read_control_tokens")
        return list(tokenizer(text, **options)["input_ids"]), []
    try:
        out = tokenizer(text, return_offsets_mapping=True, **options)
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":  # a panic of the library: no Exception, and no class to name
            raise
        raise UserError(
            "the tokenizer", f"fails at a text: {one_line(error)}", "another text, or a tokenizer"
        ) from None
    return list(out["input_ids"]), [tuple(pair) for pair in out["offset_mapping"]]


def _without_breaks(
    tokenizer: Any, text: str, ids: list[int], offsets: list[tuple[int, int]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of `text` as if it had no breaks and its broken control tokens were letters like others.

    Each stretch between two real added tokens is tokenized again without special tokens. If a stretch depends on what
    stands before it, the tokens of the breaks are only left out.
    """
    added, new_ids, new_offsets, first = tokenizer.added_tokens_decoder, [], [], 0
    borders = [i for i, token in enumerate(ids) if token in added] + [len(ids)]
    for border in borders:
        stretch = list(zip(ids[first:border], offsets[first:border], strict=True))
        if stretch:
            start, end = stretch[0][1][0], stretch[-1][1][1]
            stretch = _stretch(tokenizer, text[start:end], start, stretch) if BREAK in text[start:end] else stretch
        new_ids += [token for token, _ in stretch] + ids[border : border + 1]
        new_offsets += [span for _, span in stretch] + offsets[border : border + 1]
        first = border + 1
    return new_ids, new_offsets


def _stretch(tokenizer: Any, text: str, start: int, found: list[tuple[int, tuple[int, int]]]) -> list:
    """(id, offsets) of a stretch of the whole text from `start` on; `found`: its tokens with those of the breaks."""
    controls = control_pattern(tokenizer)
    if _encoded(tokenizer, text, add_special_tokens=False)[0] == [token for token, _ in found]:
        plain = whole(text)
        places = [i for i, letter in enumerate(text) if letter != BREAK] + [len(text)]  # of each letter of `plain`
        ids, offsets = _encoded(tokenizer, plain, add_special_tokens=False, split_special_tokens=True)
        if not any(controls.fullmatch(token) for token in tokenizer.convert_ids_to_tokens(ids)):
            return [
                (t, (start + places[a], start + places[max(b - 1, a)] + (b > a))) for t, (a, b) in zip(ids, offsets)
            ]
    breaks = [i + start for i, letter in enumerate(text) if letter == BREAK]
    kept = []
    for token, (a, b) in found:
        inside = breaks[bisect_left(breaks, a) : bisect_left(breaks, b)]
        if not inside:
            kept.append((token, (a, b)))
        elif b - a > len(inside):
            raise UserError("a text", NO_TEXT, "another text, or --read_control_tokens")
    return kept


def _split(control: str, only: frozenset[str] | None) -> str:
    return control[0] + BREAK + control[1:] if only is None or control in only else control


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return type(value)({key: _mapped(child, change) for key, child in value.items()})
    return [_mapped(child, change) for child in value] if isinstance(value, list) else value
