"""A rollout: samples that every rank knows, and their tokens as the micro-batches that training runs over.

Values per token have two forms. One is in a micro-batch: (rows, tokens) like its input_ids, on the ranks that have
those tokens. The other is a flat vector of the generated tokens of all samples that the rank trains, sample after
sample. Plain code computes advantages from it. `collect` and `spread` convert between the two forms.
"""

import base64
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.distributed as dist

from trainer.datasets.batches.global_batches import contiguous_slice
from trainer.datasets.batches.packing import IGNORE, collate_packed, collate_padded
from trainer.datasets.samples.answers import scored_position
from trainer.datasets.samples.prompts import columns_of
from trainer.distributed.collectives import gather_objects
from trainer.errors import UserError
from trainer.models.losses.policy_loss import num_targets, token_weights
from trainer.models.losses.token_losses import places_of_labels
from trainer.rollout.engines.sampling import Completion, Sampling, sample_seed
from trainer.rollout.placement import Part, Sizes, measure, share
from trainer.rollout.rewards.reward_functions import Scorer
from trainer.rollout.timeline import span


@dataclass
class Sample:
    """A prompt, a response to it, and the result of the reward."""

    number: int  # within the rollout; samples of one prompt have adjacent numbers
    row: int  # of the prompt in its dataset
    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]  # of the response's tokens, by the rollout engine
    finished: bool  # True if a stop token or stop text ended it, not the token limit
    label: Optional[str]
    score: float = float("nan")
    metrics: dict[str, float] = field(default_factory=dict)
    kept_ids: list[list[int]] = field(default_factory=list)  # as in Completion
    columns: dict = field(default_factory=dict)  # of the prompt's row, for reward functions that take them
    # [start, end) in response_ids of each turn that the model generated; the rest is of the environment. Empty: all
    turns: list[list[int]] = field(default_factory=list)
    # see placement.py: whether this rank has the tokens, which rank has them (None: every rank), and their numbers
    here: bool = field(default=True, compare=False)
    holder: Optional[int] = field(default=None, compare=False)
    sizes: Optional[Sizes] = field(default=None, compare=False)
    # with --max_staleness: the rollouts that the policy that drew the oldest token was trained on
    version: Optional[int] = None
    # [start, version] in response_ids: from there on, another version drew the tokens. Empty: one version drew all
    versions: list[list[int]] = field(default_factory=list)
    experts: Optional[torch.Tensor] = field(default=None, compare=False)  # as in Completion, with --routing_replay

    def size(self) -> Sizes:
        self.sizes = self.sizes or measure(self)
        return self.sizes

    def generated(self) -> list[int]:
        """The positions in response_ids that the engine generated. Only these have log-probs, advantages and a loss."""
        spans = self.turns or [[0, len(self.response_ids)]]
        return [position for start, end in spans for position in range(start, end)]


def gather_over_world(values: list) -> list:
    """The lists of all ranks, joined in rank order (all-gather of objects over the world)."""
    return [value for part in gather_objects(values) for value in part]


def generate_samples(
    engine, prompts: list[dict], num_each: int, sampling: Sampling, *, seed: int, rollout: int, first: int = 0
) -> list[Sample]:
    """Generate `num_each` samples of each prompt, numbered from `first`.

    All engines share the work, and the ranks of an engine share its samples. Every rank gets all samples, but tokens only
    of its own (see `placement.share`).

    Raises:
        UserError: an engine failed. All ranks raise the same error.
    """
    number_of_engine, rank_in_engine = divmod(dist.get_rank(), engine.ranks_per_engine)
    num_engines = dist.get_world_size() // engine.ranks_per_engine
    mine = contiguous_slice(numbered(prompts, num_each, first), number_of_engine, num_engines)
    samples, problem = [], None
    try:
        samples = continue_prompts(engine, mine, sampling, seed, rollout)
    except UserError as error:
        problem = error
    with span("wait"):
        problems = gather_over_world([problem])
    for found in problems:
        if found is not None:
            raise found
    return share(contiguous_slice(samples, rank_in_engine, engine.ranks_per_engine))  # its other ranks have the same


