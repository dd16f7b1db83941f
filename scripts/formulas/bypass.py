"""`--bypass_mode`: the log-probs of the rollout engine are the old ones, and training computes none."""

from types import SimpleNamespace

from formulas.rollouts import Rollout

from trainer.methods.advantages import to_rows
from trainer.methods.ppo import add_log_probs
from trainer.models.losses.policy_loss import PolicyOptions


def of_engine(rollout: Rollout) -> Rollout:
    """The rollout with the old log-probs that our run takes from samples whose engine's log-probs are `old`."""
    samples = [SimpleNamespace(log_probs=row[kept].tolist()) for row, kept in zip(rollout.old, rollout.mask)]
    off = {"top_entropy_quantile": None, "tis_cap": None, "rollout_kl_max": None, "kl_in_rewards": False}
    options = SimpleNamespace(policy=PolicyOptions(), bypass_mode=True, num_epochs=2, **off)
    roles = SimpleNamespace(actor=[None], references=[], critic=None, routers=None)
    found = add_log_probs(None, roles, [], options, SimpleNamespace(samples=samples))
    rollout.old = to_rows(found["old_log_probs"], rollout.mask)
    return rollout
