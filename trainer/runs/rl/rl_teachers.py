"""Several teachers of a run of RL: a column chooses that of each row (--teacher_key), or all count by --teacher_weights."""

import torch
from datasets import Dataset

from trainer.comma_separated import named_in, names_in
from trainer.datasets.rows import check_keys, column_of_key, lookup
from trainer.errors import UserError
from trainer.flags.policy_flags import KLArguments
from trainer.runs.feature import Feature
from trainer.runs.rl.rl_parts import RLRun

TEACHER = "teacher"  # column of the prompts


def with_teachers(prompts: Dataset, rows: Dataset, flags: KLArguments, flag: str) -> Dataset:
    """Prompts of `rows` with the NAME of their teacher. Raises UserError for a row whose column names no teacher."""
    key = flags.teacher_key
    if not key:
        return prompts
    check_keys(rows.column_names, flag, {"--teacher_key": key})
    names = named_in(flags.teacher, "--teacher", "NAME=MODEL")
    chosen = rows.select_columns([column_of_key(rows.column_names, key)]).select(prompts["row"])
    found = [str(lookup(row, key)) for row in chosen]
    for place, name in zip(prompts["row"], found):
        if name not in names:
            raise UserError(f"{flag} row {place + 1}: {key}", f"{name}, no teacher of --teacher", ", ".join(names))
    return prompts.add_column(TEACHER, found)


def shares_of_rows(flags: KLArguments, prompts: Dataset) -> dict[int, list[float]]:
    """{row: the share of each teacher}, with sum 1."""
    parts = names_in(flags.teacher)
    if not flags.teacher_key:
        return dict.fromkeys(prompts["row"], flags.teacher_weights or [1 / len(parts)] * len(parts))
    names = [part.partition("=")[0] for part in parts]
    return {row: [float(name == own) for name in names] for row, own in zip(prompts["row"], prompts[TEACHER])}


def refuse_other_rows(samples: list, shares: dict[int, list[float]], flag: str, where: str) -> None:
    """Raise UserError for a sample of a row that has no teacher: its rollout was made of other data."""
    odd = next((sample.row for sample in samples if sample.row not in shares), None)
    if odd is not None:
        found = f"{where} has a sample of row {odd + 1}, which is no prompt of --dataset"
        raise UserError(flag, found, "the --dataset that the rollouts were made of")


def weigh_teachers(run: RLRun) -> None:
    """Give the micro-batches of a rollout the shares of the teachers in their samples. See `mean_of_teachers`."""
    shares, make_batches = shares_of_rows(run.args.kl, run.samples), run.ppo.make_batches
    for samples in run.frozen or ():
        refuse_other_rows(samples, shares, "--rollouts_from", run.args.rollout.rollouts_from)

    def with_shares(samples: list, episode: int) -> tuple[list, list]:
        refuse_other_rows(samples, shares, "--load_checkpoint", "a rollout of the checkpoint")
        batches, samples = make_batches(samples, episode)
        table = torch.tensor([shares[sample.row] for sample in samples], dtype=torch.float64).T
        for micro_batch in (micro_batch for batch in batches for micro_batch in batch.micro_batches):
            numbers = micro_batch["sample_numbers"]
            micro_batch["teacher_shares"] = table[:, numbers.cpu()].to(numbers.device)
        return batches, samples

    run.ppo.make_batches = with_shares


TEACHERS = Feature("teachers", lambda run: len(names_in(run.args.kl.teacher)) > 1, with_loss=weigh_teachers)