def numbered(prompts: list[dict], num_each: int, first: int = 0) -> list[tuple[int, dict]]:
    """(number, prompt) of each sample of a rollout. Samples of one prompt have adjacent numbers."""
    return list(enumerate((prompt for prompt in prompts for _ in range(num_each)), start=first))


def continue_prompts(
    engine, asked: list[tuple[int, dict]], sampling: Sampling, seed: int, rollout: int
) -> list[Sample]:
    """The sample of each (number, prompt). Only the engine may communicate."""
    seeds = [sample_seed(seed, rollout, number) for number, _ in asked]
    images = {"images": [prompt["images"] for _, prompt in asked]} if asked and "images" in asked[0][1] else {}
    ids = [prompt["prompt_ids"] for _, prompt in asked]
    completions: list[Completion] = engine.generate(ids, sampling, seeds, **images)
    return [
        Sample(
            number=number,
            row=prompt["row"],
            prompt_ids=list(prompt["prompt_ids"]),
            response_ids=completion.token_ids,
            log_probs=completion.log_probs,
            finished=completion.finished,
            label=prompt["label"],
            kept_ids=completion.kept_ids,
            columns=columns_of(prompt),
            experts=completion.experts,
            versions=completion.versions,
        )
        for (number, prompt), completion in zip(asked, completions)
    ]


@dataclass(frozen=True)
class TextScores:
    """Scores by a function of texts. A call sets score and metrics of every sample, on every rank.

    A response is finished if it ends with one of `stop_ids`. It is not finished if it was cut, or if a stop text ended it.
    """

    scorer: Scorer
    tokenizer: Any
    stop_ids: tuple[int, ...]

    def __call__(self, samples: list[Sample]) -> None:
        score_by_texts(self, samples)

    def score_mine(self, mine: list[Sample]) -> None:
        """Set score and metrics of these samples. Nothing communicates. Raises UserError if the function fails."""
        prompts = [self.tokenizer.decode(sample.prompt_ids) for sample in mine]
        responses = [self.tokenizer.decode(sample.response_ids, skip_special_tokens=True) for sample in mine]
        finished = [bool(sample.response_ids) and sample.response_ids[-1] in self.stop_ids for sample in mine]
        columns = {name: [sample.columns[name] for sample in mine] for name in (mine[0].columns if mine else ())}
        scores, metrics = self.scorer(prompts, responses, [sample.label for sample in mine], finished, columns)
        for i, (sample, score) in enumerate(zip(mine, scores)):
            sample.score, sample.metrics = score, {name: values[i] for name, values in metrics.items()}


def score_by_texts(scores: TextScores, samples: list[Sample]) -> None:
    """Set score and metrics of every sample, on every rank, with a function of texts.

    Each rank calls it for the samples whose tokens it has (all-gather of scores over the world).

    Raises:
        UserError: the function failed on one rank. All ranks raise the same error.
    """
    mine, problem = [(place, sample) for place, sample in enumerate(samples) if sample.here], None
    try:
        scores.score_mine([sample for _, sample in mine])
    except UserError as error:
        problem = error
    with span("wait"):
        problems = gather_over_world([problem])
    for found in problems:
        if found is not None:
            raise found
    for place, score, metrics in gather_over_world([(place, s.score, s.metrics) for place, s in mine]):
        samples[place].score, samples[place].metrics = score, metrics


# --- micro-batches


