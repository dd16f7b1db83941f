"""slime: https://github.com/THUDM/slime"""

import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from formulas.bypass import of_engine
from formulas.rollouts import (
    DUAL,
    GROUP,
    HIGH,
    LOW,
    THRESHOLD,
    Rollout,
    absent,
    held,
    loss_case,
    near_enough,
    our_advantages,
    our_loss,
    plain,
)

from trainer.methods import advantages as adv


def load(checkout: str) -> SimpleNamespace:
    plain(checkout, "slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils")
    absent("megatron.core", "slime.utils.distributed_utils", "slime.utils.misc", "slime.utils.types")
    names = "slime.utils.ppo_utils", "slime.backends.megatron_utils.loss"
    utils, loss = map(importlib.import_module, names)
    return SimpleNamespace(utils=utils, loss=loss)


def sequence_mask(slime, rollout: Rollout) -> tuple:
    parts = (rollout.new.detach(), rollout.old, rollout.advantages, rollout.mask.double())
    theirs, _ = slime.utils.compute_opsm_mask(SimpleNamespace(opsm_delta=THRESHOLD), *map(list, parts))
    return near_enough(rollout), theirs.view(rollout.mask.shape) * rollout.mask


def mean(theirs: Callable) -> Callable:
    """Sums over tokens. slime's advantages of a token are ours, and its own mean is Megatron's."""
    return lambda slime, rollout: theirs(slime.utils, rollout)[rollout.mask].mean()


def ppo(utils, rollout: Rollout) -> torch.Tensor:
    return utils.compute_policy_loss(rollout.old - rollout.new, rollout.advantages, LOW, HIGH, DUAL)[0]


def cispo(utils, rollout: Rollout) -> torch.Tensor:
    args = rollout.old - rollout.new, rollout.new, rollout.advantages, LOW, HIGH
    return utils.compute_cispo_loss(*args)[0]


def gspo(utils, rollout: Rollout) -> torch.Tensor:
    new, old, mask = list(rollout.new), list(rollout.old), list(rollout.mask.double())
    kl = utils.compute_gspo_kl(new, old, new, mask).view(rollout.mask.shape)
    return utils.compute_policy_loss(kl, rollout.advantages, LOW, HIGH)[0]


def rows_without_padding(values: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    return [row[kept] for row, kept in zip(values, mask)]


def bypass(slime, rollout: Rollout) -> tuple:
    """slime's whole loss function, with the log-probs of the rollout in place of a model's. Its batch also has `values` as
    the recomputed log-probs, which must not count."""
    new, rows = rollout.new, partial(rows_without_padding, mask=rollout.mask)
    slime.loss.get_log_probs_and_entropy = lambda *_, **__: (None, {"log_probs": rows(new), "entropy": rows(new)})
    off = {"use_opsm": False, "get_mismatch_metrics": False, "use_tis": False, "use_kl_loss": False, "entropy_coef": 0}
    off |= {"rollout_top_p": 1.0, "use_rollout_logprobs": True, "advantage_estimator": "grpo"}
    args = SimpleNamespace(eps_clip=LOW, eps_clip_high=HIGH, eps_clip_c=DUAL, **off)
    batch = {"advantages": rows(rollout.advantages), "log_probs": rows(rollout.values)}
    batch |= {"rollout_log_probs": rows(rollout.old)}
    batch |= dict.fromkeys(("response_lengths", "total_lengths", "unconcat_tokens", "loss_masks"))
    theirs, _ = slime.loss.policy_loss_function(args, batch, None, torch.mean)
    return our_loss(of_engine(rollout), "ppo", "token", dual_clip=DUAL), theirs


def of_teacher(slime, rollout: Rollout) -> tuple:
    """The advantages of scores, and those of a teacher whose log-probs are the rollout's `values`."""
    penalty = adv.kl_estimate(rollout.old, rollout.values, "k1")
    options = adv.AdvantageOptions("group_norm", GROUP, has_teacher=True)
    ours, _ = adv.estimate_advantages(options, rollout.scores, rollout.mask, penalty)
    theirs = list(our_advantages(rollout, "group_norm")[0])
    args = SimpleNamespace(opd_kl_coef=1.0, opd_type="sglang")
    slime.loss.apply_opd_kl_to_advantages(args, {"teacher_log_probs": rollout.values}, theirs, rollout.old)
    return ours, torch.stack(theirs) * rollout.mask


ROWS: dict[str, Callable] = {
    "`ppo` with `--dual_clip`, mean over tokens": loss_case(mean(ppo), "ppo", "token", dual_clip=DUAL),
    "`--bypass_mode` with `ppo`": bypass,
    "`gspo`": loss_case(mean(gspo), "gspo", "token", held),
    "`cispo`": loss_case(mean(cispo), "cispo", "token", held),
    "`--off_policy_mask_threshold`": sequence_mask,
    "`--teacher`": of_teacher,
}
