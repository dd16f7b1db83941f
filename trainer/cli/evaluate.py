"""`evaluate`: answer prompts with a model, score the answers, print a table with confidence intervals.

python -m trainer.cli.evaluate --pretrain runs/sft/model --eval_dataset test.jsonl --input_key question --label_key answer
    --reward_func math
"""

from trainer.entry import run_command
from trainer.flags.names.sources import naming_sources
from trainer.flags.rl_flags import PPOArguments
from trainer.runs.rl.evaluation_checks import COMMAND, checked
from trainer.runs.start_line import begin


def check(argv: list[str]) -> PPOArguments:
    """The flags, checked without torch, as those of a run of RL that only evaluates."""
    return checked(argv)


def run(argv: list[str]) -> None:
    args = check(argv)
    begin(COMMAND, args, trains=False)
    # torch is imported from here on: --help and a wrong flag have answered
    from trainer.runs.rl.evaluation_run import evaluate

    evaluate(args)


def main() -> None:
    run_command(naming_sources(run))


if __name__ == "__main__":
    main()