def collate_samples(
    samples: list[dict], pad_token_id: int, packed: bool, scoring_pad: Optional[int] = None, collate=None
) -> dict[str, torch.Tensor]:
    """A micro-batch of samples, padded or packed. Labels are the generated tokens. `collate`: as in `collate_sequences`.

    It adds to the result of `trainer.datasets.batches.packing` or `shared_prompts`, per token (rows, tokens):
    - sequence_ids: the number of the token's sample in the micro-batch
    - is_token: 1 for a token of a sample, 0 for padding
    - response_index: the position of the label in the flat vector
    - is_last: 1 where a reward model scores the sample, see `answers.scored_position`. `scoring_pad` is the reward
      model's pad token, if it has another one. The score is always the reward of the last response token.
    - loss_weights: see `policy_loss.token_weights`
    - experts (rows, tokens, layers, k), if samples have them: 1 + the expert, or 0 if it is not known

    Per sample (n,), it adds response_lengths, sample_numbers and has_loss. A split over sequence-parallel ranks pads the values
    per token with 0. There is no label at these places.
    """
    collate = collate or (collate_packed if packed else collate_padded)
    batch = collate(samples, pad_token_id=pad_token_id)
    starts = [0, *itertools.accumulate(len(sample["input_ids"]) for sample in samples)]
    places = [(0, starts[number], 0) if packed else (number, 0, 0) for number in range(len(samples))]
    places = batch.pop("places", places)
    names = ("sequence_ids", "is_token", "response_index", "is_last")
    extra = {name: torch.zeros_like(batch["input_ids"]) for name in names}
    weights = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)
    scoring_pad = pad_token_id if scoring_pad is None else scoring_pad
    for number, (sample, (row, first, skipped)) in enumerate(zip(samples, places)):
        length, response = len(sample["input_ids"]), sample["response_length"]
        extra["sequence_ids"][row, first + skipped : first + length] = number
        extra["is_token"][row, first + skipped : first + length] = 1
        extra["is_last"][row, first + scored_position(sample["input_ids"], scoring_pad)] = 1
        # labels are shifted: the token at t predicts the token at t + 1
        predicting = first + torch.tensor(sample["loss_mask"]).nonzero().squeeze(1) - 1
        extra["response_index"][row, predicting] = torch.arange(sample["offset"], sample["offset"] + response)
        weights[row, predicting] = sample["loss_weight"]
    if samples and samples[0].get("experts") is not None:
        extra["experts"] = _experts(samples, batch["input_ids"].shape, places)
    lengths = torch.tensor([sample["response_length"] for sample in samples], dtype=torch.float64)
    numbers = torch.tensor([sample["number"] for sample in samples], dtype=torch.int64)
    has_loss = torch.tensor([sample["loss_weight"] > 0 for sample in samples], dtype=torch.bool)
    of_samples = {"response_lengths": lengths, "sample_numbers": numbers, "has_loss": has_loss}
    return {**batch, **extra, "loss_weights": weights, **of_samples}


def _experts(samples: list[dict], shape: torch.Size, places: list[tuple]) -> torch.Tensor:
    """The experts of samples, where their tokens are in a micro-batch of (rows, tokens). See `collate_samples`."""
    experts = torch.zeros(*shape, *samples[0]["experts"].shape[1:], dtype=torch.int16)
    for sample, (row, first, _) in zip(samples, places):
        experts[row, first : first + len(sample["experts"])] = sample["experts"] + 1
    return experts


class SampleSet:
    """The samples of a rollout, with the interface of a dataset that a loader reads. Only samples with tokens here have
    all values of a row. Their offsets are in the flat vector.

    With `mask_truncated`, samples that are not finished have no loss and do not count in its mean (DAPO, Yu et al. 2025,
    section 3.4: overlong filtering).
    """

    def __init__(self, samples: list[Sample], loss_agg: str, max_len: int, mask_truncated: bool = False):
        self.sizes, offset = [sample.size() for sample in samples], 0
        self.lengths = [size.generated for size in self.sizes]
        self._rows: list[dict[str, Any]] = []
        for number, (sample, weight) in enumerate(zip(samples, token_weights(self.lengths, loss_agg, max_len))):
            size, has_loss = self.sizes[number], sample.finished or not mask_truncated
            row = {
                "num_tokens": size.tokens,
                "num_loss_tokens": num_targets(size.generated, loss_agg) * has_loss,
                "digest": size.digest,
                "row": sample.row,
            }
            if sample.here:
                input_ids = sample.prompt_ids + sample.response_ids
                loss_mask = [0] * len(input_ids)
                for place in sample.generated():
                    loss_mask[len(sample.prompt_ids) + place] = 1
                row |= {"input_ids": input_ids, "loss_mask": loss_mask, "number": number, "offset": offset}
                row["prompt_length"] = len(sample.prompt_ids)
                row |= {"response_length": size.generated, "loss_weight": weight * has_loss, "experts": sample.experts}
                offset += size.generated
            self._rows.append(row)
        self.num_response_tokens = offset  # of the samples with tokens here

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key):
        return [row[key] for row in self._rows] if isinstance(key, str) else self._rows[key]


