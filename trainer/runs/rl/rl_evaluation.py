"""The evaluation of a run of RL: its prompts with their groups, and the file of its answers."""

import os
from collections.abc import Callable

from datasets import Dataset

from trainer.datasets.files.loading import places_of_rows
from trainer.datasets.files.set_names import names_of_sets
from trainer.datasets.rows import check_keys, column_of_key, lookup
from trainer.errors import UserError
from trainer.flags.rl_flags import PPOArguments
from trainer.metrics import counted
from trainer.rollout.evaluation import FOLDER, GROUPS, Evaluation, write_answers
from trainer.rollout.samples import Sample
from trainer.runs.run_data import own_flags_of, reading, shown_names

MOST_VALUES = 100  # of --eval_source_key: each has a row of results


def answers_log(output_dir: str, evaluation: Evaluation, tokenizer) -> Callable[[int, list[Sample]], None]:
    """Return `write(step, samples)`, which writes the answers of a step to a file of the run folder."""

    def write(step: int, samples: list[Sample]) -> None:
        write_answers(os.path.join(output_dir, FOLDER, f"step_{step}.jsonl"), evaluation, samples, tokenizer)

    return write


def with_groups(
    prompts: Dataset, rows: Dataset, args: PPOArguments, names: str, split: str, flag: str, evaluates: bool
) -> Dataset:
    """Prompts of `rows` with the names of their groups: the set, if there are several, and the value of --eval_source_key.

    Prompts of training may lack its column, or have too many values there. Then they have no groups of it.
    """
    parts = _sets(args, names, split, flag), _sources(rows, args.evaluation.eval_source_key, flag, evaluates)
    if parts[0] and args.evaluation.eval_source_key == "set":
        raise UserError(
            "--eval_source_key", "set, the name of the groups of several sets", "another name of the column"
        )
    found = [[part[row] for part in parts if part] for row in prompts["row"]]
    return prompts.add_column(GROUPS, found) if any(parts) else prompts


def _sets(args: PPOArguments, names: str, split: str, flag: str) -> list[str]:
    """The set of each row, as set/NAME. Empty if there is one set."""
    if len(names_of_sets(names, flag)) == 1:
        return []
    own = own_flags_of(args.data, names, flag)
    paths, places = places_of_rows(names, **reading(args.data, args.batch.seed, split, flag), own=own)
    short = shown_names([os.path.splitext(os.path.basename(path.rstrip("/")))[0] for path in paths], own)
    shown = short if len(set(short)) == len(short) else shown_names(paths, own)
    return [f"set/{shown[number]}" for number in places["set"]]


def _sources(rows: Dataset, key: str | None, flag: str, evaluates: bool) -> list[str]:
    """The value of column `key` of each row, as KEY/VALUE. Empty without a key, and where training lacks good values."""
    if key is None or not (evaluates or column_of_key(rows.column_names, key)):
        return []
    check_keys(rows.column_names, flag, {"--eval_source_key": key})
    found = [f"{key}/{lookup(row, key)}" for row in rows.select_columns([column_of_key(rows.column_names, key)])]
    if len(set(found)) > MOST_VALUES:
        if not evaluates:
            return []
        raise UserError(
            "--eval_source_key", f"{key} has {counted(len(set(found)), 'value')}", f"a column with up to {MOST_VALUES}"
        )
    return found
