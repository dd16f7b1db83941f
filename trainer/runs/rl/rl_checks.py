"""The flags of `train_ppo`: checks of their combinations, and the options of the algorithm that they give."""

import importlib.util
import os
from typing import Optional

from trainer.datasets.demos.demo_flags import PPO_DEFAULTS
from trainer.errors import UserError
from trainer.flags.parse_flags import flat
from trainer.flags.rl_flags import PPOArguments
from trainer.runs.rl.rl_options import engine_tp_size, reference_is_base
from trainer.runs.run_training import check_flags

CLIPPING = "ppo, gspo, gspo_token"  # policy losses that --dual_clip fits
EVAL_METRICS = ("eval_reward", "eval_pass_at_1", "eval_response_length")


def refuse_idle(args, rules: list[tuple[str, bool, str]], usual: Optional[dict] = None) -> None:
    """Raise UserError for a flag that would do nothing here.

    `rules` are (names of flags, whether they do something, what they need for it). Default values and the values in
    `usual` are never refused.
    """
    flags, defaults = flat(args), flat(type(args)())
    for names, at_work, needed in rules:
        for name in [] if at_work else names.split():
            if flags[name] not in (defaults[name], (usual or {}).get(name)):
                raise UserError(f"--{name}", f"{flags[name]} would do nothing here", needed)


def validate(args: PPOArguments) -> None:
    """Raise UserError for flags that contradict each other or would do nothing."""
    from trainer.models.losses.policy_loss import POLICY_LOSSES

    if args.advantage.policy_loss not in POLICY_LOSSES:
        raise UserError("--policy_loss", args.advantage.policy_loss, ", ".join(POLICY_LOSSES))
    check_flags("train_ppo", args, EVAL_METRICS, usual=PPO_DEFAULTS)
    if args.rollout.stop and not all(args.rollout.stop):
        raise UserError("--stop", "an empty text, which would end every response", "texts with one character or more")
    if args.layout.layout == "auto":  # the plan knows one model, and no rollouts
        raise UserError("--layout", "auto with train_ppo", "flags of the layout")
    if args.lora.load_in_4bit:  # the engine would need unquantized weights
        raise UserError("--load_in_4bit", "with train_ppo", "leave it out")
    if args.lora.lora_experts:  # the engine would need merged experts
        raise UserError("--lora_experts", "with train_ppo", "leave it out")
    if args.lora.lora_dropout:  # the ratio of policies would not be 1 on the first update
        raise UserError("--lora_dropout", f"{args.lora.lora_dropout:g} with train_ppo", "0")
    if args.rollout.top_p > 1:
        raise UserError("--top_p", f"{args.rollout.top_p:g}", "above 0, up to 1")
    if args.model.param_dtype == "fp16":
        raise UserError("--param_dtype", "fp16 with train_ppo", "bf16, fp32")
    _validate_engine(args)
    _validate_staleness(args)
    if args.rollout.curriculum != "none" and args.rollout.num_episodes == 1 and not args.batch.max_steps:
        raise UserError("--curriculum", "with one pass over the prompts", "--num_episodes 2, or --max_steps")
    _validate_routing_replay(args)
    _validate_shared_prompts(args)
    _validate_rewards(args)
    _validate_algorithm(args)
    _validate_critic(args)
    _validate_offload(args)
    _refuse_idle(args)


