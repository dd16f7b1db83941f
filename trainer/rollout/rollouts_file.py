"""rollouts.jsonl: one line per sample, to read, and to train on again with --rollouts_from."""

import dataclasses
import json
import os
from collections.abc import Callable

from trainer.errors import UserError
from trainer.metrics import MetricsLog
from trainer.rollout.experience import Sample, as_row, as_table, decoded
from trainer.rollout.placement import write_by_rank_0
from trainer.rollout.rewards.reward_functions import LARGEST_SCORE

ROLLOUTS_FILE = "rollouts.jsonl"
FLAG = "--rollouts_from"
SHOWN = 8  # samples of a rollout in the table of wandb and TensorBoard


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

        `link`: see `drawn_before`.
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


def sample_of(row: dict) -> Sample:
    """The sample of a row of the log. Raises ValueError, KeyError, TypeError, IndexError or RuntimeError if it is none."""
    row = {"kept_ids": [], "turns": [], "version": None, "versions": [], **row}
    sample = Sample(**{field.name: row[field.name] for field in dataclasses.fields(Sample) if _is_stored(field)})
    if row.get("experts"):
        sample.experts = decoded(*row["experts"])
    tokens = [sample.response_ids[place] for place in sample.generated()]
    if not tokens or len(tokens) != len(sample.log_probs):
        raise ValueError("a response without tokens, or without a log-prob for each token")
    sets = sample.kept_ids or [[token] for token in tokens]
    if not all(token in ids for token, ids in zip(tokens, sets, strict=True)):
        raise ValueError("a token that is not in the set of its draw")
    if sample.experts is not None and len(sample.experts) >= sample.size().tokens:
        raise ValueError("experts of more tokens than there are")
    return sample


def _is_stored(field: dataclasses.Field) -> bool:
    return field.compare and field.name != "columns"


def read_rollouts(path: str) -> list[list[Sample]]:
    """The samples of each rollout, in order. Raises UserError if the file is not such a log."""
    rollouts: dict[int, dict[int, Sample]] = {}
    try:
        with open(path) as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = json.loads(line)
                    sample = sample_of(row)
                    if not abs(sample.score) <= LARGEST_SCORE:
                        raise ValueError(f"a score of {sample.score}")
                    rollouts.setdefault(row["rollout"], {})[sample.number] = sample
                except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
                    if line.strip() and line.endswith("\n"):
                        found = f"line {number}: {type(error).__name__} {error}"
                        raise UserError(f"{FLAG} {path}", found, "a rollouts.jsonl of train_ppo") from None
    except OSError as error:
        raise UserError(FLAG, f"{path}: {error.strerror}", "a rollouts.jsonl of train_ppo") from None
    return [[of[number] for number in sorted(of)] for _, of in sorted(rollouts.items())]


def frozen(rollouts: list[list[Sample]]) -> Callable:
    """`recorded` of a PPORun: every rollout is one of these. It raises UserError if there are no more."""

    def recorded(state) -> list[Sample]:
        if state.rollout >= len(rollouts):
            found = f"holds {len(rollouts)} rollouts, but this run needs more"
            raise UserError(FLAG, found, "a file with more rollouts, or a smaller --max_steps")
        return rollouts[state.rollout]

    return recorded
