"""`train_dpo --online`: a loss of `train_dpo` on pairs of the model's own answers, which a reward ranks.

Rollouts, rewards and the loop around them are those of `train_ppo`; see `training/ranked_pairs.py` for the pairs.
"""

import functools
from collections.abc import Callable

from trainer.datasets.samples.preference import collate_pairs
from trainer.entry import quiet_libraries
from trainer.errors import UserError
from trainer.flags.online_flags import OnlineDPOArguments
from trainer.flags.parse_flags import parse_arguments
from trainer.flags.rl_flags import AdvantageArguments, KLArguments, PPOArguments
from trainer.methods.ranked_pairs import PairSet, best_and_worst, make_pair_updates
from trainer.rollout.placement import move, trained_by
from trainer.runs.preference_runs import check_losses, needs_reference, pair_loss
from trainer.runs.rl import rl_run
from trainer.runs.rl.rl_checks import EVAL_METRICS, check_rewards, check_rollouts, facts_of_rollouts
from trainer.runs.rl.rl_parts import RLMethod, RLRun
from trainer.runs.run_training import check_flags

COMMAND = "train_dpo"


def parse(argv: list[str]) -> OnlineDPOArguments:
    args = parse_arguments(OnlineDPOArguments, "train_dpo --online", argv)
    for flag, value in (("--pretrain", args.model.pretrain), ("--dataset", args.data.dataset)):
        if value is None:
            raise UserError(flag, "missing", "a path or hub name; --online has no demo")
    return args


def validate(args: OnlineDPOArguments) -> None:
    """Raise UserError for flags that do not go together."""
    if not args.preference.online:
        raise UserError("--online", "false", "leave it out")
    facts = check_losses(args.preference) | facts_of_rollouts(args.scores)
    check_flags("train_dpo --online", args, EVAL_METRICS, **facts)
    check_rollouts(args.rollout)
    has_other_scores = args.rollout.rollouts_from and not args.data.eval_dataset
    check_rewards(args.scores, args.environment, needs_source=not has_other_scores)


def as_ppo(args: OnlineDPOArguments) -> PPOArguments:
    """The flags of the rollouts, for the code of `train_ppo`. It has no critic, and a reference if the loss needs one."""
    preference = args.preference
    return PPOArguments(
        model=args.model,
        lora=args.lora,
        data=args.data,
        prompts=args.prompts,
        rollout=args.rollout,
        scores=args.scores,
        environment=args.environment,
        advantage=AdvantageArguments(advantage_estimator="dr_grpo"),
        kl=KLArguments(
            ref_model=preference.ref_model,
            offload_ref=preference.ref_offload,
            init_kl_coef=float(needs_reference(preference.loss)),
        ),
        batch=args.batch,
        optimizer=args.optimizer,
        layout=args.layout,
        output=args.output,
        checkpoint=args.checkpoint,
    )


def make_pairs_of(run: RLRun) -> Callable:
    """Return `make_batches(samples, episode)`: this rank's batches of pairs, and the samples, moved to where they train.

    It communicates (all-to-all over the world).
    """
    args, strategy, pad = run.args, run.setup.strategy, run.setup.tokenizer.pad_token_id
    size, whole = args.rollout.n_samples_per_prompt, args.batch.micro_train_batch_size * 2 * run.setup.longest
    capacity = args.batch.max_tokens_per_micro_batch or whole

    def make_batches(samples: list, episode: int) -> tuple[list, list]:
        pairs = best_and_worst(samples, size)
        loader = strategy.setup_dataloader(
            PairSet(samples, pairs),
            functools.partial(collate_pairs, pad_token_id=pad, packed=args.batch.packing_samples),
            batch_size=args.batch.train_batch_size,
            micro_batch_size=args.batch.micro_train_batch_size,
            max_tokens=args.batch.max_tokens_per_micro_batch,
            packed_capacity=capacity if args.batch.packing_samples else None,
            shuffle=False,
        )
        loader.load_state_dict({"epoch": episode, "next_index": 0})
        of_ranks = trained_by(strategy.meshes, loader)
        places = [[place for pair in own for place in pairs[pair]] for own in of_ranks]
        samples = move(samples, places)
        loader.dataset = PairSet(samples, pairs)
        return list(loader), samples

    return make_batches


def make_updates(run: RLRun) -> Callable:
    """The updates of the policy on pairs of its own answers."""
    loss_fn = pair_loss(run.method.own_flags.preference, run.roles.reference, run.setup.sp_group)
    return make_pair_updates(loss_fn, run.args.rollout.n_samples_per_prompt)


def run_online(argv: list[str]) -> None:
    args = parse(argv)
    quiet_libraries()
    validate(args)
    method = RLMethod(COMMAND, make_pairs_of, make_updates, per_prompt=1, rules="train_dpo --online", own_flags=args)
    rl_run.train(as_ppo(args), method=method)
