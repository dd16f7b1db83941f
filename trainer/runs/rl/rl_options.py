"""The flags of `train_ppo`: checks of their combinations, and the options of the algorithm that they give."""

import importlib.util
import os

from trainer.datasets.demos.demo_flags import PPO_DEFAULTS
from trainer.errors import UserError
from trainer.flags.rl_flags import PPOArguments
from trainer.runs import run_training

CLIPPING = "ppo, gspo, gspo_token"  # policy losses that --dual_clip fits
EVAL_METRICS = ("eval_reward", "eval_pass_at_1", "eval_response_length")


def demo_defaults() -> dict:
    return {**PPO_DEFAULTS, "dataset": "prompts.jsonl", "eval_dataset": "prompts_eval.jsonl", "pretrain": "model"}


def validate(args: PPOArguments) -> None:
    """Raise UserError for flags that contradict each other or would do nothing."""
    from trainer.models.losses.policy_loss import POLICY_LOSSES

    if args.policy_loss not in POLICY_LOSSES:
        raise UserError("--policy_loss", args.policy_loss, ", ".join(POLICY_LOSSES))
    run_training.validate_shared(args, EVAL_METRICS)
    if args.stop and not all(args.stop):
        raise UserError("--stop", "an empty text, which would end every response", "texts with one character or more")
    if args.layout == "auto":  # the plan knows one model, and no rollouts
        raise UserError("--layout", "auto with train_ppo", "flags of the layout")
    if args.load_in_4bit:  # the engine would need unquantized weights
        raise UserError("--load_in_4bit", "with train_ppo", "leave it out")
    if args.lora_experts:  # the engine would need merged experts
        raise UserError("--lora_experts", "with train_ppo", "leave it out")
    if args.lora_dropout:  # the ratio of policies would not be 1 on the first update
        raise UserError("--lora_dropout", f"{args.lora_dropout:g} with train_ppo", "0")
    if args.top_p > 1:
        raise UserError("--top_p", f"{args.top_p:g}", "above 0, up to 1")
    if args.param_dtype == "fp16":
        raise UserError("--param_dtype", "fp16 with train_ppo", "bf16, fp32")
    _validate_engine(args)
    _validate_staleness(args)
    if args.curriculum != "none" and args.num_episodes == 1 and not args.max_steps:
        raise UserError("--curriculum", "with one pass over the prompts", "--num_episodes 2, or --max_steps")
    _validate_routing_replay(args)
    _validate_shared_prompts(args)
    _validate_rewards(args)
    _validate_algorithm(args)
    _validate_critic(args)
    _validate_offload(args)
    _refuse_idle(args)


def _refuse_idle(args: PPOArguments) -> None:
    estimator = args.advantage_estimator
    rules = [
        ("lambd critic_learning_rate", estimator == "gae", "--advantage_estimator gae"),
        (
            "no_advantage_std_norm",
            estimator not in ("rloo", "dr_grpo", "distill"),
            "an estimator with a standard deviation",
        ),
        ("gamma", estimator != "distill", "an estimator that adds up rewards"),
        ("eps_clip eps_clip_high", args.policy_loss not in ("reinforce", "sapo"), f"--policy_loss {CLIPPING}, cispo"),
        ("sapo_temperatures", args.policy_loss == "sapo", "--policy_loss sapo"),
        ("advantage_batch_std", estimator == "group_norm", "--advantage_estimator group_norm"),
        ("rollout_kl_estimator", args.rollout_kl_max is not None, "--rollout_kl_max"),
        ("kl_estimator", bool(args.init_kl_coef), "--init_kl_coef above 0"),
        ("kl_unbiased", args.use_kl_loss and args.kl_estimator == "k3", "--use_kl_loss with --kl_estimator k3"),
        ("kl_horizon", args.kl_target is not None, "--kl_target"),
        ("partial_rollouts", bool(args.max_staleness), "--max_staleness above 0"),
        ("curriculum", not args.rollouts_from, "rollouts of its own, not --rollouts_from"),
        ("dynamic_filtering_range", args.dynamic_filtering, "--dynamic_filtering"),
        ("tis_level tis_mask", args.tis_cap is not None, "--tis_cap"),
        ("overlong_penalty_factor", bool(args.overlong_buffer_len), "--overlong_buffer_len"),
        ("reward_timeout", bool(args.reward_func), "--reward_func"),
        ("env_max_turns env_timeout env_concurrency env_sandbox", bool(args.env), "--env"),
        ("env_memory_mb", args.env_sandbox, "--env_sandbox"),
        ("remote_rm_timeout remote_rm_retries remote_rm_api_key", bool(args.remote_rm_url), "--remote_rm_url"),
    ]
    run_training.refuse_idle(args, rules, usual=PPO_DEFAULTS)