def _refuse_idle(args: PPOArguments) -> None:
    estimator = args.advantage.advantage_estimator
    rules = [
        ("lambd critic_learning_rate", estimator == "gae", "--advantage_estimator gae"),
        (
            "no_advantage_std_norm",
            estimator not in ("rloo", "dr_grpo", "distill"),
            "an estimator with a standard deviation",
        ),
        ("gamma", estimator != "distill", "an estimator that adds up rewards"),
        (
            "eps_clip eps_clip_high",
            args.advantage.policy_loss not in ("reinforce", "sapo"),
            f"--policy_loss {CLIPPING}, cispo",
        ),
        ("sapo_temperatures", args.advantage.policy_loss == "sapo", "--policy_loss sapo"),
        ("advantage_batch_std", estimator == "group_norm", "--advantage_estimator group_norm"),
        ("rollout_kl_estimator", args.advantage.rollout_kl_max is not None, "--rollout_kl_max"),
        ("kl_estimator", bool(args.kl.init_kl_coef), "--init_kl_coef above 0"),
        ("kl_unbiased", args.kl.use_kl_loss and args.kl.kl_estimator == "k3", "--use_kl_loss with --kl_estimator k3"),
        ("kl_horizon", args.kl.kl_target is not None, "--kl_target"),
        ("partial_rollouts", bool(args.rollout.max_staleness), "--max_staleness above 0"),
        ("curriculum", not args.rollout.rollouts_from, "rollouts of its own, not --rollouts_from"),
        ("dynamic_filtering_range", args.rollout.dynamic_filtering, "--dynamic_filtering"),
        ("tis_level tis_mask", args.advantage.tis_cap is not None, "--tis_cap"),
        ("overlong_penalty_factor", bool(args.scores.overlong_buffer_len), "--overlong_buffer_len"),
        ("reward_timeout", bool(args.scores.reward_func), "--reward_func"),
        ("env_max_turns env_timeout env_concurrency env_sandbox", bool(args.environment.env), "--env"),
        ("env_memory_mb", args.environment.env_sandbox, "--env_sandbox"),
        ("remote_rm_timeout remote_rm_retries remote_rm_api_key", bool(args.scores.remote_rm_url), "--remote_rm_url"),
    ]
    refuse_idle(args, rules, usual=PPO_DEFAULTS)


def _validate_offload(args: PPOArguments) -> None:
    while_generating = {
        "--offload_critic": args.critic.offload_critic,
        "--offload_actor_optimizer": args.rollout.offload_actor_optimizer,
    }
    for flag, value in while_generating.items():
        if value and args.layout.adam_offload:
            raise UserError(
                flag, "with --adam_offload, which always keeps optimizer states in host memory", "one of them"
            )
        if value and args.rollout.rollouts_from and not args.data.eval_dataset:
            raise UserError(flag, "with --rollouts_from, which generates nothing", "leave it out")
    if args.kl.offload_ref and reference_is_base(args):
        raise UserError(
            "--offload_ref", "with --lora_rank: the reference is the policy without its adapter", "leave it out"
        )
    if args.scores.offload_reward and not args.scores.reward_pretrain:
        raise UserError("--offload_reward", "without --reward_pretrain", "leave it out")


def _validate_engine(args: PPOArguments) -> None:
    share, flag = args.rollout.vllm_gpu_memory_utilization, "--vllm_gpu_memory_utilization"
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.rollout.engine_tensor_parallel_size and args.rollout.rollout_engine != "vllm":
        allowed = "vllm; a server has --tensor_parallel_size of serve_engine"
        raise UserError(
            "--engine_tensor_parallel_size", f"with --rollout_engine {args.rollout.rollout_engine}", allowed
        )
    if args.rollout.rollout_engine != "vllm" and share is not None:
        raise UserError(flag, f"with --rollout_engine {args.rollout.rollout_engine}", "vllm")
    if (args.rollout.rollout_engine == "vllm_server") != bool(args.rollout.engine_urls):
        found = f"{args.rollout.engine_urls or 'missing'} with --rollout_engine {args.rollout.rollout_engine}"
        raise UserError("--engine_urls", found, "addresses of serve_engine, with --rollout_engine vllm_server")
    if args.rollout.rollout_engine == "vllm_server":
        _validate_servers(args)
    if args.rollout.rollout_engine == "hf":
        return
    if args.rollout.temperature < 0.01:  # vLLM silently raises it, and log-probs would have another temperature
        found = f"{args.rollout.temperature:g} with --rollout_engine {args.rollout.rollout_engine}"
        raise UserError("--temperature", found, "0.01 or more")
    if args.rollout.rollout_engine == "vllm_server":
        return
    if importlib.util.find_spec("vllm") is None:
        raise UserError("--rollout_engine", "vllm is not installed", "hf; or pip install -e '.[vllm]'")
    if ranks % engine_tp_size(args):
        found = f"{engine_tp_size(args)} for {ranks} ranks"
        raise UserError("--engine_tensor_parallel_size", found, "a divisor of the number of ranks")
    if share is not None and share >= 1:
        raise UserError(flag, f"{share:g}", "below 1")
    if (args.rollout.top_p < 1 or args.rollout.min_p) and not args.rollout.top_k:
        flag = "--top_p" if args.rollout.top_p < 1 else "--min_p"
        raise UserError(flag, "with vllm and without --top_k: its sets must have a limit", "--top_k too, such as 1000")


