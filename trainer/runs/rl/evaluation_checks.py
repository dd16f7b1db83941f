"""The flags of `evaluate`: parsed, checked without torch, and turned into those of a run of RL that only evaluates."""

import os

from trainer.errors import UserError
from trainer.flags.generating_flags import EvaluateArguments
from trainer.flags.groups import flat, from_flat
from trainer.flags.parse_flags import check_given, parse_arguments
from trainer.flags.rl_flags import PPOArguments
from trainer.model_folders.adapter_folder import adapter_here, is_adapter
from trainer.runs.flag_checks import check_files_of, check_flags
from trainer.runs.output_folders import holds_run
from trainer.runs.rl.rl_checks import check_rewards, check_rollouts, eval_metrics, facts_of_rollouts

COMMAND = "evaluate"
RESULTS, ANSWERS = "evaluation.json", "answers.jsonl"  # in the output folder


def checked(argv: list[str]) -> PPOArguments:
    """The flags of a run without training. Raises UserError for flags that no evaluation could have."""
    given = parse_arguments(EvaluateArguments, COMMAND, argv)
    check_given(given, ("pretrain", "eval_dataset"))
    args = as_ppo(given)
    if args.rollout.rollout_engine == "sglang":
        found = "sglang, and only training can compare the weights of its servers"
        raise UserError("--rollout_engine", found, "hf, vllm, vllm_server")
    check_flags("train_ppo", args, eval_metrics(args.evaluation), **facts_of_rollouts(args))
    check_rollouts(args.rollout)
    check_rewards(args.scores, args.environment, needs_source=True)
    check_free(args.output.output_dir, args.output.overwrite)
    check_files_of(args)
    return args


def as_ppo(args: EvaluateArguments) -> PPOArguments:
    """The same flags for the code of `train_ppo`. A batch, of reward models, has some samples of each rank."""
    num_ranks, each = int(os.environ.get("WORLD_SIZE", 1)), args.engine.micro_rollout_batch_size
    batch = {"train_batch_size": num_ranks * each, "micro_train_batch_size": each}
    merged = {"merge_adapter": is_adapter(adapter_here(args.sets.pretrain))}  # as engines take it
    own = {"advantage_estimator": "reinforce", "no_save": True}
    return from_flat(PPOArguments, flat(args) | batch | merged | own)


def check_free(folder: str | None, overwrite: bool) -> None:
    """Raise UserError if the output folder holds a training run, or another evaluation without --overwrite."""
    if folder and holds_run(folder):
        raise UserError("--output_dir", f"{folder} holds a training run", "another folder, or one within it")
    if folder and os.path.exists(os.path.join(folder, RESULTS)) and not overwrite:
        raise UserError("--output_dir", f"{folder} holds another evaluation", "another folder, or --overwrite")
