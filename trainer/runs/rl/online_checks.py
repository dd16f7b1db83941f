"""The flags of `train_dpo --online`: parsed, and checked without torch."""

from trainer.errors import UserError
from trainer.flags.data_rules import has_evaluation
from trainer.flags.generating_flags import OnlineDPOArguments
from trainer.flags.parse_flags import parse_arguments
from trainer.runs.flag_checks import check_flags
from trainer.runs.rl.rl_checks import check_batch, check_rewards, check_rollouts, eval_metrics, facts_of_rollouts


def parse(argv: list[str]) -> OnlineDPOArguments:
    args = parse_arguments(OnlineDPOArguments, "train_dpo --online", argv)
    for flag, value in (("--pretrain", args.model.pretrain), ("--dataset", args.data.dataset)):
        if value is None:
            raise UserError(flag, "missing", "a path or hub name; --online has no demo")
    return args


def check(argv: list[str]) -> OnlineDPOArguments:
    """The arguments. Raises UserError for flags that do not go together."""
    args = parse(argv)
    if not args.preference.online:
        raise UserError("--online", "false", "leave it out")
    check_flags("train_dpo --online", args, eval_metrics(args.evaluation), **facts_of_rollouts(args))
    check_rollouts(args.rollout)
    check_batch(args.batch.train_batch_size, args.rollout, 1, "pairs")
    has_other_scores = args.rollout.rollouts_from and not has_evaluation(args.data)
    check_rewards(args.scores, args.environment, needs_source=not has_other_scores)
    return args
