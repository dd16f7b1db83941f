"""Checks of the flags of a run of RL: the table of rules, then single values, packages, files and addresses."""

import importlib.util
import math
import os
from collections.abc import Sequence
from urllib.parse import urlsplit

from trainer.comma_separated import names_in, names_to_check
from trainer.datasets.shapes.references import lack_references
from trainer.errors import UserError
from trainer.flags.data_rules import has_evaluation
from trainer.flags.generating_flags import OnlineDPOArguments
from trainer.flags.parse_flags import check_given, parse_arguments
from trainer.flags.rl_flags import (
    EnvironmentArguments,
    EvaluationArguments,
    PPOArguments,
    RolloutArguments,
    RolloutRunArguments,
    ScoreArguments,
)
from trainer.rollout.envs.container import words_of
from trainer.rollout.envs.environments import read_sources
from trainer.rollout.rewards.judge import (
    FLAG,
    JudgeOptions,
    key_of_environment,
    read_request,
    read_rubric,
    rewards_need_labels,
)
from trainer.rollout.rewards.remote_rewards import read_key, split_urls
from trainer.rollout.rewards.reward_functions import JUDGE, check_file
from trainer.rollout.shares import sizes_of_pass
from trainer.runs.flag_checks import check_flags


def validate(args: PPOArguments, is_demo: bool = False) -> None:
    """Raise UserError for flags that no run could have."""
    check_flags("train_ppo", args, eval_metrics(args.evaluation), is_demo=is_demo, **facts_of_rollouts(args))
    if args.advantage.dual_clip is not None and args.advantage.dual_clip <= 1:
        raise UserError("--dual_clip", f"{args.advantage.dual_clip:g}", "above 1")
    if min(args.advantage.sapo_temperatures) <= 0:
        raise UserError("--sapo_temperatures", str(args.advantage.sapo_temperatures), "numbers above 0")
    check_bounds("--tis_mask_range", args.advantage.tis_mask_range)
    check_bounds("--cov_range", args.advantage.cov_range)
    check_rollouts(args.rollout)
    check_batch(args.batch.train_batch_size, args.rollout, args.rollout.n_samples_per_prompt)
    only_teacher = args.advantage.advantage_estimator == "distill"
    has_other_scores = only_teacher or (args.rollout.rollouts_from and not has_evaluation(args.data))
    check_rewards(args.scores, args.environment, needs_source=not has_other_scores)


def eval_metrics(evaluation: EvaluationArguments) -> tuple[str, ...]:
    """The metrics that may choose the best checkpoint. Raises UserError for a value that no evaluation could have."""
    if evaluation.eval_top_p > 1:
        raise UserError("--eval_top_p", f"{evaluation.eval_top_p:g}", "above 0, up to 1")
    passes = [f"eval_pass_at_{k}" for k in sizes_of_pass(evaluation.eval_samples)]
    return ("eval_reward", *passes, "eval_response_length")


def facts_of_rollouts(args: RolloutRunArguments) -> dict:
    """What the table of rules may know before the run starts."""
    scores, data = args.scores, args.data
    compares = rewards_need_labels(scores.reward_func, scores.judge_rubric, scores.judge_mode)
    return {
        "num_ranks": int(os.environ.get("WORLD_SIZE", 1)),
        "needs_labels": compares and lack_references(data.dataset or data.eval_dataset),
    }


def check_rollouts(rollout: RolloutArguments) -> None:
    """Raise UserError for a value that no rollout could have, for a wrong address, or if vLLM is not installed."""
    if rollout.stop and not all(rollout.stop):
        raise UserError("--stop", "an empty text, which would end every response", "texts with one character or more")
    if rollout.top_p > 1:
        raise UserError("--top_p", f"{rollout.top_p:g}", "above 0, up to 1")
    check_bounds("--dynamic_filtering_range", rollout.dynamic_filtering_range)
    share = rollout.vllm_gpu_memory_utilization
    if share is not None and share >= 1:
        raise UserError("--vllm_gpu_memory_utilization", f"{share:g}", "below 1")
    check_engine_urls(names_to_check(rollout.engine_urls or None))
    if rollout.rollout_engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError("--rollout_engine", "vllm is not installed", "hf; or pip install -e '.[vllm]'")