def reference_is_base(args: PPOArguments) -> bool:
    """Whether the reference is the policy with its adapter off, instead of a separate model."""
    return bool(args.lora_rank) and not args.ref_model


def _validate_offload(args: PPOArguments) -> None:
    while_generating = {
        "--offload_critic": args.offload_critic,
        "--offload_actor_optimizer": args.offload_actor_optimizer,
    }
    for flag, value in while_generating.items():
        if value and args.adam_offload:
            raise UserError(
                flag, "with --adam_offload, which always keeps optimizer states in host memory", "one of them"
            )
        if value and args.rollouts_from and not args.eval_dataset:
            raise UserError(flag, "with --rollouts_from, which generates nothing", "leave it out")
    if args.offload_ref and reference_is_base(args):
        raise UserError(
            "--offload_ref", "with --lora_rank: the reference is the policy without its adapter", "leave it out"
        )
    if args.offload_reward and not args.reward_pretrain:
        raise UserError("--offload_reward", "without --reward_pretrain", "leave it out")


def _validate_engine(args: PPOArguments) -> None:
    share, flag = args.vllm_gpu_memory_utilization, "--vllm_gpu_memory_utilization"
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.engine_tensor_parallel_size and args.rollout_engine != "vllm":
        allowed = "vllm; a server has --tensor_parallel_size of serve_engine"
        raise UserError("--engine_tensor_parallel_size", f"with --rollout_engine {args.rollout_engine}", allowed)
    if args.rollout_engine != "vllm" and share is not None:
        raise UserError(flag, f"with --rollout_engine {args.rollout_engine}", "vllm")
    if (args.rollout_engine == "vllm_server") != bool(args.engine_urls):
        found = f"{args.engine_urls or 'missing'} with --rollout_engine {args.rollout_engine}"
        raise UserError("--engine_urls", found, "addresses of serve_engine, with --rollout_engine vllm_server")
    if args.rollout_engine == "vllm_server":
        _validate_servers(args)
    if args.rollout_engine == "hf":
        return
    if args.temperature < 0.01:  # vLLM silently raises it, and log-probs would have another temperature
        found = f"{args.temperature:g} with --rollout_engine {args.rollout_engine}"
        raise UserError("--temperature", found, "0.01 or more")
    if args.rollout_engine == "vllm_server":
        return
    if importlib.util.find_spec("vllm") is None:
        raise UserError("--rollout_engine", "vllm is not installed", "hf; or pip install -e '.[vllm]'")
    if ranks % engine_tp_size(args):
        found = f"{engine_tp_size(args)} for {ranks} ranks"
        raise UserError("--engine_tensor_parallel_size", found, "a divisor of the number of ranks")
    if share is not None and share >= 1:
        raise UserError(flag, f"{share:g}", "below 1")
    if (args.top_p < 1 or args.min_p) and not args.top_k:
        flag = "--top_p" if args.top_p < 1 else "--min_p"
        raise UserError(flag, "with vllm and without --top_k: its sets must have a limit", "--top_k too, such as 1000")


def engine_tp_size(args: PPOArguments) -> int:
    """The ranks of an engine of --rollout_engine vllm."""
    return args.engine_tensor_parallel_size or args.tensor_parallel_size


