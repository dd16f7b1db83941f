"""Built-in rewards for the form of a response, and for answers in tags or letters."""

import re

from trainer.datasets.conversations.thoughts import after_thoughts
from trainer.rollout.rewards.math_reward import same_answer

FORM = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*", re.DOTALL
)
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
STATED = re.compile(r"(?i:answer|choice|option)\s*(?i:is|:)?\s*:?\s*\**\(?([A-J])\b(?![\w'])")
ALONE = re.compile(r"(?<![\w'])\(?([A-J])(?=[).:\s*]*$)", re.MULTILINE)


def format_reward(prompts: list[str], responses: list[str], labels: list) -> list[float]:
    """1 if the response is <think>...</think><answer>...</answer> and no more, else 0. It reads no label."""
    return [float(bool(FORM.fullmatch(response))) for response in responses]


def answer_reward(prompts: list[str], responses: list[str], labels: list[str]) -> list[float]:
    """1 if the text of the last <answer>...</answer> equals that of the label as a number or a text, else 0."""
    found = [tagged_answer(after_thoughts(response)) for response in responses]
    wanted = [tagged_answer(label) or label for label in labels]
    return [float(own is not None and same_answer(own, other)) for own, other in zip(found, wanted)]


def multiple_choice_reward(prompts: list[str], responses: list[str], labels: list[str]) -> list[float]:
    """1 if response and label choose the same letter from A to J, else 0."""
    chosen = [
        (chosen_letter(after_thoughts(response)), chosen_letter(label)) for response, label in zip(responses, labels)
    ]
    return [float(own is not None and own == other) for own, other in chosen]


def tagged_answer(text: str) -> str | None:
    """The text in the last <answer>...</answer>."""
    found = TAGGED.findall(text)
    return found[-1].strip() if found else None


def chosen_letter(text: str) -> str | None:
    """The letter that a text chooses: in <answer>, after "answer is" or "answer:", or alone at the end of a line; the last one."""
    text = (tagged_answer(text) or text).replace("\\boxed{", " ").replace("}", " ")
    for pattern in (STATED, ALONE):
        if found := pattern.findall(text):
            return found[-1]
    return None
