"""`train_ppo`: reinforcement learning of a causal language model with PPO, GRPO and related algorithms.

torchrun --nproc_per_node 2 -m trainer.cli.train_ppo --backend fsdp2 --pretrain MODEL --dataset prompts.jsonl
    --input_key question --label_key answer --reward_func math --advantage_estimator group_norm --n_samples_per_prompt 8

`train` in runs/rl/rl_run.py is the order of a run. There, `build_roles` loads and shards the models, `train_ppo` in
methods/ppo.py has the phases of a rollout, and `Checkpoints` saves and resumes. The loss is `make_policy_loss` in
methods/roles.py. docs/architecture.md follows one round.
"""

from trainer.datasets.demos.demo_flags import PPO_DEFAULTS
from trainer.entry import run_command
from trainer.flags.names.presets import with_preset, with_teacher
from trainer.flags.names.sources import naming_sources
from trainer.flags.parse_flags import parse_or_demo
from trainer.flags.rl_flags import PPOArguments
from trainer.runs.flag_checks import check_files_of
from trainer.runs.rl.rl_checks import validate
from trainer.runs.start_line import begin

COMMAND = "train_ppo"


def parse(argv: list[str]) -> tuple[PPOArguments, bool]:
    """Return the arguments, and whether they are for the embedded demo."""

    def parse_flags(flags: list[str]) -> tuple[PPOArguments, bool]:
        return parse_or_demo(PPOArguments, COMMAND, flags, PPO_DEFAULTS)

    return with_teacher(*with_preset(parse_flags, argv), parse_flags, argv)


def check(argv: list[str]) -> tuple[PPOArguments, bool]:
    """`parse`, and the checks that need no torch."""
    args, is_demo = parse(argv)
    validate(args, is_demo)
    check_files_of(args, is_demo)
    return args, is_demo


def run(argv: list[str]) -> None:
    args, is_demo = check(argv)
    begin(COMMAND, args)
    # torch is imported from here on: --help and a wrong flag have answered
    from trainer.runs.rl.rl_run import train

    train(args, is_demo)


def main() -> None:
    run_command(naming_sources(run))


if __name__ == "__main__":
    main()
