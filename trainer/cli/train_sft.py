"""`train_sft`: supervised fine-tuning of a causal language model.

torchrun --nproc_per_node 2 -m trainer.cli.train_sft --backend fsdp2 --pretrain MODEL --dataset data.jsonl ...

The loss is `sft_loss` in methods/sft.py. `train` in runs/run_training.py is the order of a run. There, `shard_model` shards the
model, `Checkpoints` saves and resumes, and `run_loop` makes the steps. docs/architecture.md follows one batch through them.
"""

from trainer.datasets.demos.demo_flags import SFT_DEFAULTS
from trainer.entry import run_command
from trainer.flags.common_flags import SFTArguments
from trainer.flags.names.sources import naming_sources
from trainer.flags.parse_flags import parse_or_demo
from trainer.runs.flag_checks import check_files_of, check_flags
from trainer.runs.start_line import begin

COMMAND = "train_sft"
EVAL_METRICS = ("eval_loss",)


def parse(argv: list[str]) -> tuple[SFTArguments, bool]:
    """Return the arguments, and whether they are for the embedded demo."""
    return parse_or_demo(SFTArguments, COMMAND, argv, SFT_DEFAULTS)


def check(argv: list[str]) -> tuple[SFTArguments, bool]:
    """`parse`, and the checks that need no torch."""
    args, is_demo = parse(argv)
    check_flags(COMMAND, args, EVAL_METRICS, is_demo)
    check_files_of(args, is_demo)
    return args, is_demo


def run(argv: list[str]) -> None:
    args, is_demo = check(argv)
    begin(COMMAND, args)
    # torch is imported from here on: --help and a wrong flag have answered
    from transformers import AutoModelForCausalLM

    from trainer.compare.certificates.plain_replay import REPLAY
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
        make_loss=lambda run: sft_loss,
        features=(REPLAY,),  # --certify
    )
    train(args, method, is_demo)


def main() -> None:
    run_command(naming_sources(run))


if __name__ == "__main__":
    main()
