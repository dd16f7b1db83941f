"""AReaL: https://github.com/areal-project/AReaL"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace

import torch
from formulas.rollouts import Rollout, absent, our_advantages, plain

from trainer.methods import advantages as adv


def load(checkout: str) -> SimpleNamespace:
    plain(checkout, "areal", "areal.trainer", "areal.trainer.ppo", "areal.utils")
    plain(checkout, "areal.utils.functional")
    absent("areal.utils.dynamic_import", "areal.api", "areal.api.cli_args", "areal.infra", "areal.infra.platforms")
    absent("einops", "torchdata.stateful_dataloader", "areal.utils.logging", "areal.utils.seqpack", "areal.utils.math")
    names = "trainer.ppo.gae", "trainer.ppo.lambda_fn", "utils.functional.functional"
    return SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(f"areal.{name}") for name in names})


def padded(values: torch.Tensor) -> torch.Tensor:
    """AReaL's rows end with a place that predicts nothing."""
    return torch.nn.functional.pad(values, (0, 1))


def gae_case(own: dict, lambdas: Callable) -> Callable:
    """AReaL has no other lambda for returns, so only advantages are compared. They are not whitened, which is another flag."""

    def case(areal, rollout: Rollout) -> tuple:
        mask = padded(rollout.mask.double())
        parts = padded(rollout.rewards), padded(rollout.values), mask, torch.zeros(len(mask))
        theirs, _ = areal.gae._compute_token_level_gae(*parts, 0.98, lambdas(areal, mask))
        ours, _ = our_advantages(rollout, "gae", gamma=0.98, divide_by_std=False, **own)
        theirs = theirs[:, :-1] * rollout.mask
        return ours, (theirs - theirs[rollout.mask].mean()) * rollout.mask  # ours have the mean 0

    return case


def adaptive(areal, mask: torch.Tensor) -> torch.Tensor:
    context = areal.gae._build_gae_lambda_context(mask, None, gae_timestep_unit="token")
    return areal.lambda_fn.vapo_length_adaptive_gae(context, alpha=0.5)


def near(areal, rollout: Rollout) -> tuple:
    """By k2. AReaL's k3 has the inverse ratio, which is another estimate."""
    new, limits = rollout.new.detach(), {"upper": 0.1, "lower": None}
    config = SimpleNamespace(level="sequence", action="mask", metric="kl_k2", agg="mean", **limits)
    theirs = areal.functional.apply_rejection_sampling(new, rollout.old, rollout.mask.double(), None, config)
    kept = adv.within_kl(rollout.old, new, rollout.mask, "k2", 0.1)[:, None] & rollout.mask
    return kept.double(), theirs.loss_mask


ROWS: dict[str, Callable] = {
    "`gae`": gae_case({"lambd": 0.9}, lambda *_: 0.9),
    "`gae` with `--policy_lambd_alpha`": gae_case({"lambd": 1.0, "policy_lambd_alpha": 0.5}, adaptive),
    "`--rollout_kl_max`, `k2`": near,
}
