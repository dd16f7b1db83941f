"""An evaluation: how prompts are answered, and the shares of right answers among all answers and in groups of prompts."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from trainer.rollout.engines.sampling import Sampling
from trainer.rollout.placement import write_by_rank_0
from trainer.rollout.samples import Sample
from trainer.rollout.shares import pass_at, sizes_of_pass

FOLDER = "evaluations"
GROUPS = "groups"  # the key of a prompt with the names of its groups
NUMBERS = {"seed": 0, "rollout": -1}  # of the random numbers: no rollout of training has them


@dataclass(frozen=True)
class Evaluation:
    """Prompts, and how they are answered and judged. A score of `right` or more is a right answer."""

    prompts: list[dict]
    sampling: Sampling
    num_each: int = 1  # answers to a prompt
    right: float = 1.0
    groups: dict[str, list[int]] = field(default_factory=dict)  # the places in `prompts` of each group

    def values_of(self, samples: list[Sample]) -> dict[str, list[float]]:
        """The values of each prompt by name: their mean is the result. The samples are in order of their numbers.

        An answer that failed has no score. A value is NaN if too few of the prompt's answers have one.
        """
        k, groups = self.num_each, [samples[at : at + self.num_each] for at in range(0, len(samples), self.num_each)]
        scores = [[sample.score for sample in group if not sample.failed] for group in groups]
        pairs = [(len(own), sum(score >= self.right for score in own)) for own in scores]
        found = {"reward": [sum(own) / len(own) if own else math.nan for own in scores]}
        if k > 1:
            found[f"avg_at_{k}"] = [right / num if num else math.nan for num, right in pairs]
        for n in sizes_of_pass(k):
            found[f"pass_at_{n}"] = [pass_at(n, num, right) if num >= n else math.nan for num, right in pairs]
        return found

    def facts(self, samples: list[Sample]) -> dict[str, float]:
        """The mean of each value: over all prompts, and as name/group over those of a group."""
        values, found = self.values_of(samples), {}
        parts = {"": range(len(self.prompts))} | {f"/{name}": places for name, places in self.groups.items()}
        for part, places in parts.items():
            for name, own in values.items():
                numbers = known(own, places)
                found[f"{name}{part}"] = math.fsum(numbers) / len(numbers)
        return found


def known(values: list[float], places: Iterable[int]) -> list[float]:
    """The values at these places that are numbers. If none is, one NaN."""
    return [values[place] for place in places if not math.isnan(values[place])] or [math.nan]


def groups_of(prompts: Iterable[dict]) -> dict[str, list[int]]:
    """The places of the prompts of each group, in the order of their first prompts."""
    found: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        for name in prompt.get(GROUPS) or ():
            found.setdefault(name, []).append(place)
    return found


def groups_of_rows(prompts) -> dict[int, list[str]]:
    """The names of the groups of each row of a dataset of prompts. Empty if its prompts have no groups."""
    return dict(zip(prompts["row"], prompts[GROUPS])) if GROUPS in prompts.column_names else {}


def write_answers(path: str, evaluation: Evaluation, samples: list[Sample], tokenizer) -> None:
    """Write a line for each answer. The ranks send them to rank 0, which replaces the file when it is whole."""
    written = False

    def write(part: list[Sample]) -> None:
        nonlocal written
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.tmp", "a" if written else "w", encoding="utf-8") as file:
            file.writelines(_lines(evaluation, part, tokenizer))
        written = True

    write_by_rank_0(samples, write)
    if written:
        os.replace(f"{path}.tmp", path)


def _lines(evaluation: Evaluation, samples: list[Sample], tokenizer) -> Iterator[str]:
    for sample in samples:
        row = {
            "number": sample.number,
            "row": sample.row,
            GROUPS: evaluation.prompts[sample.number // evaluation.num_each].get(GROUPS) or [],
            "prompt": tokenizer.decode(sample.prompt_ids),
            "response": tokenizer.decode(sample.response_ids),
            "label": sample.label,
            "score": None if sample.failed else sample.score,
            **({"failed": sample.failed} if sample.failed else {}),
            "right": sample.score >= evaluation.right,
            "finished": sample.finished,
            "response_ids": sample.response_ids,
            "metrics": sample.metrics,
        }
        yield json.dumps(row) + "\n"