def compute(batches: list, name: str, function: Callable[[dict], torch.Tensor]) -> None:
    """Set `name` of every micro-batch to `function(micro_batch)`, (rows, tokens), without gradients."""
    with torch.no_grad():
        for batch in batches:
            for micro_batch in batch.micro_batches:
                micro_batch[name] = function(micro_batch)


def collect(strategy, batches: list, name: str, part: Part) -> torch.Tensor:
    """Collect what micro-batches hold under `name` into a flat fp64 vector on the CPU (all-reduce over sp).
    The sum is exact, because each token is on only one of those ranks."""
    flat = torch.zeros(sum(part.lengths), dtype=torch.float64, device=strategy.device)
    for batch in batches:
        for micro_batch in batch.micro_batches:
            kept = places_of_labels(micro_batch)
            flat[micro_batch["response_index"].flatten()[kept]] = micro_batch[name].flatten()[kept].double()
    if part.sp_group is not None and part.sp_group.size() > 1:
        dist.all_reduce(flat, group=part.sp_group)
    return flat.cpu()


def spread(batches: list, name: str, flat: torch.Tensor) -> None:
    """Set `name` of every micro-batch, (rows, tokens) fp64, to the values of a flat vector. It is 0 without a label."""
    for batch in batches:
        for micro_batch in batch.micro_batches:
            kept, labels = places_of_labels(micro_batch), micro_batch["labels"]
            flat = flat.to(labels.device)
            values = flat.new_zeros(labels.numel())
            values[kept] = flat[micro_batch["response_index"].flatten()[kept]]
            micro_batch[name] = values.view(labels.shape)


def spread_sets(batches: list, samples: list[Sample]) -> None:
    """Give every micro-batch the sets that its tokens were drawn from, if sampling was truncated.

    They are `kept_sets` of `models.truncation.within_sets`.
    """
    sets = [torch.tensor(ids) for sample in samples for ids in sample.kept_ids]
    if not sets:
        return
    for batch in batches:
        for micro_batch in batch.micro_batches:
            keep = (micro_batch["labels"] != IGNORE).flatten()
            mine = [sets[index] for index in micro_batch["response_index"].flatten()[keep].tolist()]
            places = keep.nonzero().squeeze(1).cpu().repeat_interleave(torch.tensor([len(ids) for ids in mine]).long())
            kept_sets = torch.stack([places, torch.cat([sets[0][:0], *mine])])
            micro_batch["kept_sets"] = kept_sets.to(keep.device)


# --- rollouts.jsonl


def as_row(sample: Sample, rollout: int, tokenizer) -> dict:
    """A line of rollouts.jsonl, with token ids, log-probs and score to train on again, and with texts if `tokenizer` is given."""
    texts = {}
    if tokenizer:
        texts = {"prompt": tokenizer.decode(sample.prompt_ids), "response": tokenizer.decode(sample.response_ids)}
    left_out = ["columns", "here", "holder", "sizes"] + [
        name for name in ("kept_ids", "turns", "versions") if not getattr(sample, name)
    ]
    left_out += [name for name in ("version", "experts") if getattr(sample, name) is None]
    values = {name: value for name, value in vars(sample).items() if name not in left_out}
    if sample.experts is not None:
        values["experts"] = [list(sample.experts.shape), encoded(sample.experts)]
    return {"rollout": rollout, **texts, **values}


def encoded(experts: torch.Tensor) -> str:
    """int16 numbers as text. The file is for Python readers: `np.frombuffer(base64.b64decode(text), np.int16)`."""
    return base64.b64encode(experts.numpy().tobytes()).decode()


def decoded(shape: list[int], text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int16).view(shape)


def as_table(samples: list[Sample], tokenizer) -> list[dict]:
    """The readable parts of samples, as rows of a table."""
    return [
        {
            "prompt": tokenizer.decode(sample.prompt_ids),
            "response": tokenizer.decode(sample.response_ids),
            "label": sample.label,
            "score": sample.score,
            "finished": sample.finished,
        }
        for sample in samples
    ]
