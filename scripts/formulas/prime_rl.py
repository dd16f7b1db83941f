"""prime-rl: https://github.com/PrimeIntellect-ai/prime-rl"""

import asyncio
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from formulas.rollouts import (
    GROUP,
    HIGH,
    LOW,
    Rollout,
    absent,
    estimator_case,
    loss_case,
    plain,
    probable,
    right_or_wrong,
)


def load(checkout: str) -> SimpleNamespace:
    names = "prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.orchestrator", "prime_rl.orchestrator.algo"
    plain(str(Path(checkout, "src")), *names)
    absent("beartype", "jaxtyping", "verifiers", "verifiers.v1", "prime_rl.utils.logger", "prime_rl.utils.utils")
    absent("prime_rl.configs.trainer", "prime_rl.configs.algorithm", "prime_rl.transports.rollouts")
    sys.modules["jaxtyping"].jaxtyped = lambda **_: lambda function: function
    loss = importlib.import_module("prime_rl.trainer.rl.loss")
    return SimpleNamespace(loss=loss, max_rl=importlib.import_module("prime_rl.orchestrator.algo.max_rl"))


def dppo_tv(prime, rollout: Rollout) -> torch.Tensor:
    """Its default loss, without its KL term. The sums of responses are divided by the number of tokens."""
    config = SimpleNamespace(dppo_mask_low=LOW, dppo_mask_high=HIGH, adv_tau=1.0, kl_tau=0.0)
    rows = zip(rollout.new, rollout.old, [None] * len(rollout.new), rollout.advantages, rollout.mask)
    sums = [prime.loss.default_loss_fn(prime.loss.LossInputs(*row), config).loss for row in rows]
    return sum(sums) / rollout.mask.sum()


def maxrl(prime, rollout: Rollout) -> torch.Tensor:
    """prime-rl has rewards of 32 bits, and one advantage for a response, which it gives to its tokens."""
    found = []
    for scores in rollout.scores.view(-1, GROUP).tolist():
        traces = [trace(score) for score in scores]
        asyncio.run(prime.max_rl.MaxRLAlgorithm.score_group(None, [SimpleNamespace(traces=traces)]))
        found += [trace.nodes[0].advantages[0] for trace in traces]
    return torch.tensor(found, dtype=torch.float64)[:, None].expand(rollout.mask.shape)


def trace(score: float) -> SimpleNamespace:
    node = SimpleNamespace(mask=[True], token_ids=[0])
    return SimpleNamespace(
        reward=score, has_error=False, agent=SimpleNamespace(trainable=True), nodes=[node], id="trace"
    )


ROWS: dict[str, Callable] = {
    "`dppo_tv`": loss_case(dppo_tv, "dppo_tv", "token", probable),
    "`maxrl`": estimator_case(maxrl, "maxrl", right_or_wrong),
}
