"""Every rule for rollouts and RL, with flags that break it."""

import pytest

from trainer.flags.parse_flags import from_flat
from trainer.flags.rl_flags import PPOArguments
from trainer.flags.rl_rules import PPO_RULES
from trainer.flags.rollout_rules import ROLLOUT_RULES
from trainer.flags.rule import UNKNOWN, first_refusal
from trainer.flags.rules import COMMANDS

IMAGES = {"has_images": True}
SERVER = {"rollout_engine": "vllm_server", "engine_urls": "http://a,http://b"}
DRAFTS = {"rollout_engine": "vllm", "speculative_tokens": 4}
SGLANG = {**SERVER, "rollout_engine": "sglang"}
DISTILL = {"teacher": "t", "advantage_estimator": "distill", "ref_model": "t", "init_kl_coef": 1.0}
ROUTED = {**DISTILL, "teacher": "math=t,code=u", "teacher_key": "domain", "ref_model": "t,u"}
DISTANCE = {**DISTILL, "kd_loss": "kl"}
GROUP = {"advantage_estimator": "group_norm", "n_samples_per_prompt": 2}
JUDGED = {"reward_func": "judge", "judge_url": "http://a/v1", "judge_model": "m", "dataset": "d"}

# The start of the message, and the flags and facts, in the order of the tables
PPO_CASES = [
    ("--preset grpo with --teacher", {**DISTILL, "preset": "grpo"}),
    ("--preset opd without --teacher", {"preset": "opd"}),
    ("--teacher math=t,code=u without --teacher_key", {**DISTILL, "teacher": "math=t,code=u"}),
    ("--teacher_key domain without --teacher", {"teacher_key": "domain"}),
    ("--teacher_weights 0.5 0.5 with --teacher_key", {**ROUTED, "teacher_weights": [0.5, 0.5]}),
    ("--teacher_weights 1.0 with --teacher t,u", {**DISTILL, "teacher": "t,u", "teacher_weights": [1.0]}),
    ("--teacher_weights 1.0 2.0 with reinforcement", {**DISTILL, "teacher": "t,u", "teacher_weights": [1.0, 2.0]}),
    ("--teacher_weights 1.5 -0.5 with reinforcement", {**DISTILL, "teacher": "t,u", "teacher_weights": [1.5, -0.5]}),
    ("--teacher http://t with reinforcement learning", {**DISTILL, "teacher": "http://t", "ref_model": "http://t"}),
    ("--teacher t with --init_kl_coef 0", {**DISTILL, "init_kl_coef": 0.0}),
    ("--advantage_estimator distill without --teacher", {"advantage_estimator": "distill"}),
    ("--ref_model math=t,code=u with --teacher", {**ROUTED, "ref_model": "math=t,code=u"}),
    ("--kl_estimator k3 with --teacher", {**DISTILL, "kl_estimator": "k3"}),
    ("--use_kl_loss with --teacher", {**DISTILL, "use_kl_loss": True}),
    ("--dynamic_filtering with --advantage_estimator distill", {**DISTILL, "dynamic_filtering": True}),
    ("--kd_loss kl without --teacher", {"kd_loss": "kl"}),
    ("--kd_top_k 5 without --kd_loss", {**DISTILL, "kd_top_k": 5}),
    ("--kd_beta 0.3 with --kd_loss kl", {**DISTANCE, "kd_beta": 0.3}),
    (
        "--kd_loss kl with --advantage_estimator rloo",
        {**DISTANCE, "advantage_estimator": "rloo", "n_samples_per_prompt": 2},
    ),
    ("--kd_loss kl with --init_kl_coef 0.5", {**DISTANCE, "init_kl_coef": 0.5}),
    ("--preset opd with --kd_loss", {**DISTANCE, "preset": "opd"}),
    ("--tis_cap 2.0 with --kd_loss", {**DISTANCE, "tis_cap": 2.0}),
    ("--share_prompts with --kd_loss", {**DISTANCE, "share_prompts": True, "n_samples_per_prompt": 2}),
    ("--aux_loss_coef 0.1 with --kd_loss", {**DISTANCE, "aux_loss_coef": 0.1}),
    ("--advantage_estimator rloo with --n_samples_per_prompt 1", {"advantage_estimator": "rloo"}),
    ("--value_clip 0.2 with --advantage_estimator group_norm", {**GROUP, "value_clip": 0.2}),
    ("--critic_learning_rate 0.1 with --advantage_estimator group_norm", {**GROUP, "critic_learning_rate": 0.1}),
    ("--policy_lambd_alpha 0.05 with --policy_lambd 0.9", {"policy_lambd_alpha": 0.05, "policy_lambd": 0.9}),
    ("--sequence_parallel with --advantage_estimator gae", {"sequence_parallel": True}),
    (
        "--no_advantage_std_norm with --advantage_estimator rloo",
        {"advantage_estimator": "rloo", "no_advantage_std_norm": True},
    ),
    ("--advantage_batch_std with --advantage_estimator gae", {"advantage_batch_std": True}),
    (
        "--advantage_batch_std with --no_advantage_std_norm",
        {**GROUP, "advantage_batch_std": True, "no_advantage_std_norm": True},
    ),
    (
        "--kl_in_score with --advantage_estimator scalerl",
        {**GROUP, "advantage_estimator": "scalerl", "init_kl_coef": 0.1, "kl_in_score": True},
    ),
    (
        "--normalize_reward with --advantage_estimator maxrl",
        {**GROUP, "advantage_estimator": "maxrl", "normalize_reward": True},
    ),
    (
        "--advantage_estimator gdpo without several functions of --reward_func",
        {**GROUP, "advantage_estimator": "gdpo", "reward_func": "math", "label_key": "l"},
    ),
    (
        "--normalize_reward with --advantage_estimator gdpo",
        {**GROUP, "advantage_estimator": "gdpo", "reward_func": "a.py,b.py", "normalize_reward": True},
    ),
    ("--turn_rewards without --env", {"turn_rewards": True}),
    ("--turn_rewards with --advantage_estimator group_norm", {**GROUP, "turn_rewards": True, "env": "e.py"}),
    (
        "--normalize_reward with --turn_rewards",
        {"turn_rewards": True, "env": "e.py", "normalize_reward": True},
    ),
    ("--gamma 0.5 with --advantage_estimator distill", {**DISTILL, "gamma": 0.5}),
    ("--eps_clip 0.3 with --policy_loss reinforce", {"policy_loss": "reinforce", "eps_clip": 0.3}),
    ("--dual_clip 2.0 with --policy_loss cispo", {"policy_loss": "cispo", "dual_clip": 2.0}),
    ("--sapo_temperatures 1.0 2.0 with --policy_loss ppo", {"sapo_temperatures": [1.0, 2.0]}),
    ("--cov_share 0.1 with --policy_loss ppo", {"cov_share": 0.1}),
    ("--cov_range 0.0 2.0 with --policy_loss kl_cov", {"cov_range": [0.0, 2.0], "policy_loss": "kl_cov"}),
    ("--kl_cov_coef 2.0 with --policy_loss clip_cov", {"kl_cov_coef": 2.0, "policy_loss": "clip_cov"}),
    ("--entropy_coef_delta 0.1 without --entropy_target", {"entropy_coef_delta": 0.1}),
    (
        "--entropy_target 0.2 with --entropy_loss_coef 2.0",
        {"entropy_target": 0.2, "entropy_loss_coef": 2.0},
    ),
    ("--rollout_kl_max 0.1 with --bypass_mode", {"rollout_kl_max": 0.1, "bypass_mode": True}),
    ("--top_entropy_quantile 0.2 with --bypass_mode", {"top_entropy_quantile": 0.2, "bypass_mode": True}),
    ("--bypass_mode with --policy_loss reinforce", {"bypass_mode": True, "policy_loss": "reinforce"}),
    ("--tis_level sequence without --tis_cap", {"tis_level": "sequence"}),
    ("--tis_cap 1.0 with --tis_mask", {"tis_cap": 1.0, "tis_mask": True}),
    ("--tis_floor 3.0 with --tis_cap 2.0", {"tis_cap": 2.0, "tis_floor": 3.0}),
    ("--tis_mask_range 0.5 2.0 without --tis_mask", {"tis_cap": 2.0, "tis_mask_range": [0.5, 2.0]}),
    ("--rejected_tokens leave without --tis_mask, --rollout_kl_max", {"tis_cap": 2.0, "rejected_tokens": "leave"}),
    ("--rejected_tokens leave with --loss_agg prompt", {"loss_agg": "prompt", "rejected_tokens": "leave"}),
    ("--rollout_kl_estimator k1 without --rollout_kl_max", {"rollout_kl_estimator": "k1"}),
    ("--kl_estimator k2 with --init_kl_coef 0", {"kl_estimator": "k2"}),
    ("--kl_in_score with --use_kl_loss", {"init_kl_coef": 0.1, "kl_in_score": True, "use_kl_loss": True}),
    ("--use_kl_loss with --kl_estimator k1", {"init_kl_coef": 0.1, "use_kl_loss": True}),
    ("--kl_unbiased without --use_kl_loss and --kl_estimator k3", {"init_kl_coef": 0.1, "kl_unbiased": True}),
    ("--kl_horizon 5 without --kl_target", {"kl_horizon": 5}),
    ("--offload_ref with --lora_rank", {"init_kl_coef": 0.1, "offload_ref": True, "lora_rank": 4}),
    ("--share_prompts with --n_samples_per_prompt 1", {"share_prompts": True}),
    ("--share_prompts with --packing_samples", {"share_prompts": True, "packing_samples": True}),
    ("--share_prompts with --max_tokens_per_micro", {"share_prompts": True, "max_tokens_per_micro_batch": 99}),
    ("--share_prompts with --ring_attn_size 2", {"share_prompts": True, "ring_attn_size": 2}),
    ("--share_prompts with --sequence_parallel", {"share_prompts": True, "sequence_parallel": True}),
    ("--share_prompts with --attn_impl", {"share_prompts": True, "attn_implementation": "eager"}),
    ("--share_prompts with --advantage_estimator gae", {"share_prompts": True}),
    ("--share_prompts with --reward_pretrain", {"share_prompts": True, "reward_pretrain": "rm"}),
    ("--share_prompts with --routing_replay", {"share_prompts": True, "routing_replay": True}),
    ("--share_prompts with --aux_loss_coef", {"share_prompts": True, "aux_loss_coef": 0.1}),
    ("--rollout_engine vllm_server with rows that have images", IMAGES | SERVER),
    (
        "--rollout_engine vllm with rows that have images",
        IMAGES | {"rollout_engine": "vllm", "tensor_parallel_size": 2},
    ),
    ("--reward_pretrain rm with rows that have images", IMAGES | {"reward_pretrain": "rm"}),
    ("--ref_model r with rows that have images", IMAGES | {"ref_model": "r"}),
    ("--env e.py with rows that have images", IMAGES | {"env": "e.py"}),
    ("--max_staleness 1 with rows that have images", IMAGES | {"max_staleness": 1}),
    ("--routing_replay with rows that have images", IMAGES | {"routing_replay": True}),
    ("--speculative_tokens 4 with rows that have images", IMAGES | DRAFTS),
    ("--share_prompts with rows that have images", IMAGES | {"share_prompts": True}),
    ("--dataset d with --advantage_estimator gae", IMAGES | {"dataset": "d"}),
]

