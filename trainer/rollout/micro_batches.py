"""The tokens of samples as the micro-batches that training runs over, and values per token in two forms.

In a micro-batch, values per token are (rows, tokens) like its input_ids, on the ranks that have those tokens. A flat vector
has the generated tokens of all samples that the rank trains, sample after sample. Plain code computes advantages from it.
`collect` and `spread` convert between the two forms.
"""

import itertools
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.distributed as dist

from trainer.datasets.batches.packing import IGNORE, collate_packed, collate_padded
from trainer.datasets.samples.answers import scored_position
from trainer.models.losses.policy_loss import differing, num_targets, token_weights
from trainer.models.losses.token_losses import places_of_labels
from trainer.rollout.placement import Part
from trainer.rollout.samples import Sample


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

    Each history of a sample is a document (packed) or a row (padded) of its own, as the engine read it.
    """
    collate = collate or (collate_packed if packed else collate_padded)
    documents = [document for number, sample in enumerate(samples) for document in _histories(number, sample)]
    batch = collate(documents, pad_token_id=pad_token_id)
    places = batch.pop("places", None) or _places(documents, packed)
    names = ("sequence_ids", "is_token", "response_index", "is_last")
    extra = {name: torch.zeros_like(batch["input_ids"]) for name in names}
    weights = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)
    scoring_pad = pad_token_id if scoring_pad is None else scoring_pad
    for document, (row, first, skipped) in zip(documents, places):
        length, offset = len(document["input_ids"]), document["offset"]
        extra["sequence_ids"][row, first + skipped : first + length] = document["sequence"]
        extra["is_token"][row, first + skipped : first + length] = 1
        if document["is_newest"]:
            extra["is_last"][row, first + scored_position(document["input_ids"], scoring_pad)] = 1
        # labels are shifted: the token at t predicts the token at t + 1
        predicting = first + torch.tensor(document["loss_mask"]).nonzero().squeeze(1) - 1
        extra["response_index"][row, predicting] = torch.arange(offset, offset + len(predicting))
        weights[row, predicting] = document["loss_weight"]
    if any(sample.get("experts") is not None for sample in samples):
        extra["experts"] = _experts(documents, batch["input_ids"].shape, places)
    lengths = torch.tensor([sample["response_length"] for sample in samples], dtype=torch.float64)
    numbers = torch.tensor([sample["number"] for sample in samples], dtype=torch.int64)
    has_loss = torch.tensor([sample["loss_weight"] > 0 for sample in samples], dtype=torch.bool)
    of_samples = {"response_lengths": lengths, "sample_numbers": numbers, "has_loss": has_loss}
    return {**batch, **extra, "loss_weights": weights, **of_samples}


def _histories(number: int, sample: dict) -> list[dict]:
    """The sample number `number` of a micro-batch, cut where its histories begin. `is_newest` is the last part."""
    parts, offset = [], sample["offset"]
    for start, end in itertools.pairwise([0, *sample.get("starts", ()), len(sample["input_ids"])]):
        mask, experts = sample["loss_mask"][start:end], sample.get("experts")
        own = {
            "experts": None if experts is None else experts[start:end],
            "input_ids": sample["input_ids"][start:end],
            "loss_mask": mask,
            "offset": offset,
            "sequence": number,
        }
        prompt_length = mask.index(1) if 1 in mask else len(mask)
        parts.append({**sample, **own, "prompt_length": prompt_length, "is_newest": end == len(sample["input_ids"])})
        offset += sum(mask)
    return parts


def _places(documents: list[dict], packed: bool) -> list[tuple[int, int, int]]:
    """(row, first, 0) of each document of a packed or padded micro-batch, as the `places` of `collate_shared`."""
    starts = [0, *itertools.accumulate(len(document["input_ids"]) for document in documents)]
    return [(0, starts[number], 0) if packed else (number, 0, 0) for number in range(len(documents))]


def _experts(documents: list[dict], shape: torch.Size, places: list[tuple]) -> torch.Tensor:
    """The experts of documents, where their tokens are in a micro-batch of (rows, tokens). See `collate_samples`."""
    known = [
        (document["experts"], place) for document, place in zip(documents, places) if document["experts"] is not None
    ]
    experts = torch.zeros(*shape, *known[0][0].shape[1:], dtype=torch.int16)
    for own, (row, first, _) in known:
        experts[row, first : first + len(own)] = own + 1
    return experts


class RowSet:
    """Rows in memory, with the interface of a dataset that a loader reads."""

    _rows: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key):
        return [row[key] for row in self._rows] if isinstance(key, str) else self._rows[key]


class SampleSet(RowSet):
    """The samples of a rollout. Only samples with tokens here have
    all values of a row. Their offsets are in the flat vector.

    With `mask_truncated`, samples that are not finished have no loss and do not count in its mean (DAPO, Yu et al. 2025,
    section 3.4: overlong filtering). So have samples that failed. With `only_differing`, so have the samples of prompts whose
    scores are all equal.
    """

    def __init__(
        self,
        samples: list[Sample],
        loss_agg: str,
        max_len: int,
        mask_truncated: bool = False,
        group_size: int = 1,
        only_differing: bool = False,
    ):
        self.sizes, offset = [sample.size() for sample in samples], 0
        self.lengths = [size.generated for size in self.sizes]
        self._rows = []
        have_loss = [(sample.finished or not mask_truncated) and not sample.failed for sample in samples]
        if only_differing:
            differ = differing(torch.tensor([sample.score for sample in samples]), group_size).tolist()
            have_loss = [has_loss and differs for has_loss, differs in zip(have_loss, differ)]
        counted = [length * has_loss for length, has_loss in zip(self.lengths, have_loss)]
        for number, (sample, weight) in enumerate(zip(samples, token_weights(counted, loss_agg, max_len, group_size))):
            size, has_loss = self.sizes[number], have_loss[number]
            row = {
                "num_tokens": size.tokens,
                "num_loss_tokens": num_targets(size.generated, loss_agg) * has_loss,
                "digest": size.digest,
                "row": sample.row,
            }
            if sample.held.here:
                input_ids, loss_mask = sample.ids_and_mask()
                row |= {"input_ids": input_ids, "loss_mask": loss_mask, "number": number, "offset": offset}
                row["starts"] = [len(sample.prompt_ids) + start for start in sample.starts]
                row |= {"response_length": size.generated, "loss_weight": weight * has_loss, "experts": sample.experts}
                offset += size.generated
            self._rows.append(row)
        self.num_response_tokens = offset  # of the samples with tokens here


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
    """Give every micro-batch the sets that its tokens were sampled from, if sampling was truncated.

    They are the `kept_sets` of `losses.truncation.within_sets`.
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