def _validate_servers(args: PPOArguments) -> None:
    for flag, value in (
        ("--top_p", args.rollout.top_p < 1),
        ("--top_k", args.rollout.top_k),
        ("--min_p", args.rollout.min_p),
    ):
        if value:
            raise UserError(flag, "with --rollout_engine vllm_server, which does not send the sets", "hf, vllm")
    urls, ranks = args.rollout.engine_urls.split(","), int(os.environ.get("WORLD_SIZE", 1))
    for url in urls:
        if not url.strip().startswith(("http://", "https://")):
            raise UserError("--engine_urls", url, "http://HOST:PORT, comma-separated")
    if len(urls) > ranks:
        raise UserError("--engine_urls", f"{len(urls)} for {ranks} ranks", "up to one for each rank")
    if args.rollout.max_staleness and len(urls) != ranks:  # ranks that share a server would change each other's weights
        found = f"{len(urls)} for {ranks} ranks with --max_staleness {args.rollout.max_staleness}"
        raise UserError("--engine_urls", found, "one for each rank")


def _validate_staleness(args: PPOArguments) -> None:
    if not args.rollout.max_staleness:
        return
    others = {
        "--rollout_engine vllm": args.rollout.rollout_engine
        == "vllm",  # its ranks communicate, and it draws random numbers
        "--rollouts_from": args.rollout.rollouts_from,
        "--dynamic_filtering": args.rollout.dynamic_filtering,  # the next prompts would depend on scores
        "--curriculum": args.rollout.curriculum != "none",
        "--offload_actor_optimizer": args.rollout.offload_actor_optimizer,
        "--offload_critic": args.critic.offload_critic,
        "--verify_resume": args.checkpoint.verify_resume,  # a second run has other versions
    }
    for other in (flag for flag, value in others.items() if value):
        raise UserError("--max_staleness", f"{args.rollout.max_staleness} with {other}", "0")
    if args.advantage.tis_cap is None:
        found = f"missing with --max_staleness {args.rollout.max_staleness}: older weights draw other tokens"
        raise UserError("--tis_cap", found, "a largest weight, such as 2")
    # a stop text may begin before an interruption; experts of a prefix would be those of newer weights
    for other, value in {"--stop": args.rollout.stop, "--routing_replay": args.rollout.routing_replay}.items():
        if args.rollout.partial_rollouts and value:
            raise UserError("--partial_rollouts", f"with {other}", "one of them")


def _validate_routing_replay(args: PPOArguments) -> None:
    others = {
        f"--rollout_engine {args.rollout.rollout_engine}": args.rollout.rollout_engine
        != "hf",  # only this engine records experts
        "--env": args.environment.env,  # experts of the tokens of an environment would come from another turn
        "--aux_loss_coef": args.experts.aux_loss_coef,  # its loads are those of the experts that the router itself prefers
        "--sequence_parallel": args.layout.sequence_parallel,
        "--compile": args.model.compile,
    }
    for other in (flag for flag, value in others.items() if value and args.rollout.routing_replay):
        raise UserError("--routing_replay", f"with {other}", "one of them")


