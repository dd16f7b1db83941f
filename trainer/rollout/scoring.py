"""Score the samples of a rollout with a function of texts, each sample on a rank that has its tokens."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from trainer.datasets.conversations.thoughts import MARKS
from trainer.distributed.collectives import gather_objects
from trainer.errors import Failed, UserError
from trainer.metrics import counted
from trainer.rollout.generation import with_errors_of_all_ranks
from trainer.rollout.placement import exchange_objects
from trainer.rollout.rewards.reward_functions import GROUPS, Scorer
from trainer.rollout.samples import Sample

ENVIRONMENT = "env"  # the metric with the score of an environment, if functions add to it


@dataclass(frozen=True)
class TextScores:
    """Scores by a function of texts. A call sets score and metrics of every sample, on every rank.

    A response is finished if it ends with one of `stop_ids`. It is not finished if it was cut, or if a stop text ended it.
    If it `adds`, the samples are episodes that have a score of their environment. It stays as the metric `env`, the score of
    the function is added to it and to the reward of the last turn, and an episode is finished if it came to its end.
    `facts` are the names of reward_functions.TOKEN_FACTS that the function also gets, among its columns. With GROUPS among
    them, it gets all samples of a prompt in one call.
    """

    scorer: Scorer
    tokenizer: Any
    stop_ids: tuple[int, ...]
    facts: frozenset[str] = frozenset()
    adds: bool = False

    @property
    def takes_groups(self) -> bool:
        return GROUPS in self.facts

    def __call__(self, samples: list[Sample], group_size: int) -> None:
        score_by_texts(self, samples, group_size)

    def score_mine(self, mine: list[Sample], groups: list[int] | None = None) -> None:
        """Set score and metrics of these samples. Nothing communicates. Raises UserError if the function fails.

        `groups` are the numbers of their prompts, if the function takes groups.
        """
        known = [(sample, group) for sample, group in zip(mine, groups or mine) if not sample.failed]
        mine = [sample for sample, _ in known]
        prompts = [self.tokenizer.decode(sample.prompt_ids) for sample in mine]
        responses = [response_text(self.tokenizer, sample.prompt_ids, sample.response_ids) for sample in mine]
        ended = [bool(sample.response_ids) and sample.response_ids[-1] in self.stop_ids for sample in mine]
        finished = [sample.finished for sample in mine] if self.adds else ended
        columns = {name: [sample.columns[name] for sample in mine] for name in (mine[0].columns if mine else ())}
        columns |= {name: [self._fact(name, sample) for sample in mine] for name in self.facts - {GROUPS}}
        columns |= {GROUPS: [group for _, group in known]} if groups is not None else {}
        scores, metrics = self.scorer(prompts, responses, [sample.label for sample in mine], finished, columns)
        for i, (sample, score) in enumerate(zip(mine, scores)):
            if isinstance(score, Failed):
                sample.failed = str(score)
                continue
            own = {name: values[i] for name, values in metrics.items() if not math.isnan(values[i])}
            sample.score, sample.metrics = self._with_environment(sample, score, own) if self.adds else (score, own)

    def _with_environment(self, sample: Sample, score: float, metrics: dict[str, float]) -> tuple[float, dict]:
        """Score and metrics of an episode. A function that gave None adds nothing."""
        if taken := sorted((metrics.keys() | {ENVIRONMENT}) & sample.metrics.keys()):
            raise UserError("--reward_func", f"the environment has a metric {taken[0]} too", "another name")
        total = sample.score + (0.0 if math.isnan(score) else score)
        return total, {**sample.metrics, ENVIRONMENT: sample.score, **metrics}

    def _fact(self, name: str, sample: Sample) -> Any:
        """Ids as a list of its own, so that a function may change it; or the text of the response with special tokens."""
        if name == "raw_responses":
            return self.tokenizer.decode(sample.response_ids)
        return list(sample.prompt_ids if name == "prompt_ids" else sample.response_ids)


def response_text(tokenizer: Any, prompt_ids: list[int], response_ids: list[int]) -> str:
    """The text that the response adds to its prompt. SentencePiece decodes a text of its own without its first space.

    It has no special tokens, except those around thoughts: they are text for other tokenizers, and a reward needs them.
    """
    different = [*{*response_ids}]
    marks = {id for id, token in zip(different, tokenizer.convert_ids_to_tokens(different)) if token in MARKS}

    def text_of(ids: list[int]) -> str:
        if not marks:
            return tokenizer.decode(ids, skip_special_tokens=True)
        known = tokenizer.added_tokens_decoder
        kept = (id for id in ids if id in marks or not (id in known and known[id].special))
        return tokenizer.decode([*kept], skip_special_tokens=False)

    before, both = text_of(prompt_ids[-1:]), text_of([*prompt_ids[-1:], *response_ids])
    return both.removeprefix(before) if both.startswith(before) else text_of(response_ids)


def score_by_texts(scores: TextScores, samples: list[Sample], group_size: int = 1) -> None:
    """Set score and metrics of every sample, on every rank, with a function of texts.

    Each rank calls it for the samples whose tokens it has (all-gather of scores over the world). If it takes groups, the
    rank that has the first sample of a prompt calls it for all of them (all-to-all over the world).

    Raises:
        UserError: the function failed on one rank. All ranks raise the same error.
    """
    mine = {place: sample for place, sample in enumerate(samples) if sample.held.here}
    groups = None
    if scores.takes_groups:
        mine = _whole_groups(samples, mine, group_size)
        groups = [place // group_size for place in mine]
    before = {place: sample.score for place, sample in enumerate(samples) if sample.held.here}
    with_errors_of_all_ranks(lambda: scores.score_mine([*mine.values()], groups))
    for of_rank in gather_objects([(place, s.score, s.metrics, s.failed) for place, s in mine.items()]):
        for place, *found in of_rank:
            samples[place].score, samples[place].metrics, samples[place].failed = found
    for place, score in before.items() if scores.adds else ():
        if not samples[place].failed:
            samples[place].turn_rewards[-1] += samples[place].score - score


def _whole_groups(samples: list[Sample], mine: dict[int, Sample], group_size: int) -> dict[int, Sample]:
    """The samples by place whose group this rank scores, from the ranks that have them (all-to-all over the world)."""
    rank, for_ranks = dist.get_rank(), [{} for _ in range(dist.get_world_size())]
    for place, sample in mine.items():
        first = samples[place - place % group_size].held.by
        owner = rank if first is None else first  # None: every rank has all of them
        texts_only = replace(sample, log_probs=[], kept_ids=[], experts=None)
        for_ranks[owner][place] = sample if owner == rank else texts_only
    own, for_ranks[rank] = for_ranks[rank], None
    for part in exchange_objects([part or None for part in for_ranks]):
        own |= part or {}
    return dict(sorted(own.items()))


def check_failed(samples: list[Sample], most: float) -> None:
    """Raise UserError, the same on every rank, if more than the share `most` of the samples failed, or all of them.

    One sample may always fail, unless `most` is 0: a small rollout has no smaller share.
    """
    failed = [sample.failed for sample in samples if sample.failed]
    if len(failed) > max(most * len(samples), most > 0) or len(failed) == len(samples) > 0:
        found = f"so {len(failed)} of {counted(len(samples), 'sample')} failed; --max_failed_share is {most:g}"
        raise UserError(failed[0], found)
