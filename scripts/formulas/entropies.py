"""Formulas of entropies: those of the rollout are |values|, of 32 bits as in the peers."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from formulas.rollouts import Rollout

from trainer.methods.advantages import AdvantageOptions
from trainer.methods.ppo_state import EntropyCoef, PPOOptions
from trainer.methods.rollout_corrections import entropy_bound
from trainer.models.losses.policy_loss import PolicyOptions

ENTROPY = TARGET, DELTA, MOST = 0.6, 0.01, 0.025
SCALES = (2.0, 0.5, 0.4, 0.3, 0.2, 2.0, 0.9, 0.5)  # the mean of the rollout's is about 0.8


def entropies_of(rollout: Rollout) -> torch.Tensor:
    return rollout.values.abs().float().double()


def has_top_entropy(rollout: Rollout, share: float) -> torch.Tensor:
    """1 for the tokens that `--top_entropy_quantile` keeps."""
    entropies, mask = entropies_of(rollout), rollout.mask
    part = SimpleNamespace(share=lambda rows: rows, all_lengths=mask.sum(1).tolist(), width=mask.shape[1])
    part.counted = torch.ones(len(mask), dtype=torch.bool)
    return ((entropies >= entropy_bound(part, entropies, share)) & mask).double()


def steps_of_entropies(rollout: Rollout) -> list[torch.Tensor]:
    """Of several steps with `--entropy_target`. The entropies of a step are those of the rollout times a number."""
    return [rollout.values.abs() * scale for scale in SCALES]


def used_coefs(means: Sequence[float]) -> list[float]:
    """Our coefficient in each step, from the mean entropies of the steps."""
    chosen = {"entropy_target": TARGET, "entropy_coef_delta": DELTA, "entropy_coef_max": MOST}
    options = PPOOptions(AdvantageOptions("group_norm"), PolicyOptions(), None, seed=0, **chosen)
    state = EntropyCoef()
    return [state.after_step(mean, options)["entropy_coef"] for mean in means]
