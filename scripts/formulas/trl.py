"""TRL: https://github.com/huggingface/trl"""

import importlib
import math
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from formulas.entropies import ENTROPY, entropies_of, has_top_entropy, steps_of_entropies, used_coefs
from formulas.rollouts import (
    HIGH,
    LOW,
    THRESHOLD,
    Rollout,
    distance_case,
    held,
    loss_case,
    near_enough,
    one_advantage,
    our_loss,
)

from trainer.models.losses.distances import Distance


def load(checkout: str) -> SimpleNamespace:
    sys.path.insert(0, checkout)
    names = "trainer.grpo_trainer", "experimental.gkd.gkd_trainer", "experimental.server_distillation"
    grpo, gkd, _ = (importlib.import_module(f"trl.{name}") for name in names)
    server = importlib.import_module("trl.experimental.server_distillation.server_distillation_trainer")
    return SimpleNamespace(grpo=grpo.GRPOTrainer, gkd=gkd.GKDTrainer, server=server)


def trainer_of(rollout: Rollout, **options) -> MagicMock:
    """What its method reads, with the log-probs and entropies of the rollout in place of those of a model."""
    own = {"aux_loss_enabled": False, "beta": 0.0, "epsilon_low": LOW, "epsilon_high": HIGH, "use_vllm": False}
    own |= {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "_entropy_bonus_enabled": False}
    own |= {"importance_sampling_level": "token", "current_gradient_accumulation_steps": 1}
    own["args"] = SimpleNamespace(delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
    fake = MagicMock(**own | options)
    fake.accelerator.gather = lambda values: values  # of one rank
    fake.accelerator.reduce = lambda values, **_: values
    fake._get_per_token_logps_and_entropies.return_value = (rollout.new, rollout.values.abs(), None)
    return fake


def their_loss(trl, rollout: Rollout, fake: MagicMock) -> torch.Tensor:
    ids = torch.zeros(rollout.mask.shape, dtype=torch.long)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": rollout.mask.double()}
    inputs |= {"advantages": rollout.advantages, "old_per_token_logps": rollout.old}
    return trl.grpo._compute_loss(fake, None, inputs)


def luspo(trl, rollout: Rollout) -> torch.Tensor:
    """TRL's mean over responses counts a response of single advantages once."""
    rollout.advantages = rollout.advantages[:, 0]
    return their_loss(trl, rollout, trainer_of(rollout, loss_type="luspo", importance_sampling_level="sequence"))


def sapo(trl, rollout: Rollout) -> torch.Tensor:
    return their_loss(trl, rollout, trainer_of(rollout, loss_type="sapo"))


def adaptive_entropy(trl, rollout: Rollout) -> tuple:
    """The losses of several steps."""
    rollout = held(rollout)
    entropies = steps_of_entropies(rollout)
    target, delta, most = ENTROPY
    args = {"entropy_target": target, "entropy_coef_delta": delta, "entropy_coef_max": most, "entropy_coef_min": 0.0}
    fake = trainer_of(rollout, loss_type="bnpo", _entropy_bonus_enabled=True, use_adaptive_entropy=True)
    fake.args = SimpleNamespace(delta=None, **args)
    fake.entropy_coef, fake._last_world_entropy, fake._entropy_window_stats = 0.0, math.inf, None
    theirs = []
    for of_step in entropies:
        fake._get_per_token_logps_and_entropies.return_value = (rollout.new, of_step, None)
        theirs.append(their_loss(trl, rollout, fake))
    means = [of_step[rollout.mask].mean().item() for of_step in entropies]
    loss = our_loss(rollout, "ppo", "token")
    return torch.stack([loss - coef * mean for coef, mean in zip(used_coefs(means), means)]), torch.stack(theirs)


def sequence_mask(trl, rollout: Rollout) -> tuple:
    parts = rollout.advantages, rollout.new, rollout.old, rollout.mask.double()
    theirs = trl.grpo.get_off_policy_mask(*parts, off_policy_threshold=THRESHOLD)
    return near_enough(rollout), theirs * rollout.mask


def top_entropies(trl, rollout: Rollout) -> tuple:
    fake = trainer_of(rollout)
    fake.accelerator.pad_across_processes = lambda values, **_: values
    theirs = trl.grpo.get_high_entropy_mask(fake, entropies_of(rollout), rollout.mask.double(), 0.8)
    return has_top_entropy(rollout, 0.2), theirs.double()


def jsd(trl, model: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    return trl.gkd.generalized_jsd_loss(model[:, None], teacher[:, None], beta=beta, reduction="sum")


def top_k(trl, model: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Two functions of its trainer with a teacher on a server. The bucket of the rest is at least 1e-7, as in all inputs."""
    found, ids = teacher.log_softmax(1).topk(3)
    parts, every = (model.log_softmax(1).gather(1, ids), found), torch.ones_like(ids, dtype=torch.bool)
    buckets = [trl.server._add_tail_bucket(part, every) for part in parts]
    return trl.server._jsd_divergence(buckets[0][0], buckets[1][0], 0.3, buckets[0][1]).sum()


ROWS: dict[str, Callable] = {
    "LUSPO: `gspo`, mean over responses of sums": loss_case(luspo, "gspo", "sum", one_advantage),
    "`sapo`": loss_case(sapo, "sapo", "sequence"),
    "`--entropy_target`": adaptive_entropy,
    "`--off_policy_mask_threshold`": sequence_mask,
    "`--top_entropy_quantile`": top_entropies,
    "`--kd_loss kl`": distance_case(partial(jsd, beta=0.0), Distance("kl")),
    "`--kd_loss reverse_kl`": distance_case(partial(jsd, beta=1.0), Distance("reverse_kl")),
    "`--kd_loss jsd`": distance_case(partial(jsd, beta=0.3), Distance("jsd", 0.3)),
    "`--kd_loss jsd` with `--kd_top_k`": distance_case(top_k, Distance("jsd", 0.3, 3), most=5.0),
}
