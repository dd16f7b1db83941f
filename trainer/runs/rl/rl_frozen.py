"""`--rollouts_from`: rollouts of an earlier run, trained once more."""

from trainer.errors import UserError
from trainer.flags.rl_flags import PPOArguments
from trainer.models.model_bounds import bounds_of
from trainer.rollout.rollouts_file import read_rollouts
from trainer.runs.rl.rl_options import sampling_of


def frozen_rollouts(args: PPOArguments, folder: str) -> list:
    """The rollouts of --rollouts_from. Raises UserError if they do not fit this run, or the model in `folder`."""
    bounds = bounds_of(folder, args.model.trust_remote_code)
    frozen, size = read_rollouts(args.rollout.rollouts_from, bounds), args.rollout.n_samples_per_prompt
    if not frozen:
        raise UserError(
            "--rollouts_from", f"{args.rollout.rollouts_from} holds no rollout", "a rollouts.jsonl of train_ppo"
        )
    for sample in (sample for samples in frozen for sample in samples):
        if bool(sample.kept_ids) != sampling_of(args).truncates:
            found = (
                f"{args.rollout.rollouts_from} was made {'with' if sample.kept_ids else 'without'} truncated sampling"
            )
            raise UserError("--top_p, --top_k, --min_p", found, "the values of the run that made the rollouts")
        if args.rollout.routing_replay and sample.experts is None:
            found = f"{args.rollout.rollouts_from} was made without it"
            raise UserError("--routing_replay", found, "rollouts with it, or leave it out")
    odd = next((len(samples) for samples in frozen if len(samples) % size), None)
    if odd is not None:
        found = f"{size} with a rollout of {odd} samples in {args.rollout.rollouts_from}"
        raise UserError("--n_samples_per_prompt", found, "the value of the run that made the rollouts")
    return frozen
