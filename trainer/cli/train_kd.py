"""`train_kd`: knowledge distillation of a causal language model, from a teacher's answers, its probabilities, or both.

torchrun --nproc_per_node 2 -m trainer.cli.train_kd --backend fsdp2 --pretrain MODEL --teacher MODEL --dataset data.jsonl ...
"""

from trainer.comma_separated import addresses_in, named_models
from trainer.entry import run_command
from trainer.flags.kd_flags import KDArguments
from trainer.flags.names.sources import naming_sources
from trainer.flags.parse_flags import check_given, parse_arguments
from trainer.runs.flag_checks import check_files_of, check_flags
from trainer.runs.start_line import begin

COMMAND = "train_kd"
EVAL_METRICS = ("eval_loss", "eval_teacher_loss", "eval_nll")


def parse(argv: list[str]) -> KDArguments:
    args = parse_arguments(KDArguments, COMMAND, argv)
    check_given(args, ("pretrain", "dataset", "teacher"))
    return args


def check(argv: list[str]) -> KDArguments:
    """`parse`, and the checks that need no torch."""
    args = parse(argv)
    check_flags(COMMAND, args, EVAL_METRICS)
    check_files_of(args)
    return args


def run(argv: list[str]) -> None:
    args = check(argv)
    begin(COMMAND, args)
    # torch is imported from here on: --help and a wrong flag have answered
    from transformers import AutoModelForCausalLM

    from trainer.datasets.samples.sft_samples import render_sample
    from trainer.methods.sft import sft_loss
    from trainer.runs.run import Method
    from trainer.runs.run_data import load_sft
    from trainer.runs.run_training import train

    method = Method(
        COMMAND,
        eval_metrics=EVAL_METRICS,
        load_data=load_sft,
        render=render_sample,
        auto_class=AutoModelForCausalLM,
        make_loss=lambda run: sft_loss,  # of the answers; the teacher is a feature
        frozen_models=lambda run: models_here(run.args.teacher.teacher),
    )
    train(args, method)


def models_here(teachers: str) -> dict[str, str]:
    """{flag, with a number from 2 on: model} of the teachers that are not on servers."""
    named = named_models("teacher", teachers)
    return {flag: name for flag, name in named.items() if not addresses_in(name)}


def main() -> None:
    run_command(naming_sources(run))


if __name__ == "__main__":
    main()
