"""The options of the algorithm and of its evaluation, from the flags of `train_ppo`."""

import dataclasses
import math
from typing import Optional

from trainer.comma_separated import names_in
from trainer.flags.groups import flat
from trainer.flags.names.loss_names import check_names_in
from trainer.flags.rl_flags import PPOArguments
from trainer.methods.advantages import AdvantageOptions
from trainer.methods.ppo_state import PPOOptions
from trainer.models.losses.policy_loss import POLICY_LOSSES, PolicyOptions
from trainer.rollout.engines.sampling import Sampling
from trainer.rollout.evaluation import Evaluation, groups_of
from trainer.rollout.prompt_order import WRONG_AND_RIGHT
from trainer.rollout.rewards.reward_functions import short_name
from trainer.rollout.scoring import ENVIRONMENT

# flags that are options of the algorithm as they are
SAME_NAMES = """seed bypass_mode cov_share kl_estimator kl_in_score kl_target kl_horizon top_entropy_quantile tis_cap tis_level tis_floor rollout_kl_max
    rollout_kl_estimator normalize_reward overlong_buffer_len overlong_penalty_factor freezing_actor_steps positive_nll_coef
    turn_rewards entropy_target entropy_coef_delta entropy_coef_max"""


def reference_is_base(args: PPOArguments) -> bool:
    """Whether the reference is the policy with its adapter off, instead of a separate model."""
    return bool(args.lora.lora_rank) and not (args.kl.ref_model or args.lora.lora_adapter)


def engine_tp_size(args: PPOArguments) -> int:
    """The ranks of an engine of --rollout_engine vllm."""
    return args.rollout.engine_tensor_parallel_size or args.layout.tensor_parallel_size


def sampling_of(args: PPOArguments, stop_ids: tuple[int, ...] = ()):
    truncation = {"top_p": args.rollout.top_p, "top_k": args.rollout.top_k, "min_p": args.rollout.min_p}
    return Sampling(
        args.rollout.temperature, args.rollout.generate_max_len, stop_ids, tuple(args.rollout.stop or ()), **truncation
    )


def filtering_range(args: PPOArguments) -> Optional[tuple[float, float]]:
    """The bounds of the mean scores that --dynamic_filtering keeps, in the units of scores. None: it is off."""
    if not args.rollout.dynamic_filtering:
        return None
    if args.rollout.dynamic_filtering_range is None:
        return -math.inf, math.inf
    wrong, right = args.scores.reward_range or WRONG_AND_RIGHT
    low, high = args.rollout.dynamic_filtering_range
    return wrong + low * (right - wrong), wrong + high * (right - wrong)


def mask_range(args: PPOArguments) -> Optional[tuple[float, float]]:
    """The ratios that --tis_mask keeps. None: it is off."""
    if not args.advantage.tis_mask:
        return None
    low, high = args.advantage.tis_mask_range or (1 / args.advantage.tis_cap, args.advantage.tis_cap)
    return low, high


def rewards_apart(args: PPOArguments) -> tuple[tuple[str, float], ...]:
    """The name in the log and the weight of each function of --reward_func, and of an environment, for gdpo."""
    if args.advantage.advantage_estimator != "gdpo":
        return ()
    names = [short_name(name) for name in names_in(args.scores.reward_func)]
    environment = ((ENVIRONMENT, 1.0),) if args.environment.env else ()
    return (*environment, *zip(names, args.scores.reward_weights or [1.0] * len(names)))


def ppo_options(args: PPOArguments, stop_ids: tuple[int, ...]):
    """The options of `trainer.methods.ppo`, from the flags."""
    flags = flat(args)
    advantages = AdvantageOptions(
        args.advantage.advantage_estimator,
        args.rollout.n_samples_per_prompt,
        args.advantage.gamma,
        args.advantage.lambd,
        not args.advantage.no_advantage_std_norm,
        args.advantage.advantage_batch_std,
        args.advantage.policy_lambd,
        args.advantage.policy_lambd_alpha,
        bool(args.kl.teacher),
    )
    check_names_in(POLICY_LOSSES, "--policy_loss", [args.advantage.policy_loss])
    policy = PolicyOptions(
        loss=args.advantage.policy_loss,
        loss_agg=args.advantage.loss_agg,
        temperature=args.rollout.temperature,
        eps_low=args.advantage.eps_clip,
        eps_high=args.advantage.eps_clip if args.advantage.eps_clip_high is None else args.advantage.eps_clip_high,
        dual_clip=args.advantage.dual_clip,
        kl_estimator=args.kl.kl_estimator if args.kl.use_kl_loss else None,
        kl_unbiased=args.kl.kl_unbiased,
        value_clip=args.critic.value_clip,
        sapo_temperatures=tuple(args.advantage.sapo_temperatures),
        kl_cov_coef=args.advantage.kl_cov_coef,
        off_policy_mask_threshold=args.advantage.off_policy_mask_threshold,
    )
    return PPOOptions(
        advantages=advantages,
        policy=policy,
        sampling=sampling_of(args, stop_ids),
        num_epochs=args.batch.max_epochs,
        kl_in_rewards=bool(args.kl.init_kl_coef) and not args.kl.use_kl_loss,
        mask_range=mask_range(args),
        cov_range=tuple(args.advantage.cov_range),
        mask_level=args.advantage.tis_mask_level or args.advantage.tis_level,
        rejected_leave=args.advantage.rejected_tokens == "leave",
        reward_clip_range=tuple(args.scores.reward_clip_range) if args.scores.reward_clip_range else None,
        filtering_range=filtering_range(args),
        reward_range=tuple(args.scores.reward_range) if args.scores.reward_range else None,
        rewards_apart=rewards_apart(args),
        max_logprob_diff=math.inf if args.rollout.rollouts_from else args.rollout.max_logprob_diff,
        num_episodes=args.rollout.num_episodes if args.rollout.dynamic_filtering and not args.batch.max_steps else None,
        **{name: flags[name] for name in SAME_NAMES.split()},
    )


def evaluation_of(args: PPOArguments, prompts, sampling: Sampling) -> Evaluation:
    """How `prompts` are evaluated. Length and stops are those of `sampling`."""
    flags, (_, right) = args.evaluation, args.scores.reward_range or WRONG_AND_RIGHT
    own = {"temperature": flags.eval_temperature, "top_p": flags.eval_top_p, "top_k": 0, "min_p": 0.0}
    sampling = dataclasses.replace(sampling, **own, keeps_sets=False)
    prompts = list(prompts)
    return Evaluation(prompts, sampling, flags.eval_samples, right, groups_of(prompts))
