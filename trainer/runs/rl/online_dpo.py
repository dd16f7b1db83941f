"""`train_dpo --online`: a loss of `train_dpo` on pairs of the model's own answers, which a reward ranks.

Rollouts, rewards and the loop around them are those of `train_ppo`; see `methods/ranked_pairs.py` for the pairs.
"""

import functools
from collections.abc import Callable

from trainer.datasets.samples.preference import collate_pairs
from trainer.flags.generating_flags import OnlineDPOArguments
from trainer.flags.groups import groups_of
from trainer.flags.policy_flags import AdvantageArguments, KLArguments
from trainer.flags.rl_flags import PPOArguments
from trainer.flags.rules import refuse
from trainer.methods.ranked_pairs import PairSet, best_and_worst, make_pair_updates
from trainer.rollout.placement import move, trained_by
from trainer.runs.preference_runs import check_losses, needs_reference, pair_loss
from trainer.runs.rl import rl_run
from trainer.runs.rl.rl_parts import RLMethod, RLRun
from trainer.runs.run_data import build_loader

COMMAND = "train_dpo"


def as_ppo(args: OnlineDPOArguments) -> PPOArguments:
    """The flags of the rollouts, for the code of `train_ppo`. It has no critic, and a reference if the loss needs one."""
    preference, shared = args.preference, groups_of(PPOArguments).keys() - {"experts"}
    kl = KLArguments(ref_model=preference.ref_model, offload_ref=preference.ref_offload)
    kl.init_kl_coef = float(needs_reference(preference.loss))
    own = {"advantage": AdvantageArguments(advantage_estimator="dr_grpo"), "kl": kl}
    return PPOArguments(**{name: group for name, group in vars(args).items() if name in shared}, **own)


def make_pairs_of(run: RLRun) -> Callable:
    """Return `make_batches(samples, episode)`: this rank's batches of pairs, and the samples, moved to where they train.

    It communicates (all-to-all over the world).
    """
    batch, setup, size = run.args.batch, run.setup, run.args.rollout.n_samples_per_prompt
    collate = functools.partial(collate_pairs, packed=batch.packing_samples)

    def make_batches(samples: list, episode: int) -> tuple[list, list]:
        pairs = best_and_worst(samples, size)
        loader = build_loader(batch, setup, PairSet(samples, pairs), collate, shuffle=False, sequences_per_sample=2)
        loader.load_state_dict({"epoch": episode, "next_index": 0})
        of_ranks = trained_by(setup.strategy.meshes, loader)
        places = [[place for pair in own for place in pairs[pair]] for own in of_ranks]
        samples = move(samples, places)
        loader.dataset = PairSet(samples, pairs)
        return list(loader), samples

    return make_batches


def make_updates(run: RLRun) -> Callable:
    """The updates of the policy on pairs of its own answers."""
    reference, sampling = next(iter(run.roles.references), None), run.options.sampling
    # the loss has the log-probs of temperature 1 and of all tokens
    compares = sampling.temperature == 1 and not sampling.truncates
    loss_fn = pair_loss(run.method.own_flags.preference, reference, run.setup.sp_group, sampled=compares)
    return make_pair_updates(loss_fn, run.args.rollout.n_samples_per_prompt)


def train(args: OnlineDPOArguments) -> None:
    """A run on these flags, which `check_online` has checked."""
    refuse("train_dpo --online", args, **check_losses(args.preference))
    method = RLMethod(COMMAND, make_pairs_of, make_updates, per_prompt=1, rules="train_dpo --online", own_flags=args)
    rl_run.train(as_ppo(args), method=method)
