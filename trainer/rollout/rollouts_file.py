"""rollouts.jsonl: one line per sample, to read, and to train on again with --rollouts_from."""

import base64
import json
import math
import os
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Optional

import torch

from trainer.datasets.samples.bounds import Bounds, check_ids_of_row, check_sample
from trainer.errors import UserError
from trainer.limits import lines_of
from trainer.metrics import ROLLOUTS_FILE, MetricsLog, counted
from trainer.rollout.placement import write_by_rank_0
from trainer.rollout.rewards.reward_functions import LARGEST_SCORE
from trainer.rollout.samples import Sample

FLAG = "--rollouts_from"
SHOWN = 8  # samples of a rollout in the table of wandb and TensorBoard
# keys of every row, named as the fields of a Sample. Keys of features are only in rows that have such values.
KEYS = ("number", "row", "prompt_ids", "response_ids", "log_probs", "finished", "label", "score", "metrics")


def as_row(sample: Sample, rollout: int, tokenizer) -> dict:
    """A line of the file, with what is needed to train on the sample again, and with texts if `tokenizer` is given."""
    row = {"rollout": rollout}
    if tokenizer:
        row |= {"prompt": tokenizer.decode(sample.prompt_ids), "response": tokenizer.decode(sample.response_ids)}
    row |= {key: getattr(sample, key) for key in KEYS}
    row["score"] = None if sample.failed or math.isnan(sample.score) else sample.score
    if sample.failed:
        row["failed"] = sample.failed
    if sample.end:
        row["end"] = sample.end
    if sample.kept_ids:
        row["kept_ids"] = sample.kept_ids
    if sample.turns:
        row |= {"turns": sample.turns, "turn_rewards": sample.turn_rewards}
    if sample.starts:
        row["starts"] = sample.starts
    if sample.versions:
        row["version"] = sample.version
    if len(sample.versions) > 1:
        row["versions"] = sample.versions
    if sample.experts is not None:
        row["experts"] = [list(sample.experts.shape), encoded(sample.experts)]
    return row


def sample_of(row: dict) -> Sample:
    """The sample of a line. Raises ValueError, KeyError, TypeError, IndexError or RuntimeError if the line has no sample."""
    versions = row.get("versions") or ([] if row.get("version") is None else [[0, row["version"]]])
    experts = decoded(*row["experts"]) if row.get("experts") else None
    sets, turns = row.get("kept_ids", []), row.get("turns", [])
    of_all = {key: row[key] for key in KEYS} | {"score": math.nan if row["score"] is None else row["score"]}
    own = {
        "failed": row.get("failed", ""),
        "end": str(row.get("end", "")),
        "kept_ids": sets,
        "turns": turns,
        "starts": row.get("starts", []),
        "turn_rewards": list(map(float, row.get("turn_rewards", []))),
        "versions": versions,
        "experts": experts,
    }
    sample = Sample(**of_all, **own)
    if not all(type(token) is int for token in chain(sample.prompt_ids, sample.response_ids, *sets)):
        raise ValueError("a token that is no whole number")
    tokens = [sample.response_ids[place] for place in sample.generated()]
    if not tokens or len(tokens) != len(sample.log_probs):
        raise ValueError("a response without tokens, or without a log-prob for each token")
    if not all(token in ids for token, ids in zip(tokens, sets or [[token] for token in tokens], strict=True)):
        raise ValueError("a token that is not in the set that it was sampled from")
    if not _are_starts(sample.starts, turns):
        raise ValueError("a history that does not begin between two turns")
    if sample.turn_rewards and not (
        len(sample.turn_rewards) == len(turns) and all(map(math.isfinite, sample.turn_rewards))
    ):
        raise ValueError("rewards of turns that are not finite, or of another number of turns")
    if experts is not None and len(experts) >= sample.size().tokens:
        raise ValueError("experts of more tokens than there are")
    return sample


def _are_starts(starts: list[int], turns: list[list[int]]) -> bool:
    """Whether each history begins where a turn ends, with tokens of the environment before the next turn."""
    following = {end: first for (_, end), (first, _) in pairwise(turns)}
    return starts == sorted(set(starts)) and all(start < following.get(start, start) for start in starts)


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


class RolloutsLog:
    """Appends the samples of each rollout to `<output_dir>/rollouts.jsonl`. Rank 0 writes what the ranks send to it.

    A resumed run writes repeated rollouts again. If a rollout is there twice, the later lines count.
    """

    def __init__(self, output_dir: str, tokenizer):
        self._path, self._tokenizer = os.path.join(output_dir, ROLLOUTS_FILE), tokenizer

    def show(self, samples: list[Sample], metrics: MetricsLog, step: int) -> None:
        """Send a table of samples to wandb and TensorBoard, if they are used."""
        metrics.table("samples", step, as_table(samples, self._tokenizer))

    def write(self, rollout: int, samples: list[Sample], link: str) -> list[Sample]:
        """Write the samples of all ranks (point to point to rank 0). Returns the first ones, on rank 0.

        `link`: see `resumed_rollouts`.
        """
        first: list[Sample] = []

        def write(part: list[Sample]) -> None:
            first.extend(part[: SHOWN - len(first)])
            rows = [as_row(sample, rollout, self._tokenizer) | {"origin": link} for sample in part]
            lines = [json.dumps(row) + "\n" for row in rows]
            torn = os.path.exists(self._path) and not _ends_with_newline(self._path)
            with open(self._path, "a") as file:
                file.write("\n" * torn + "".join(lines))

        write_by_rank_0(samples, write)
        return first


def _ends_with_newline(path: str) -> bool:
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def read_rollouts(path: str, bounds: Optional[Bounds] = None) -> list[list[Sample]]:
    """The samples of each rollout, in order. Raises UserError if the file is not such a log.

    Also for a line that a model with these `bounds` cannot take.
    """
    where = f"{FLAG} {path}"
    rollouts: dict[int, dict[int, Sample]] = {}
    try:
        for number, line in enumerate(lines_of(path, FLAG), start=1):
            try:
                row = json.loads(line)
                sample = sample_of(row)
                if not (sample.failed or abs(sample.score) <= LARGEST_SCORE):
                    raise ValueError(f"a score of {sample.score}")
                if bounds:
                    ids = [*sample.prompt_ids, *sample.response_ids]
                    check_sample({"input_ids": ids, "row": number - 1}, where, bounds)
                    check_ids_of_row(chain(*sample.kept_ids), number - 1, where, bounds.vocab_size)
                rollouts.setdefault(row["rollout"], {})[sample.number] = sample
            except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
                if line.strip() and line.endswith(b"\n"):
                    found = f"line {number}: {type(error).__name__} {error}"
                    raise UserError(where, found, "a rollouts.jsonl of train_ppo") from None
    except OSError as error:
        raise UserError(FLAG, f"{path}: {error.strerror}", "a rollouts.jsonl of train_ppo") from None
    return [[of[number] for number in sorted(of)] for _, of in sorted(rollouts.items())]


def frozen(rollouts: list[list[Sample]]) -> Callable:
    """`recorded` of a PPORun: every rollout is one of these. It raises UserError if there are no more."""

    def recorded(state) -> list[Sample]:
        if state.rollout >= len(rollouts):
            found = f"holds {counted(len(rollouts), 'rollout')}, but this run needs more"
            raise UserError(FLAG, found, "a file with more rollouts, or a smaller --max_steps")
        return rollouts[state.rollout]

    return recorded