def check_engine_urls(urls: Sequence[str]) -> None:
    """Raise UserError for what is no address of a server, and for two that are one. A server takes one sync at a time."""
    known: dict[tuple, str] = {}
    for url in urls:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            host = None
        if not host:
            raise UserError("--engine_urls", url, "http://HOST:PORT, comma-separated")
        place = ("127.0.0.1" if host == "localhost" else host, port, parts.path.rstrip("/"))
        if place in known:
            raise UserError("--engine_urls", f"{known[place]} and {url} are one server", "each server once")
        known[place] = url


def check_batch(train_batch_size: int, rollout: RolloutArguments, per_prompt: int, unit: str = "responses") -> None:
    """Raise UserError if no rollout fills an optimizer step. Recorded rollouts have sizes of their own."""
    most = rollout.rollout_batch_size * per_prompt
    if train_batch_size > most and not rollout.rollouts_from:
        found = f"{train_batch_size}, but a rollout has {most} {unit}"
        raise UserError("--train_batch_size", found, f"up to {most}, or larger rollouts")


def check_rewards(scores: ScoreArguments, environment: EnvironmentArguments, needs_source: bool) -> None:
    """Raise UserError if scores are needed and nothing gives them, or if their code, address or key is wrong."""
    if needs_source and not (
        names_in(scores.reward_func) or scores.reward_pretrain or scores.remote_rm_url or environment.env
    ):
        others = "--reward_pretrain, --remote_rm_url, --env"
        raise UserError("--reward_func", "missing", f"math, exact_match, a Python file; or {others}")
    if environment.env:
        sources = read_sources(environment.env, environment.env_args, bool(environment.env_key))
        if environment.env_container:
            words_of(environment.env_container)
        # a sandbox loads its code itself
        for source in sources.values() if not (environment.env_sandbox or environment.env_container) else ():
            source.check()
    if scores.remote_rm_url:
        split_urls(scores.remote_rm_url)
        if scores.remote_rm_api_key:
            read_key("--remote_rm_api_key", scores.remote_rm_api_key)
    if JUDGE in names_in(scores.reward_func):
        judge_options(scores)
    check_bounds("--reward_range", scores.reward_range)
    check_bounds("--reward_clip_range", scores.reward_clip_range)
    for name in names_in(scores.reward_func):
        check_file(name)


def judge_options(scores: ScoreArguments) -> JudgeOptions:
    """What the judge of --reward_func is asked. Raises UserError for a wrong address, rubric, key or number."""
    if len(split_urls(scores.judge_url, FLAG)) > 1:
        raise UserError(FLAG, scores.judge_url, "one address")
    check_bounds("--judge_range", scores.judge_range)
    return JudgeOptions(
        scores.judge_url,
        scores.judge_model,
        read_rubric(scores.judge_rubric, scores.judge_mode),
        tuple(scores.judge_range),
        read_request(scores.judge_args),
        key_of_environment(scores.judge_key_env),
        scores.judge_timeout,
        scores.judge_retries,
        scores.judge_concurrency,
        scores.judge_cache,
        scores.judge_mode,
    )


def check_bounds(flag: str, bounds: list[float] | None) -> None:
    """Raise UserError if the first bound is not below the second, or one is not finite."""
    if bounds and not -math.inf < bounds[0] < bounds[1] < math.inf:
        raise UserError(flag, f"{bounds[0]:g} {bounds[1]:g}", "a lower and a higher bound")


def parse_online(argv: list[str]) -> OnlineDPOArguments:
    """The flags of `train_dpo --online`."""
    args = parse_arguments(OnlineDPOArguments, "train_dpo --online", argv)
    check_given(args, ("pretrain", "dataset"), "; --online has no demo")
    return args


def check_online(argv: list[str]) -> OnlineDPOArguments:
    """`parse_online`, and the checks that need no torch. Raises UserError for flags that do not go together."""
    args = parse_online(argv)
    if not args.preference.online:
        raise UserError("--online", "false", "leave it out")
    check_flags("train_dpo --online", args, eval_metrics(args.evaluation), **facts_of_rollouts(args))
    check_rollouts(args.rollout)
    check_batch(args.batch.train_batch_size, args.rollout, 1, "pairs")
    has_other_scores = args.rollout.rollouts_from and not has_evaluation(args.data)
    check_rewards(args.scores, args.environment, needs_source=not has_other_scores)
    return args