EVALUATED = {"eval_dataset": "e"}
STALE = {"max_staleness": 1, "tis_cap": 2.0}
ROLLOUT_CASES = [
    ("--layout auto with rollouts", {"layout": "auto"}),
    ("--load_in_4bit with rollouts", {"load_in_4bit": True}),
    ("--lora_experts with rollouts", {"lora_experts": True}),
    ("--lora_dropout 0.1 with rollouts", {"lora_dropout": 0.1}),
    ("--param_dtype fp16 with rollouts", {"param_dtype": "fp16"}),
    ("--sequence_parallel with --reward_pretrain", {"sequence_parallel": True, "reward_pretrain": "rm"}),
    ("--engine_tensor_parallel_size 2 with --rollout_engine hf", {"engine_tensor_parallel_size": 2}),
    ("--vllm_gpu_memory_utilization 0.4 with --rollout_engine hf", {"vllm_gpu_memory_utilization": 0.4}),
    ("--vllm_gpu_memory_utilization 0.4 on the CPU", {"vllm_gpu_memory_utilization": 0.4, "on_cpu": True}),
    ("--engine_urls http://a with --rollout_engine hf", {"engine_urls": "http://a"}),
    ("--engine_api_key k without --engine_urls", {"engine_api_key": "k"}),
    ("--sync_deltas without --engine_urls", {"sync_deltas": True}),
    ("--sync_deltas with --rollout_engine sglang", {**SGLANG, "sync_deltas": True}),
    ("--sync_folder f with --rollout_engine vllm_server", {**SERVER, "sync_folder": "f"}),
    ("--speculative_tokens 4 with --rollout_engine hf", {"speculative_tokens": 4}),
    ("--speculative_tokens 4 for an engine on several ranks", {**DRAFTS, "engine_tensor_parallel_size": 2}),
    ("--speculative_tokens 4 with --min_p", {**DRAFTS, "min_p": 0.1, "top_k": 5}),
    ("--rollout_engine vllm_server without --engine_urls", {"rollout_engine": "vllm_server"}),
    ("--min_p 0.1 with --rollout_engine sglang", {**SGLANG, "min_p": 0.1, "top_k": 5}),
    ("--max_logprob_diff inf with --rollout_engine sglang", {**SGLANG, "max_logprob_diff": float("inf")}),
    ("--min_p 0.1 with --rollout_engine vllm and without --top_k", {"rollout_engine": "vllm", "min_p": 0.1}),
    ("--temperature 0.001 with --rollout_engine vllm", {"rollout_engine": "vllm", "temperature": 0.001}),
    ("--engine_tensor_parallel_size 2 for 3 ranks", {"engine_tensor_parallel_size": 2, "num_ranks": 3}),
    ("--offload_critic with --adam_offload", {"offload_critic": True, "adam_offload": True}),
    ("--offload_critic with --rollouts_from", {"offload_critic": True, "rollouts_from": "r"}),
    ("--max_staleness 1 with --rollout_engine vllm", {**STALE, "rollout_engine": "vllm"}),
    ("--max_staleness 1 with --rollouts_from", {**STALE, "rollouts_from": "r"}),
    ("--max_staleness 1 with --offload_actor_optimizer", {**STALE, "offload_actor_optimizer": True}),
    ("--max_staleness 1 with --offload_critic", {**STALE, "offload_critic": True}),
    ("--max_staleness 1 with --verify_resume", {**STALE, "verify_resume": 2}),
    ("--max_staleness 1 without --tis_cap", {"max_staleness": 1}),
    ("--partial_rollouts without --max_staleness", {"partial_rollouts": True}),
    ("--partial_rollouts with --stop", {**STALE, "partial_rollouts": True, "stop": ["x"]}),
    ("--partial_rollouts with --routing_replay", {**STALE, "partial_rollouts": True, "routing_replay": True}),
    ("--curriculum learnable with one pass", {"curriculum": "learnable"}),
    ("--max_logprob_diff 0.5 with --rollouts_from", {"max_logprob_diff": 0.5, "rollouts_from": "r"}),
    ("--curriculum learnable with --rollouts_from", {"curriculum": "learnable", "rollouts_from": "r"}),
    ("--dynamic_filtering with --rollouts_from", {"dynamic_filtering": True, "rollouts_from": "r"}),
    ("--dynamic_filtering with --n_samples_per_prompt 1", {"dynamic_filtering": True}),
    ("--dynamic_filtering_range 0.1 0.9 without", {"dynamic_filtering_range": [0.1, 0.9]}),
    ("--eval_source_key k without --eval_dataset", {"eval_source_key": "k"}),
    ("--eval_fraction 0.5 with --rollouts_from", {"eval_fraction": 0.5, "rollouts_from": "r.jsonl"}),
    ("--eval_samples 4 without --eval_temperature", {**EVALUATED, "eval_samples": 4}),
    ("--eval_top_p 0.9 without --eval_temperature", {**EVALUATED, "eval_top_p": 0.9}),
    ("--eval_temperature 0.001 with --rollout_engine vllm_server", {**EVALUATED, **SERVER, "eval_temperature": 0.001}),
    ("--routing_replay with --rollout_engine vllm", {"routing_replay": True, "rollout_engine": "vllm"}),
    ("--routing_replay with --aux_loss_coef", {"routing_replay": True, "aux_loss_coef": 0.1}),
    ("--routing_replay with --sequence_parallel", {"routing_replay": True, "sequence_parallel": True}),
    ("--routing_replay with --compile", {"routing_replay": True, "compile": True}),
    ("--reward_pretrain rm with --reward_func", {"reward_func": "math", "reward_pretrain": "rm"}),
    ("--remote_rm_url http://x with --reward_func", {"reward_func": "math", "remote_rm_url": "http://x"}),
    ("--remote_rm_url http://x with --reward_pretrain", {"reward_pretrain": "rm", "remote_rm_url": "http://x"}),
    ("--env e.py with --reward_pretrain", {"reward_pretrain": "rm", "env": "e.py"}),
    ("--env e.py with --remote_rm_url", {"remote_rm_url": "http://x", "env": "e.py"}),
    (
        "--reward_func own.py with --env e.py and --max_staleness 1",
        {"reward_func": "own.py", "env": "e.py", "max_staleness": 1},
    ),
    ("--reward_func math without --label_key", {"reward_func": "math", "needs_labels": True}),
    ("--judge_range 0.0 5.0 with --judge_mode pairs", {**JUDGED, "judge_mode": "pairs", "judge_range": [0.0, 5.0]}),
    ("--judge_mode group with --n_samples_per_prompt 1", {**JUDGED, "judge_mode": "group", "n_samples_per_prompt": 1}),
    ("--judge_mode pairs with --eval_samples 1", {**JUDGED, "judge_mode": "pairs", "eval_dataset": "b"}),
    ("--judge_retries 5 without judge in --reward_func", {"reward_func": "math", "judge_retries": 5}),
    ("--reward_func math,judge without --judge_url and", {"reward_func": "math,judge", "judge_url": "http://a"}),
    ("--reward_weights 1.0 with --remote_rm_url http://x", {"reward_weights": [1.0], "remote_rm_url": "http://x"}),
    ("--reward_weights 1.0 with --env e.py", {"reward_weights": [1.0], "env": "e.py"}),
    ("--reward_weights 1.0 with --reward_pretrain a,b", {"reward_weights": [1.0], "reward_pretrain": "a,b"}),
    ("--reward_weights 1.0 2.0 with --reward_func math", {"reward_weights": [1.0, 2.0], "reward_func": "math"}),
    ("--reward_weights 1.0 2.0 without --reward_func or", {"reward_weights": [1.0, 2.0]}),
    ("--offload_reward without --reward_pretrain", {"offload_reward": True}),
    (
        "--reward_timeout 5.0 with --reward_func judge",
        {"reward_func": "judge", "judge_url": "http://a", "judge_model": "m", "reward_timeout": 5.0},
    ),
    ("--reward_timeout 5.0 with --reward_func math,format", {"reward_func": "math,format", "reward_timeout": 5.0}),
    ("--reward_timeout 5.0 without --reward_func", {"reward_timeout": 5.0}),
    ("--remote_rm_retries 1 without --remote_rm_url", {"remote_rm_retries": 1}),
    ("--env_timeout 5.0 without --env", {"env_timeout": 5.0}),
    ("--env_sandbox with --env_container docker", {"env": "e.py", "env_sandbox": True, "env_container": "docker"}),
    ("--env_memory_mb 9 without --env_sandbox", {"env": "e.py", "env_memory_mb": 9}),
    ("--overlong_buffer_len 9 with --generate_max_len 9", {"overlong_buffer_len": 9, "generate_max_len": 9}),
    ("--overlong_penalty_factor 2.0 without --overlong_buffer_len", {"overlong_penalty_factor": 2.0}),
]

