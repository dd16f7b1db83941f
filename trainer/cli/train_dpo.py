"""`train_dpo`: preference optimization of a causal language model on pairs of answers, with DPO or a related loss.

torchrun --nproc_per_node 2 -m trainer.cli.train_dpo --backend fsdp2 --pretrain MODEL --dataset pairs.jsonl ...
"""

import functools

from trainer.datasets.demos.demo_flags import DPO_DEFAULTS
from trainer.entry import run_command
from trainer.errors import UserError
from trainer.flags.names.sources import naming_sources
from trainer.flags.parse_flags import parse_or_demo
from trainer.flags.preference_flags import DPOArguments
from trainer.runs.flag_checks import check_files_of, check_flags
from trainer.runs.rl.rl_checks import check_online
from trainer.runs.start_line import begin

COMMAND = "train_dpo"
EVAL_METRICS = ("eval_loss", "eval_reward_accuracy", "eval_reward_margin")


def parse(argv: list[str]) -> tuple[DPOArguments, bool]:
    """Return the arguments, and whether they are for the embedded demo."""
    return parse_or_demo(DPOArguments, COMMAND, argv, DPO_DEFAULTS)


def check(argv: list[str]):
    """`parse`, and the checks that need no torch."""
    if "--online" in argv:
        args = check_online(argv)
        check_files_of(args)
        return args
    args, is_demo = parse(argv)
    if args.preference.online:
        raise UserError("--online", "in a file of --config", "--online on the command line")
    check_flags(COMMAND, args, metrics_of(args.preference.loss), is_demo)
    check_files_of(args, is_demo)
    return args, is_demo


def metrics_of(loss: str) -> tuple[str, ...]:
    return EVAL_METRICS[:2] if loss == "kto" else EVAL_METRICS  # kto has no pairs, so no margin


def method_of(args: DPOArguments):
    """Pairs of answers, or with `--loss kto` single answers."""
    # not before the flags are parsed: --help must not import torch
    from transformers import AutoModelForCausalLM

    from trainer.datasets.samples import preference, unpaired
    from trainer.runs.preference_runs import check_losses, frozen_models, load_dpo, make_dpo_loss
    from trainer.runs.run import Method

    is_kto, collate = args.preference.loss == "kto", preference.collate_pairs
    if is_kto:
        collate = functools.partial(unpaired.collate_unpaired, max_len=args.length.max_len)
    return Method(
        COMMAND,
        eval_metrics=metrics_of(args.preference.loss),
        facts=check_losses(args.preference),
        load_data=load_dpo,
        render=unpaired.render_answer if is_kto else preference.render_pair,
        collate=lambda rows, packed: functools.partial(collate, packed=packed, collate=rows),
        loader_options={"with_previous": True} if is_kto else {"sequences_per_sample": 2},
        auto_class=AutoModelForCausalLM,
        make_loss=make_dpo_loss,
        has_frozen_copy=not args.lora.lora_rank,
        frozen_models=frozen_models,
        marks_tokens=True,
    )


def run_online(argv: list[str]) -> None:
    """`--online` is another command, with flags of its own."""
    args = check(argv)
    begin(COMMAND, args)
    # torch is imported from here on: --help and a wrong flag have answered
    from trainer.runs.rl.online_dpo import train

    train(args)


def run(argv: list[str]) -> None:
    if "--online" in argv:
        return run_online(argv)
    args, is_demo = check(argv)
    begin(COMMAND, args)
    # torch is imported from here on: --help and a wrong flag have answered
    from trainer.runs.run_training import train

    train(args, method_of(args), is_demo)


def main() -> None:
    run_command(naming_sources(run))


if __name__ == "__main__":
    main()
