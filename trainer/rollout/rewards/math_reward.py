"""Rewards that need no model: the final answer of a solution, compared with the reference by value; and exact match."""

import re
from fractions import Fraction

from trainer.datasets.conversations.thoughts import after_thoughts
from trainer.rollout.rewards.formulas import equal_as_formulas

MOST_CHARACTERS = 1000  # a longer answer is not read as a number; a policy may write anything
EXACT = re.compile(r"[-+]?(?:[0-9]+/0*[1-9][0-9]*|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?)")
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?|-?\$?\.\d+")


def final_answer(text: str) -> str | None:
    """The answer that a solution gives, or None if there is none.

    First choice: the text after the last `####` (GSM8K, Cobbe et al. 2021). Second: the content of the last
    \\boxed{...} (MATH, Hendrycks et al. 2021). Third: the last number.
    """
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n")[0].strip() or None
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : end]
    return None


def as_number(text: str) -> Fraction | None:
    """The exact value of 1,234.50, $7, -3/4, \\frac{3}{4}, 1e3 or 50%. None for anything else.

    1e999999999 also gives None: Fraction would hang on it, and no other thread could run.
    """
    if len(text) > MOST_CHARACTERS:
        return None
    plain = re.sub(r"\\d?frac\{([^{}]+)\}\{([^{}]+)\}", r"\1/\2", text)
    plain = re.sub(r"[\s,$]|\\[!,;%$]|\.$", "", plain)
    percent = plain.endswith("%")
    plain = plain.removesuffix("%")
    if not EXACT.fullmatch(plain):
        return None
    return Fraction(plain) / 100 if percent else Fraction(plain)


def same_answer(found: str, wanted: str) -> bool:
    """Whether two answers are equal as numbers, or as texts without white space. 50% is both 50 and 1/2."""
    numbers = [as_number(text) for text in (found, wanted)]
    if None not in numbers:
        bare = [as_number(re.sub(r"\\?%", "", text)) for text in (found, wanted)]
        return numbers[0] == numbers[1] or bare[0] == bare[1]
    return "".join(found.split()) == "".join(wanted.split())


def math_reward(prompts: list[str], responses: list[str], labels: list[str]) -> list[float]:
    """1 if response and label have the same final answer after the thoughts, else 0. The label is a solution, or only the answer.

    Answers that are not numbers and not the same text are compared as formulas, except with labels of GSM8K.
    """
    scores, doubtful = [], {}
    for response, label in zip(responses, labels):
        is_solution = "####" in label or "\\boxed{" in label
        found, wanted = (
            final_answer(after_thoughts(response)),
            (final_answer(label) if is_solution else None) or label,
        )
        scores.append(float(found is not None and same_answer(found, wanted)))
        if found and not scores[-1] and "####" not in label and None in (as_number(found), as_number(wanted)):
            doubtful[len(scores) - 1] = (found, wanted)
    for number, equal in zip(doubtful, equal_as_formulas(list(doubtful.values()))):
        scores[number] = float(equal)
    return scores


def math_boxed(prompts: list[str], responses: list[str], labels: list[str]) -> list[float]:
    """As math_reward, but the answer of a response is the content of its last \\boxed{...}, and nothing else."""
    boxed = [_last_boxed(after_thoughts(response)) for response in responses]
    scores = math_reward(prompts, ["" if own is None else f"\\boxed{{{own}}}" for own in boxed], labels)
    return [score if own else 0.0 for own, score in zip(boxed, scores)]


def math_finished(prompts: list[str], responses: list[str], labels: list[str], finished: list[bool]) -> list[float]:
    """As math_reward, but 0 for a response that did not end with a stop token."""
    ended = [response if own else "" for response, own in zip(responses, finished)]
    return math_reward(prompts, ended, labels)


def math_boxed_finished(
    prompts: list[str], responses: list[str], labels: list[str], finished: list[bool]
) -> list[float]:
    """As math_boxed, but 0 for a response that did not end with a stop token."""
    return math_boxed(prompts, [response if own else "" for response, own in zip(responses, finished)], labels)


MATH_REWARDS = {
    "math": math_reward,
    "math_boxed": math_boxed,
    "math_finished": math_finished,
    "math_boxed_finished": math_boxed_finished,
}


def exact_match(prompts: list[str], responses: list[str], labels: list[str]) -> list[float]:
    """1 if the response is the label, ignoring white space at both ends, else 0."""
    return [float(response.strip() == label.strip()) for response, label in zip(responses, labels)]