def _validate_servers(args: PPOArguments) -> None:
    for flag, value in (("--top_p", args.top_p < 1), ("--top_k", args.top_k), ("--min_p", args.min_p)):
        if value:
            raise UserError(flag, "with --rollout_engine vllm_server, which does not send the sets", "hf, vllm")
    urls, ranks = args.engine_urls.split(","), int(os.environ.get("WORLD_SIZE", 1))
    for url in urls:
        if not url.strip().startswith(("http://", "https://")):
            raise UserError("--engine_urls", url, "http://HOST:PORT, comma-separated")
    if len(urls) > ranks:
        raise UserError("--engine_urls", f"{len(urls)} for {ranks} ranks", "up to one for each rank")
    if args.max_staleness and len(urls) != ranks:  # ranks that share a server would change each other's weights
        found = f"{len(urls)} for {ranks} ranks with --max_staleness {args.max_staleness}"
        raise UserError("--engine_urls", found, "one for each rank")


def _validate_staleness(args: PPOArguments) -> None:
    if not args.max_staleness:
        return
    others = {
        "--rollout_engine vllm": args.rollout_engine == "vllm",  # its ranks communicate, and it draws random numbers
        "--rollouts_from": args.rollouts_from,
        "--dynamic_filtering": args.dynamic_filtering,  # the next prompts would depend on scores
        "--curriculum": args.curriculum != "none",
        "--offload_actor_optimizer": args.offload_actor_optimizer,
        "--offload_critic": args.offload_critic,
        "--verify_resume": args.verify_resume,  # a second run has other versions
    }
    for other in (flag for flag, value in others.items() if value):
        raise UserError("--max_staleness", f"{args.max_staleness} with {other}", "0")
    if args.tis_cap is None:
        found = f"missing with --max_staleness {args.max_staleness}: older weights draw other tokens"
        raise UserError("--tis_cap", found, "a largest weight, such as 2")
    # a stop text may begin before an interruption; experts of a prefix would be those of newer weights
    for other, value in {"--stop": args.stop, "--routing_replay": args.routing_replay}.items():
        if args.partial_rollouts and value:
            raise UserError("--partial_rollouts", f"with {other}", "one of them")


def _validate_routing_replay(args: PPOArguments) -> None:
    others = {
        f"--rollout_engine {args.rollout_engine}": args.rollout_engine != "hf",  # only this engine records experts
        "--env": args.env,  # experts of the tokens of an environment would come from another turn
        "--aux_loss_coef": args.aux_loss_coef,  # its loads are those of the experts that the router itself prefers
        "--sequence_parallel": args.sequence_parallel,
        "--compile": args.compile,
    }
    for other in (flag for flag, value in others.items() if value and args.routing_replay):
        raise UserError("--routing_replay", f"with {other}", "one of them")


def _validate_shared_prompts(args: PPOArguments) -> None:
    others = {
        "--n_samples_per_prompt 1": args.n_samples_per_prompt == 1,
        "--packing_samples": args.packing_samples,
        "--max_tokens_per_micro_batch": args.max_tokens_per_micro_batch,
        "--ring_attn_size": args.ring_attn_size > 1,
        "--sequence_parallel": args.sequence_parallel,
        f"--attn_implementation {args.attn_implementation}": args.attn_implementation not in ("auto", "sdpa"),
        "--advantage_estimator gae": args.advantage_estimator
        == "gae",  # critics and reward models read rows of one answer
        "--reward_pretrain": args.reward_pretrain,
        "--routing_replay": args.routing_replay,
        "--aux_loss_coef": args.aux_loss_coef,  # tokens of a prompt count once for each answer
    }
    for other in (flag for flag, value in others.items() if value and args.share_prompts):
        raise UserError("--share_prompts", f"with {other}", "one of them")