def _validate_shared_prompts(args: PPOArguments) -> None:
    others = {
        "--n_samples_per_prompt 1": args.rollout.n_samples_per_prompt == 1,
        "--packing_samples": args.batch.packing_samples,
        "--max_tokens_per_micro_batch": args.batch.max_tokens_per_micro_batch,
        "--ring_attn_size": args.layout.ring_attn_size > 1,
        "--sequence_parallel": args.layout.sequence_parallel,
        f"--attn_implementation {args.model.attn_implementation}": args.model.attn_implementation
        not in ("auto", "sdpa"),
        "--advantage_estimator gae": args.advantage.advantage_estimator
        == "gae",  # critics and reward models read rows of one answer
        "--reward_pretrain": args.scores.reward_pretrain,
        "--routing_replay": args.rollout.routing_replay,
        "--aux_loss_coef": args.experts.aux_loss_coef,  # tokens of a prompt count once for each answer
    }
    for other in (flag for flag, value in others.items() if value and args.rollout.share_prompts):
        raise UserError("--share_prompts", f"with {other}", "one of them")


def _validate_rewards(args: PPOArguments) -> None:
    from trainer.rollout.rewards.reward_functions import needs_labels

    sources = {
        "--reward_func": args.scores.reward_func,
        "--reward_pretrain": args.scores.reward_pretrain,
        "--remote_rm_url": args.scores.remote_rm_url,
        "--env": args.environment.env,
    }
    given = [flag for flag, value in sources.items() if value]
    if len(given) > 1:
        raise UserError(given[1], f"with {given[0]}", "one source of rewards")
    if not given and not args.kl.teacher and (not args.rollout.rollouts_from or args.data.eval_dataset):
        raise UserError(
            "--reward_func", "missing", "math, exact_match, a Python file; or " + ", ".join(list(sources)[1:])
        )
    if args.environment.env:
        from trainer.rollout.envs.environments import load_environment

        load_environment(args.environment.env)
    if needs_labels(args.scores.reward_func) and not args.prompts.label_key:
        raise UserError(
            "--label_key", f"missing with --reward_func {args.scores.reward_func}", "the column of the answers"
        )
    if args.scores.remote_rm_url:
        from trainer.rollout.rewards.remote_rewards import read_key, split_urls

        split_urls(args.scores.remote_rm_url)
        if args.scores.remote_rm_api_key:
            read_key("--remote_rm_api_key", args.scores.remote_rm_api_key)
    if args.scores.reward_weights is not None:
        count = len((args.scores.reward_pretrain or args.scores.reward_func or "").split(",")) * (
            not (args.scores.remote_rm_url or args.environment.env)
        )
        if len(args.scores.reward_weights) != count:
            found = f"{len(args.scores.reward_weights)} for {count} --reward_func or --reward_pretrain"
            raise UserError("--reward_weights", found, "one each")
    if args.scores.reward_pretrain and args.layout.sequence_parallel:
        raise UserError("--sequence_parallel", "with a reward model: its head scores whole sequences", "leave it out")
    if args.scores.reward_clip_range and args.scores.reward_clip_range[0] >= args.scores.reward_clip_range[1]:
        raise UserError("--reward_clip_range", str(args.scores.reward_clip_range), "a lower and a higher bound")
    if args.scores.overlong_buffer_len >= args.rollout.generate_max_len:
        found = f"{args.scores.overlong_buffer_len} with --generate_max_len {args.rollout.generate_max_len}"
        raise UserError("--overlong_buffer_len", found, "less than --generate_max_len")


