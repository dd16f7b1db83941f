"""clip_cov and kl_cov of the paper's authors and of the peers that took them."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from formulas.rollouts import HIGH, LOW, Rollout, held, our_loss

from trainer.methods.rollout_corrections import chosen_tokens
from trainer.models.losses import policy_loss as losses

RANGE, SHARE = (0.1, 5.0), 0.2


def chosen_by_update(rollout: Rollout, name: str, share: float) -> torch.Tensor:
    """Peers choose by the log-probs of the update. Within the range, all are chosen: so the choice is not random."""
    mask, chosen = rollout.mask, torch.zeros_like(rollout.mask)
    options = SimpleNamespace(policy=losses.PolicyOptions(loss=name), cov_range=RANGE, cov_share=share, seed=0)
    chosen[mask] = chosen_tokens(rollout.new.detach()[mask], rollout.advantages[mask], options, 0)
    return chosen


def clip_cov_case(theirs: Callable) -> Callable:
    """In the peers, a token that the clip holds keeps its constant loss. It has no gradient in either."""

    def case(peer, rollout: Rollout) -> tuple:
        rollout = held(rollout)
        log_ratio = (rollout.new - rollout.old).detach()
        _, is_held = losses.ppo_loss(log_ratio, rollout.advantages, LOW, HIGH)
        chosen = chosen_by_update(rollout, "clip_cov", 1.0) & ~is_held
        return our_loss(rollout, "clip_cov", "token", chosen=chosen), theirs(peer, rollout)

    return case


def kl_cov_case(theirs: Callable, share: Callable[[Rollout], float] = lambda _: SHARE) -> Callable:
    def case(peer, rollout: Rollout) -> tuple:
        rollout = held(rollout)
        chosen = chosen_by_update(rollout, "kl_cov", share(rollout))
        return our_loss(rollout, "kl_cov", "token", chosen=chosen), theirs(peer, rollout)

    return case
