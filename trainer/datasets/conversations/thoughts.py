"""The marks around thoughts in a generated turn, and the turn without its thoughts."""

import re

OPEN_THOUGHTS = ("<think>", "<seed:think>", "[THINK]", "◁think▷", "<|START_THINKING|>", "<|channel>thought")
CLOSED_THOUGHTS = ("</think>", "</seed:think>", "[/THINK]", "◁/think▷", "<|END_THINKING|>", "<channel|>")
_OPENS, _CLOSES = ("|".join(map(re.escape, marks)) for marks in (OPEN_THOUGHTS, CLOSED_THOUGHTS))
THOUGHTS = re.compile(f"(?:{_OPENS}).*?(?:{_CLOSES}|\\Z)", re.DOTALL)
FIRST_MARK = re.compile(f"(?P<opens>{_OPENS})|(?P<closes>{_CLOSES})")
HARMONY_THOUGHTS = re.compile(
    r"<\|channel\|>analysis\s*<\|message\|>.*?(?:<\|(?:end|call|return)\|>|\Z)", re.DOTALL
)  # a call on this channel has a recipient before <|message|>
HARMONY_MARKS = ("<|channel|>", "<|message|>")
HARMONY_ANSWER = re.compile(r"<\|channel\|>final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
# tokens that part thoughts from the answer. A reward sees them, though some tokenizers call them special
MARKS = frozenset((*OPEN_THOUGHTS, *CLOSED_THOUGHTS, *HARMONY_MARKS, "<|channel>"))


def after_thoughts(text: str) -> str:
    """What follows the last mark that closes thoughts, or the whole text. In harmony, the text on the channel `final`."""
    if HARMONY_MARKS[0] in text:
        return "".join(HARMONY_ANSWER.split(text)[1:][-1:])
    return re.split(_CLOSES, text)[-1]


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends inside thoughts, as generation prompts of reasoning models do."""
    return prompt.rstrip().endswith(OPEN_THOUGHTS)


def without_thoughts(text: str, in_thoughts: bool = False) -> str:
    """A turn without its thoughts, also those that the prompt has opened, and those that no mark ends."""
    first = FIRST_MARK.search(text)
    if first and first["closes"]:
        text = text[first.end() :]
    elif in_thoughts:
        return ""
    return HARMONY_THOUGHTS.sub("", THOUGHTS.sub("", text))
