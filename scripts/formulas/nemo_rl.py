"""NeMo-RL: https://github.com/NVIDIA-NeMo/RL"""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from formulas.rollouts import (
    DUAL,
    GROUP,
    HIGH,
    LOW,
    Rollout,
    absent,
    as_it_is,
    held,
    loss_case,
    our_advantages,
    our_loss,
    plain,
    whitened,
)

from trainer.datasets.batches.packing import IGNORE
from trainer.methods import advantages as adv
from trainer.methods.rollout_corrections import add_likelihood_of_right

NLL = 0.1  # the weight of VAPO's term


def load(checkout: str) -> SimpleNamespace:
    plain(checkout, "nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss")
    absent(*(f"nemo_rl.{name}" for name in ("data.chat_templates", "models.policy", "utils.fastokens", "utils.logger")))
    absent("nemo_rl.algorithms.x_token.loss_utils", "nemo_rl.distributed.batched_data_dict")
    absent("nemo_rl.distributed.model_utils", "nemo_rl.models.dtensor.parallelize")
    functions = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
    sys.modules["nemo_rl.algorithms.loss"].ClippedPGLossConfig = functions.ClippedPGLossConfig
    estimators = importlib.import_module("nemo_rl.algorithms.advantage_estimator")
    return SimpleNamespace(functions=functions, estimators=estimators)


def their_loss(nemo, rollout: Rollout, **config) -> torch.Tensor:
    """Their data has one more token in front, which has no loss."""
    chosen = {"ratio_clip_min": LOW, "ratio_clip_max": HIGH, "reference_policy_kl_penalty": 0.0} | config
    data = {"token_mask": rollout.mask.double(), "advantages": rollout.advantages, "prev_logprobs": rollout.old}
    data |= {"generation_logprobs": rollout.old}
    data = {name: torch.nn.functional.pad(value, (1, 0)) for name, value in data.items()}
    data |= {"sample_mask": torch.ones(len(rollout.scores)), "rewards": rollout.scores}
    loss = nemo.functions.ClippedPGLossFn(nemo.functions.ClippedPGLossConfig(**chosen))
    return loss(rollout.new, data, torch.tensor(len(rollout.scores)), rollout.mask.sum())[0]


def own_case(ours: str, loss_agg: str, options: dict, **config) -> Callable:
    return loss_case(partial(their_loss, **config), ours, loss_agg, as_it_is if options else held, **options)


def positive_nll(nemo, rollout: Rollout) -> tuple:
    """A response is right above 0 in NeMo-RL, and from the upper end of --reward_range on here."""
    right, count = held(rollout).scores > 0, rollout.mask.sum()
    rows = torch.arange(len(right))[:, None].expand(rollout.mask.shape)
    batch = {"sample_numbers": torch.arange(len(right)), "sequence_ids": rows}
    batch |= {"labels": torch.where(rollout.mask, 0, IGNORE), "loss_weights": rollout.mask.double()}
    batches = [SimpleNamespace(micro_batches=[batch], num_targets=count.item())]
    add_likelihood_of_right(SimpleNamespace(total=lambda sums: sums), batches, right, NLL)
    own = our_loss(rollout, "ppo", "token") - (rollout.new * batch["nll_weights"]).sum() / count
    return own, their_loss(nemo, rollout, positive_example_nll_weight=NLL)


def their_advantages(kind: type, rollout: Rollout, config: SimpleNamespace | dict, **facts) -> torch.Tensor:
    loss_config = SimpleNamespace(
        use_kl_in_reward=False, reference_policy_kl_penalty=0.0, reference_policy_kl_type="k1"
    )
    prompts = torch.from_numpy(rollout.index)[:, None]
    return kind(config, loss_config).compute_advantage(prompts, rollout.scores, rollout.mask.double(), **facts)


def group_norm(nemo, rollout: Rollout) -> tuple:
    """NeMo-RL leaves the sample out of its baseline by default. That is another formula."""
    config = SimpleNamespace(use_leave_one_out_baseline=False, normalize_rewards=True)
    theirs = their_advantages(nemo.estimators.GRPOAdvantageEstimator, rollout, config)
    return our_advantages(rollout, "group_norm")[0], theirs * rollout.mask


def gdpo(nemo, rollout: Rollout) -> tuple:
    """NeMo-RL adds nothing to the last deviation, we add 1e-6: ours is divided by its own, which is then almost 1."""
    config = SimpleNamespace(use_leave_one_out_baseline=False, normalize_rewards=True, reward_weights=[0.3, 0.7])
    second = rollout.values[:, 0].round()  # many equal ones
    facts = {"repeated_batch": {"reward/a": rollout.scores, "reward/b": second}}
    theirs = their_advantages(nemo.estimators.GDPOAdvantageEstimator, rollout, config, **facts)
    rewards = torch.stack([rollout.scores, second], 1)
    ours = adv.normalized_apart(rewards, torch.tensor([0.3, 0.7]), GROUP)
    ours = ours / ours.std() if ours.any() else ours
    return ours[:, None].expand(theirs.shape), theirs


def their_gae(nemo, rollout: Rollout, **config) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = {"gae_lambda": 0.9, "gae_gamma": 0.98, "normalize_advantages": True, "gae_lambda_value": None}
    chosen |= {"gae_lambda_policy": None, "length_adaptive_alpha": 0.0} | config
    kind = nemo.estimators.GeneralizedAdvantageEstimator
    return their_advantages(kind, rollout, chosen, values=rollout.values)


def gae_case(own: dict, **theirs) -> Callable:
    def case(nemo, rollout: Rollout) -> tuple:
        ours, returns = our_advantages(rollout, "gae", gamma=0.98, **own)
        found, their_returns = their_gae(nemo, rollout, **theirs)
        return torch.stack([whitened(rollout, ours), returns]), torch.stack([found, their_returns * rollout.mask])

    return case


def of_teacher(nemo, rollout: Rollout) -> tuple:
    options = adv.AdvantageOptions("distill", has_teacher=True)
    penalty = adv.kl_estimate(rollout.old, rollout.values, "k1")
    ours, _ = adv.estimate_advantages(options, rollout.scores, rollout.mask, penalty)
    facts = {"teacher_logprobs": rollout.values, "prev_logprobs": rollout.old}
    return ours, their_advantages(nemo.estimators.OPDAdvantageEstimator, rollout, {}, **facts)


SEQUENCE = {"token_level_loss": False}
ADAPTIVE = {"gae_lambda_value": 1.0, "length_adaptive_alpha": 0.5}
ROWS: dict[str, Callable] = {
    "`ppo` with `--dual_clip`, mean over tokens": own_case("ppo", "token", {"dual_clip": DUAL}, ratio_clip_c=DUAL),
    "`ppo`, mean over responses of means": own_case("ppo", "sequence", {}, **SEQUENCE),
    "`gspo`": own_case("gspo", "sequence", {}, sequence_level_importance_ratios=True, **SEQUENCE),
    "`cispo`": own_case("cispo", "token", {}, use_cispo=True),
    "`--positive_nll_coef`": positive_nll,
    "`group_norm`": group_norm,
    "`gdpo`": gdpo,
    "`gae`": gae_case({"lambd": 0.9}),
    "`gae` with `--policy_lambd`": gae_case(
        {"lambd": 1.0, "policy_lambd": 0.9}, gae_lambda_value=1.0, gae_lambda_policy=0.9
    ),
    "`gae` with `--policy_lambd_alpha`": gae_case({"lambd": 1.0, "policy_lambd_alpha": 0.5}, **ADAPTIVE),
    "`--teacher`": of_teacher,
}