def _validate_rewards(args: PPOArguments) -> None:
    from trainer.rollout.rewards.reward_functions import needs_labels

    sources = {
        "--reward_func": args.reward_func,
        "--reward_pretrain": args.reward_pretrain,
        "--remote_rm_url": args.remote_rm_url,
        "--env": args.env,
    }
    given = [flag for flag, value in sources.items() if value]
    if len(given) > 1:
        raise UserError(given[1], f"with {given[0]}", "one source of rewards")
    if not given and not args.teacher and (not args.rollouts_from or args.eval_dataset):
        raise UserError(
            "--reward_func", "missing", "math, exact_match, a Python file; or " + ", ".join(list(sources)[1:])
        )
    if args.env:
        from trainer.rollout.envs.environments import load_environment

        load_environment(args.env)
    if needs_labels(args.reward_func) and not args.label_key:
        raise UserError("--label_key", f"missing with --reward_func {args.reward_func}", "the column of the answers")
    if args.remote_rm_url:
        from trainer.rollout.rewards.remote_rewards import read_key, split_urls

        split_urls(args.remote_rm_url)
        if args.remote_rm_api_key:
            read_key("--remote_rm_api_key", args.remote_rm_api_key)
    if args.reward_weights is not None:
        count = len((args.reward_pretrain or args.reward_func or "").split(",")) * (
            not (args.remote_rm_url or args.env)
        )
        if len(args.reward_weights) != count:
            found = f"{len(args.reward_weights)} for {count} --reward_func or --reward_pretrain"
            raise UserError("--reward_weights", found, "one each")
    if args.reward_pretrain and args.sequence_parallel:
        raise UserError("--sequence_parallel", "with a reward model: its head scores whole sequences", "leave it out")
    if args.reward_clip_range and args.reward_clip_range[0] >= args.reward_clip_range[1]:
        raise UserError("--reward_clip_range", str(args.reward_clip_range), "a lower and a higher bound")
    if args.overlong_buffer_len >= args.generate_max_len:
        found = f"{args.overlong_buffer_len} with --generate_max_len {args.generate_max_len}"
        raise UserError("--overlong_buffer_len", found, "less than --generate_max_len")


def _validate_algorithm(args: PPOArguments) -> None:
    from trainer.methods.advantages import GROUP_ESTIMATORS

    if args.advantage_estimator in GROUP_ESTIMATORS and args.n_samples_per_prompt < 2:
        found = f"1 with --advantage_estimator {args.advantage_estimator}, which compares responses to one prompt"
        raise UserError("--n_samples_per_prompt", found, "2 or more")
    if args.dynamic_filtering and args.n_samples_per_prompt < 2:
        raise UserError("--n_samples_per_prompt", "1 with --dynamic_filtering", "2 or more")
    if args.dynamic_filtering and args.rollouts_from:
        raise UserError("--dynamic_filtering", "with --rollouts_from", "one of them")
    if args.dynamic_filtering_range[0] >= args.dynamic_filtering_range[1]:
        raise UserError("--dynamic_filtering_range", str(args.dynamic_filtering_range), "a lower and a higher bound")
    if args.dual_clip is not None and (args.dual_clip <= 1 or args.policy_loss not in CLIPPING.split(", ")):
        found = f"{args.dual_clip} with --policy_loss {args.policy_loss}"
        raise UserError("--dual_clip", found, f"above 1, with {CLIPPING}")
    if min(args.sapo_temperatures) <= 0:
        raise UserError("--sapo_temperatures", str(args.sapo_temperatures), "numbers above 0")
    if args.advantage_batch_std and args.no_advantage_std_norm:
        raise UserError("--advantage_batch_std", "with --no_advantage_std_norm", "one of them")
    if args.tis_mask and args.tis_cap is not None and args.tis_cap <= 1:
        raise UserError("--tis_cap", f"{args.tis_cap:g} with --tis_mask, which would keep no weight", "above 1")
    if not args.init_kl_coef:
        needing = {"--use_kl_loss": args.use_kl_loss, "--kl_target": args.kl_target, "--ref_model": args.ref_model}
        needing |= {"--offload_ref": args.offload_ref, "--kl_in_score": args.kl_in_score}
        for flag, value in needing.items():
            if value:
                raise UserError(flag, "with --init_kl_coef 0, which means no reference", "--init_kl_coef above 0")
    if args.use_kl_loss and args.kl_in_score:
        raise UserError("--kl_in_score", "with --use_kl_loss", "one of them")
    if args.use_kl_loss and args.kl_estimator == "k1":
        raise UserError("--kl_estimator", "k1 with --use_kl_loss: its gradient is zero on average", "k2, k3")