ALLOWED = [
    {},
    {"num_ranks": 3, "on_cpu": True, "needs_labels": True},
    {**IMAGES, **GROUP},
    {**GROUP, "policy_loss": "sapo", "sapo_temperatures": [1.0, 2.0], "advantage_batch_std": True},
    {"policy_loss": "of_a_user", "eps_clip": 0.3},
    {**DISTILL, "offload_ref": True},
    {**ROUTED, "offload_ref": True},
    {**DISTILL, "teacher": "t,u", "ref_model": "t,u", "teacher_weights": [0.3, 0.7]},
    {"tis_cap": 1.0, "tis_mask": True, "tis_mask_range": [0.0, 5.0], "rejected_tokens": "leave", "tis_floor": 0.5},
    {**GROUP, **STALE, "partial_rollouts": True, **SERVER, "num_ranks": 2},
    {**GROUP, "max_staleness": 1, "bypass_mode": True, "off_policy_mask_threshold": 0.1},
    {**GROUP, "share_prompts": True, "dynamic_filtering": True, "dynamic_filtering_range": [0.1, 0.9]},
    {**JUDGED, "judge_cache": 0},
    {**JUDGED, **GROUP, "judge_mode": "pairs"},
    {**JUDGED, "dataset": None, "judge_mode": "group", "eval_dataset": "b", "eval_samples": 4, "eval_temperature": 1.0},
    {"init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k3", "kl_unbiased": True, "kl_target": 6.0},
    {"reward_func": "math,style.py", "reward_weights": [1.0, 2.0], "label_key": "label", "needs_labels": True},
    {"rollout_engine": "vllm", "engine_tensor_parallel_size": 2, "num_ranks": 4, "top_p": 0.9, "top_k": 50},
    {**EVALUATED, **SERVER, "eval_samples": 8, "eval_temperature": 0.6, "eval_top_p": 0.95, "eval_source_key": "k"},
    {"critic_learning_rate": 1e-3, "is_demo": True, **GROUP},
]


def refusal(rules, values: dict) -> str:
    facts = {name: value for name, value in values.items() if name in UNKNOWN}
    args = from_flat(PPOArguments, {name: value for name, value in values.items() if name not in UNKNOWN})
    return str(first_refusal(rules, args, COMMANDS.values(), **facts) or "")


@pytest.mark.parametrize(
    "rules, cases", [(PPO_RULES, PPO_CASES), (ROLLOUT_RULES, ROLLOUT_CASES)], ids=["rl", "rollouts"]
)
def test_every_rule_refuses_and_says_why(rules, cases):
    for rule, (start, values) in zip(rules, cases, strict=True):
        found = refusal([rule], values)
        assert found.startswith(f"{start}") and f": {rule.why}. {rule.instead}" in found, (start, found)


@pytest.mark.parametrize("values", ALLOWED, ids=lambda values: " ".join(values) or "defaults")
def test_what_goes_together_is_accepted(values):
    assert refusal((*PPO_RULES, *ROLLOUT_RULES), values) == ""
