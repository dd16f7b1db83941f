"""`train_dpo --online`: a loss of `train_dpo` on pairs of the model's own answers, which a reward ranks.

Rollouts, rewards and the loop around them are those of `train_ppo`; see `training/ranked_pairs.py` for the pairs.
"""

import dataclasses
import functools
from collections.abc import Callable

from trainer.entry import quiet_libraries
from trainer.errors import UserError
from trainer.flags.common_flags import parse_arguments
from trainer.flags.online_flags import OnlineDPOArguments
from trainer.flags.rl_flags import PPOArguments
from trainer.runs import run_training
from trainer.runs.preference_rules import make_loss, needs_reference, validate_losses
from trainer.runs.preference_runs import validate_pairs
from trainer.runs.rl import rl_run
from trainer.runs.rl.rl_options import EVAL_METRICS
from trainer.runs.rl.rl_options import validate as validate_ppo

COMMAND = "train_dpo"


def parse(argv: list[str]) -> OnlineDPOArguments:
    args = parse_arguments(OnlineDPOArguments, "train_dpo --online", argv)
    for flag, value in (("--pretrain", args.pretrain), ("--dataset", args.dataset)):
        if value is None:
            raise UserError(flag, "missing with --online", "a path or hub name")
    return args


def validate(args: OnlineDPOArguments) -> None:
    if not args.online:
        raise UserError("--online", "false", "leave it out")
    if args.loss == "kto":
        raise UserError("--loss", "kto with --online, which makes pairs", "a loss of pairs")
    names = validate_losses(args)
    if args.n_samples_per_prompt < 2:
        raise UserError("--n_samples_per_prompt", "1 with --online: a pair has two answers", "2 or more")
    others = {
        "--precompute_ref_logps": args.precompute_ref_logps,
        "--aux_loss_coef": args.aux_loss_coef,
        "--max_staleness": args.max_staleness,
        "--routing_replay": args.routing_replay,
        "--share_prompts": args.share_prompts,
        "--sample_pages": args.sample_pages,
    }
    for flag in (flag for flag, value in others.items() if value):
        raise UserError(flag, "with --online", "leave it out")
    has_reference = needs_reference(args)
    for flag, value in {"--ref_model": args.ref_model, "--ref_offload": args.ref_offload}.items():
        if value and not has_reference:
            raise UserError(flag, f"with --loss {args.loss}, which has no reference", "leave it out")
    idle = [
        ("simpo_gamma", "simpo" in names, "--loss simpo"),
        ("f_alpha", args.f_divergence == "alpha", "--f_divergence alpha"),
    ]
    run_training.refuse_idle(args, idle)
    validate_pairs(args, EVAL_METRICS)
    validate_ppo(as_ppo(args))


def as_ppo(args: OnlineDPOArguments) -> PPOArguments:
    """The flags of the rollouts, for the code of `train_ppo`. It has no critic, and a reference if the loss needs one."""
    names = {field.name for field in dataclasses.fields(PPOArguments)}
    shared = {name: value for name, value in vars(args).items() if name in names}
    shared |= {"advantage_estimator": "dr_grpo", "init_kl_coef": float(needs_reference(args))}
    return PPOArguments(**shared, offload_ref=args.ref_offload)


def make_pairs_of(args: PPOArguments, setup: run_training.Setup) -> Callable:
    """Return `make_batches(samples, episode)`: this rank's batches of pairs, and the samples, moved to where they train.

    It communicates (all-to-all over the world).
    """
    from trainer.datasets.samples.preference import collate_pairs
    from trainer.methods.ranked_pairs import PairSet, best_and_worst
    from trainer.rollout.placement import move, trained_by

    pad, size = setup.tokenizer.pad_token_id, args.n_samples_per_prompt
    whole = args.micro_train_batch_size * 2 * (args.prompt_max_len + args.generate_max_len)
    capacity = args.max_tokens_per_micro_batch or whole

    def make_batches(samples: list, episode: int) -> tuple[list, list]:
        pairs = best_and_worst(samples, size)
        loader = setup.strategy.setup_dataloader(
            PairSet(samples, pairs),
            functools.partial(collate_pairs, pad_token_id=pad, packed=args.packing_samples),
            batch_size=args.train_batch_size,
            micro_batch_size=args.micro_train_batch_size,
            max_tokens=args.max_tokens_per_micro_batch,
            packed_capacity=capacity if args.packing_samples else None,
            shuffle=False,
        )
        loader.load_state_dict({"epoch": episode, "next_index": 0})
        of_ranks = trained_by(setup.strategy.meshes, loader)
        places = [[place for pair in own for place in pairs[pair]] for own in of_ranks]
        samples = move(samples, places)
        loader.dataset = PairSet(samples, pairs)
        return list(loader), samples

    return make_batches


def run_online(argv: list[str]) -> None:
    args = parse(argv)
    quiet_libraries()
    validate(args)

    def make_updates(setup: run_training.Setup, roles) -> Callable:
        from trainer.methods.ranked_pairs import make_pair_updates

        loss_fn = make_loss(args, None, roles.reference, setup.sp_group)  # it asks the config for experts only
        return make_pair_updates(loss_fn, args.n_samples_per_prompt)

    rl_run.train(as_ppo(args), method=rl_run.Method(COMMAND, args, make_pairs_of, make_updates, 1))