def _validate_critic(args: PPOArguments) -> None:
    has_critic = args.advantage_estimator == "gae"
    if has_critic and args.sequence_parallel:
        raise UserError("--sequence_parallel", "with a critic: its head needs whole sequences", "leave it out")
    needing = {
        "--critic_pretrain": args.critic_pretrain,
        "--offload_critic": args.offload_critic,
        "--value_clip": args.value_clip,
        "--freezing_actor_steps": args.freezing_actor_steps,
    }
    for flag, value in needing.items():
        if value and not has_critic:
            raise UserError(flag, f"with --advantage_estimator {args.advantage_estimator}", "gae")


def refuse_with_images(args: PPOArguments) -> None:
    """Raise UserError for flags of train_ppo that do not work with images."""
    refused = [
        ("--rollout_engine", args.rollout_engine == "vllm_server", "hf, vllm"),
        ("--engine_tensor_parallel_size", args.rollout_engine == "vllm" and engine_tp_size(args) > 1, "1"),
        ("--advantage_estimator", args.advantage_estimator == "gae", "one without a critic, such as group_norm"),
        ("--reward_pretrain", bool(args.reward_pretrain), "--reward_func or --remote_rm_url"),
        ("--ref_model", bool(args.ref_model), "leave it out: the reference is --pretrain"),
        ("--env", bool(args.env), "leave it out"),
        ("--max_staleness", bool(args.max_staleness), "0"),
        ("--routing_replay", args.routing_replay, "leave it out"),
        ("--share_prompts", args.share_prompts, "leave it out"),
    ]
    for flag, used, allowed in refused:
        if used:
            raise UserError(flag, "with rows that have images", allowed)


def sampling_of(args: PPOArguments, stop_ids: tuple[int, ...] = ()):
    from trainer.rollout.engines.sampling import Sampling

    truncation = {"top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}
    return Sampling(args.temperature, args.generate_max_len, stop_ids, tuple(args.stop or ()), **truncation)


def ppo_options(args: PPOArguments, stop_ids: tuple[int, ...]):
    """The options of `trainer.methods.ppo`, from the flags."""
    from trainer.methods.advantages import AdvantageOptions
    from trainer.methods.ppo_state import PPOOptions
    from trainer.models.losses.policy_loss import PolicyOptions

    advantages = AdvantageOptions(
        args.advantage_estimator,
        args.n_samples_per_prompt,
        args.gamma,
        args.lambd,
        not args.no_advantage_std_norm,
        args.advantage_batch_std,
    )
    policy = PolicyOptions(
        loss=args.policy_loss,
        loss_agg=args.loss_agg,
        temperature=args.temperature,
        eps_low=args.eps_clip,
        eps_high=args.eps_clip if args.eps_clip_high is None else args.eps_clip_high,
        dual_clip=args.dual_clip,
        entropy_coef=args.entropy_loss_coef,
        kl_estimator=args.kl_estimator if args.use_kl_loss else None,
        kl_unbiased=args.kl_unbiased,
        value_clip=args.value_clip,
        sapo_temperatures=tuple(args.sapo_temperatures),
    )
    return PPOOptions(
        advantages=advantages,
        policy=policy,
        sampling=sampling_of(args, stop_ids),
        seed=args.seed,
        num_epochs=args.max_epochs,
        kl_estimator=args.kl_estimator,
        kl_in_rewards=bool(args.init_kl_coef) and not args.use_kl_loss,
        kl_in_score=args.kl_in_score,
        kl_target=args.kl_target,
        kl_horizon=args.kl_horizon,
        tis_cap=args.tis_cap,
        tis_level=args.tis_level,
        tis_mask=args.tis_mask,
        rollout_kl_max=args.rollout_kl_max,
        rollout_kl_estimator=args.rollout_kl_estimator,
        normalize_reward=args.normalize_reward,
        reward_clip_range=tuple(args.reward_clip_range) if args.reward_clip_range else None,
        overlong_buffer_len=args.overlong_buffer_len,
        overlong_penalty_factor=args.overlong_penalty_factor,
        filtering_range=tuple(args.dynamic_filtering_range) if args.dynamic_filtering else None,
        num_episodes=args.num_episodes if args.dynamic_filtering and not args.max_steps else None,
        freezing_actor_steps=args.freezing_actor_steps,
    )
