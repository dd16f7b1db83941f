"""ms-swift: https://github.com/modelscope/ms-swift"""

import ast
import importlib
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from formulas.entropies import entropies_of, has_top_entropy
from formulas.rollouts import HIGH, LOW, THRESHOLD, Rollout, distance_case, held, near_enough, our_loss, plain

from trainer.models.losses.distances import Distance

METHODS = ("_compute_loss_and_metrics", "_compute_off_policy_sequence_mask")


def load(checkout: str) -> SimpleNamespace:
    """Two methods of its trainer, whose module needs vLLM and more."""
    source = Path(checkout, "swift/rlhf_trainers/grpo_trainer.py").read_text()
    found: dict[str, Any] = {"torch": torch, "Dict": dict, "Any": Any, "GRPOBatch": Any, "gather_object": list}
    found |= {"nanmin": torch.min, "nanmax": torch.max}  # of its metrics
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in METHODS:
            exec(textwrap.dedent(ast.get_source_segment(source, node, padded=True)), found)
    plain(checkout, "swift", "swift.rlhf_trainers")
    gkd = importlib.import_module("swift.rlhf_trainers.gkd_loss")
    return SimpleNamespace(gkd=gkd, **{name: found[name] for name in METHODS})


def top_entropies(swift, rollout: Rollout) -> tuple:
    """ms-swift's loss, whose other tokens count in the mean."""
    rollout = held(rollout)
    off = {"beta": 0.0, "sdar_loss_coef": 0, "overlong_filter": False, "_has_teacher": False}
    off |= {"log_rollout_offpolicy_metrics": False, "chord_sft_iterator": None}
    off |= dict.fromkeys(("off_policy_sequence_mask_delta", "rollout_importance_sampling_mode"))
    own = {"top_entropy_quantile": 0.2, "epsilon_low": LOW, "epsilon_high": HIGH, "loss_type": "bnpo"}
    fake = MagicMock(importance_sampling_level="token", **own, **off)
    fake.args = SimpleNamespace(top_entropy_quantile=0.2, delta=None, log_entropy=False)
    fake.accelerator.gather_for_metrics = lambda values: values
    fake._get_per_token_logps_and_entropies.return_value = (rollout.new, entropies_of(rollout))
    batch = SimpleNamespace(completion_mask=rollout.mask, truncated_mask=None, rollout_per_token_logps=None)
    batch.advantages, batch.old_per_token_logps = rollout.advantages, rollout.old
    theirs = swift._compute_loss_and_metrics(fake, None, {}, batch)[0]
    rollout.advantages = rollout.advantages * has_top_entropy(rollout, 0.2)  # a loss of 0 for the others
    return our_loss(rollout, "ppo", "token"), theirs


def sequence_mask(swift, rollout: Rollout) -> tuple:
    """ms-swift has an advantage for each response."""
    rollout.advantages = rollout.advantages[:, :1].expand(rollout.mask.shape)
    args = rollout.new.detach(), rollout.old, rollout.mask, rollout.advantages[:, 0]
    fake = SimpleNamespace(off_policy_sequence_mask_delta=THRESHOLD)
    return near_enough(rollout), swift._compute_off_policy_sequence_mask(fake, *args)[:, None] * rollout.mask.double()


def jsd(swift, model: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    return swift.gkd.jsd_loss(model, teacher, beta)


ROWS: dict[str, Callable] = {
    "`--off_policy_mask_threshold`": sequence_mask,
    "`--top_entropy_quantile`": top_entropies,
    "`--kd_loss kl`": distance_case(partial(jsd, beta=0.0), Distance("kl")),
    "`--kd_loss reverse_kl`": distance_case(partial(jsd, beta=1.0), Distance("reverse_kl")),
    "`--kd_loss jsd`": distance_case(partial(jsd, beta=0.3), Distance("jsd", 0.3)),
}
