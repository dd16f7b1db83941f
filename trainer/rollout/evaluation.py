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

    def values(self, scores: list[float], num_right: list[int]) -> dict[str, list[float]]:
        """The values of each prompt by name: their mean is the result. `scores` are those of all answers, in order."""
        k = self.num_each
        found = {"reward": [sum(scores[at : at + k]) / k for at in range(0, len(scores), k)]}
        if k > 1:
            found[f"avg_at_{k}"] = [count / k for count in num_right]
        return found | {f"pass_at_{n}": [pass_at(n, k, count) for count in num_right] for n in sizes_of_pass(k)}

    def values_of(self, samples: list[Sample]) -> dict[str, list[float]]:
        """`values` of all samples, which are in order of their numbers."""
        scores, k = [sample.score for sample in samples], self.num_each
        counts = [sum(score >= self.right for score in scores[at : at + k]) for at in range(0, len(scores), k)]
        return self.values(scores, counts)

    def facts(self, samples: list[Sample]) -> dict[str, float]:
        """The mean of each value: over all prompts, and as name/group over those of a group."""
        values = self.values_of(samples)
        found = {name: math.fsum(own) / len(own) for name, own in values.items()}
        for group, places in self.groups.items():
            found |= {
                f"{name}/{group}": math.fsum(own[p] for p in places) / len(places) for name, own in values.items()
            }
        return found


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
            "score": sample.score,
            "right": sample.score >= evaluation.right,
            "finished": sample.finished,
            "response_ids": sample.response_ids,
            "metrics": sample.metrics,
        }
        yield json.dumps(row) + "\n"
