"""`train_rm`: train a reward model on pairs of answers, and save it as a sequence classifier with one label.

torchrun --nproc_per_node 2 -m trainer.cli.train_rm --backend fsdp2 --pretrain MODEL --dataset pairs.jsonl ...
"""

import functools

from trainer.datasets.demos.demo_flags import RM_DEFAULTS
from trainer.entry import run_command
from trainer.flags.names.sources import naming_sources
from trainer.flags.parse_flags import parse_or_demo
from trainer.flags.preference_flags import RMArguments
from trainer.runs.flag_checks import check_files_of, check_flags
from trainer.runs.start_line import begin

COMMAND = "train_rm"
EVAL_METRICS = ("eval_loss", "eval_accuracy", "eval_margin")


def parse(argv: list[str]) -> tuple[RMArguments, bool]:
    """Return the arguments, and whether they are for the embedded demo."""
    return parse_or_demo(RMArguments, COMMAND, argv, RM_DEFAULTS)


def check(argv: list[str]) -> tuple[RMArguments, bool]:
    """`parse`, and the checks that need no torch."""
    args, is_demo = parse(argv)
    check_flags(COMMAND, args, EVAL_METRICS, is_demo)
    check_files_of(args, is_demo)
    return args, is_demo


def run(argv: list[str]) -> None:
    args, is_demo = check(argv)
    begin(COMMAND, args)
    # torch is imported from here on: --help and a wrong flag have answered
    from transformers import AutoModelForSequenceClassification

    from trainer.datasets.samples.preference import collate_pairs, render_pair
    from trainer.runs.preference_runs import load_pairs
    from trainer.runs.reward_model_runs import SOURCE, initial_folder, make_loss, note_scores
    from trainer.runs.run import Method
    from trainer.runs.run_training import train

    method = Method(
        COMMAND,
        eval_metrics=EVAL_METRICS,
        load_data=load_pairs,
        render=render_pair,
        collate=lambda rows, packed: functools.partial(collate_pairs, packed=packed, collate=rows),
        loader_options={"sequences_per_sample": 2},
        auto_class=AutoModelForSequenceClassification,
        model_folder=initial_folder,
        make_loss=make_loss,
        after_training=note_scores,
        features=(SOURCE,),
    )
    train(args, method, is_demo)


def main() -> None:
    run_command(naming_sources(run))


if __name__ == "__main__":
    main()