def _validate_algorithm(args: PPOArguments) -> None:
    from trainer.methods.advantages import GROUP_ESTIMATORS

    if args.advantage.advantage_estimator in GROUP_ESTIMATORS and args.rollout.n_samples_per_prompt < 2:
        found = (
            f"1 with --advantage_estimator {args.advantage.advantage_estimator}, which compares responses to one prompt"
        )
        raise UserError("--n_samples_per_prompt", found, "2 or more")
    if args.rollout.dynamic_filtering and args.rollout.n_samples_per_prompt < 2:
        raise UserError("--n_samples_per_prompt", "1 with --dynamic_filtering", "2 or more")
    if args.rollout.dynamic_filtering and args.rollout.rollouts_from:
        raise UserError("--dynamic_filtering", "with --rollouts_from", "one of them")
    if args.rollout.dynamic_filtering_range[0] >= args.rollout.dynamic_filtering_range[1]:
        raise UserError(
            "--dynamic_filtering_range", str(args.rollout.dynamic_filtering_range), "a lower and a higher bound"
        )
    if args.advantage.dual_clip is not None and (
        args.advantage.dual_clip <= 1 or args.advantage.policy_loss not in CLIPPING.split(", ")
    ):
        found = f"{args.advantage.dual_clip} with --policy_loss {args.advantage.policy_loss}"
        raise UserError("--dual_clip", found, f"above 1, with {CLIPPING}")
    if min(args.advantage.sapo_temperatures) <= 0:
        raise UserError("--sapo_temperatures", str(args.advantage.sapo_temperatures), "numbers above 0")
    if args.advantage.advantage_batch_std and args.advantage.no_advantage_std_norm:
        raise UserError("--advantage_batch_std", "with --no_advantage_std_norm", "one of them")
    if args.advantage.tis_mask and args.advantage.tis_cap is not None and args.advantage.tis_cap <= 1:
        raise UserError(
            "--tis_cap", f"{args.advantage.tis_cap:g} with --tis_mask, which would keep no weight", "above 1"
        )
    if not args.kl.init_kl_coef:
        needing = {
            "--use_kl_loss": args.kl.use_kl_loss,
            "--kl_target": args.kl.kl_target,
            "--ref_model": args.kl.ref_model,
        }
        needing |= {"--offload_ref": args.kl.offload_ref, "--kl_in_score": args.kl.kl_in_score}
        for flag, value in needing.items():
            if value:
                raise UserError(flag, "with --init_kl_coef 0, which means no reference", "--init_kl_coef above 0")
    if args.kl.use_kl_loss and args.kl.kl_in_score:
        raise UserError("--kl_in_score", "with --use_kl_loss", "one of them")
    if args.kl.use_kl_loss and args.kl.kl_estimator == "k1":
        raise UserError("--kl_estimator", "k1 with --use_kl_loss: its gradient is zero on average", "k2, k3")


def _validate_critic(args: PPOArguments) -> None:
    has_critic = args.advantage.advantage_estimator == "gae"
    if has_critic and args.layout.sequence_parallel:
        raise UserError("--sequence_parallel", "with a critic: its head needs whole sequences", "leave it out")
    needing = {
        "--critic_pretrain": args.critic.critic_pretrain,
        "--offload_critic": args.critic.offload_critic,
        "--value_clip": args.critic.value_clip,
        "--freezing_actor_steps": args.critic.freezing_actor_steps,
    }
    for flag, value in needing.items():
        if value and not has_critic:
            raise UserError(flag, f"with --advantage_estimator {args.advantage.advantage_estimator}", "gae")


def refuse_with_images(args: PPOArguments) -> None:
    """Raise UserError for flags of train_ppo that do not work with images."""
    refused = [
        ("--rollout_engine", args.rollout.rollout_engine == "vllm_server", "hf, vllm"),
        ("--engine_tensor_parallel_size", args.rollout.rollout_engine == "vllm" and engine_tp_size(args) > 1, "1"),
        (
            "--advantage_estimator",
            args.advantage.advantage_estimator == "gae",
            "one without a critic, such as group_norm",
        ),
        ("--reward_pretrain", bool(args.scores.reward_pretrain), "--reward_func or --remote_rm_url"),
        ("--ref_model", bool(args.kl.ref_model), "leave it out: the reference is --pretrain"),
        ("--env", bool(args.environment.env), "leave it out"),
        ("--max_staleness", bool(args.rollout.max_staleness), "0"),
        ("--routing_replay", args.rollout.routing_replay, "leave it out"),
        ("--share_prompts", args.rollout.share_prompts, "leave it out"),
    ]
    for flag, used, allowed in refused:
        if used:
            raise UserError(flag, "with rows that have images", allowed)
