"""What a flag decides when a run goes on from a checkpoint: one table, in which each flag of each command has one place.

The effects, from the strictest on:

- FIXED: with another value, the checkpoint does not fit the run. Refused.
- OBJECTIVE: another value trains for something else. Refused, unless --allow_change names the flag.
- CONTENT: names a model, data or code. Not its name is compared, but what is there: see `runs/run_record.py`.
- SAMPLES: makes samples of rows. Refused if the samples are others.
- COURSE: the same objective on another course, or in other dtypes. Told and recorded.
- LAYOUT: speed, memory and place. Told and recorded.
- OUTPUT: what is written, and when. Not told.
"""

from collections.abc import Callable, Iterable
from typing import Any

from trainer.comma_separated import names_in
from trainer.errors import UserError
from trainer.flags.parse_flags import flags_of

FIXED, OBJECTIVE, CONTENT, SAMPLES, COURSE, LAYOUT, OUTPUT = [
    "fixed",
    "objective",
    "content",
    "samples",
    "course",
    "layout",
    "output",
]

EFFECTS: dict[str, str] = {
    FIXED: """
        streaming streaming_buffer curriculum optim add_tokens lora_rank target_modules lora_experts use_dora online""",
    OBJECTIVE: """
        exact train_batch_size seed no_shuffle rollout_batch_size n_samples_per_prompt
        lora_alpha lora_dropout use_rslora load_in_4bit merge_adapter multiturn train_on pretrain_mode aux_loss_coef expert_bias_update_rate freeze_vision
        teacher_answers generate_max_len temperature kd_coef kd_temperature kd_loss kd_beta kd_top_k teacher_weights
        loss loss_weights center_rewards_coef value_head_prefix margin_key beta f_divergence f_alpha label_smoothing
        simpo_gamma nll_loss_coef desirable_weight undesirable_weight label_key
        max_staleness partial_rollouts top_p top_k min_p stop routing_replay rollouts_from dynamic_filtering
        dynamic_filtering_range reward_range judge_model judge_mode judge_range judge_args reward_weights reward_clip_range normalize_reward overlong_buffer_len
        overlong_penalty_factor env_max_turns env_last_turn_text env_answer_max_len env_long_answers env_args env_key
        advantage_estimator gamma lambd policy_lambd policy_lambd_alpha positive_nll_coef no_advantage_std_norm advantage_batch_std
        policy_loss sapo_temperatures cov_share cov_range kl_cov_coef loss_agg mask_truncated eps_clip eps_clip_high dual_clip bypass_mode tis_cap tis_level tis_mask
        tis_floor tis_mask_range tis_mask_level rejected_tokens off_policy_mask_threshold top_entropy_quantile rollout_kl_max rollout_kl_estimator ema_beta entropy_loss_coef init_kl_coef use_kl_loss kl_unbiased kl_in_score
        kl_estimator kl_target kl_horizon value_clip freezing_actor_steps""",
    CONTENT: "pretrain lora_adapter dataset teacher ref_model critic_pretrain reward_pretrain reward_func judge_rubric env",
    SAMPLES: """
        image_max_pixels image_min_pixels
        dataset_split dataset_probs dataset_flags max_samples eval_fraction input_template apply_chat_template tokenizer_chat_template max_len
        ignore_columns system template_args read_control_tokens input_key output_key prompt_max_len prompt_key chosen_key
        rejected_key completion_key""",
    COURSE: """
        max_epochs max_steps num_episodes learning_rate vision_learning_rate critic_learning_rate lr_scheduler
        lr_warmup_ratio warmup_steps min_lr_ratio adam_betas adam_eps weight_decay fp8 max_norm max_skipped_steps param_dtype compute_fp32_loss
        reduce_dtype deterministic trust_remote_code limits remote_rm_url judge_url judge_timeout judge_retries judge_cache reward_timeout remote_rm_timeout remote_rm_retries max_failed_share max_logprob_diff
        env_timeout env_sandbox env_memory_mb env_processes env_disk_mb env_cpu_seconds env_paths preset
        eval_dataset eval_dataset_flags eval_split max_eval_samples best_metric_key early_stopping_patience eval_samples eval_temperature eval_top_p eval_source_key""",
    LAYOUT: """
        attn_implementation gradient_checkpointing selective_checkpointing activation_offload compile dataset_num_proc
        cache_pixels micro_train_batch_size max_tokens_per_micro_batch packing_samples layout backend zero_stage
        adam_offload tensor_parallel_size use_hf_tp_plan sequence_parallel expert_parallel_size ring_attn_size sp_mode
        ring_attn_kernel dp_replicate_size reduce_once device cpu_matmul ref_offload precompute_ref_logps teacher_offload
        micro_rollout_batch_size rollout_engine engine_urls engine_tensor_parallel_size vllm_gpu_memory_utilization
        offload_actor_optimizer share_prompts offload_reward offload_ref offload_critic env_concurrency env_lockstep
        remote_rm_api_key judge_key_env judge_concurrency engine_api_key sync_deltas""",
    OUTPUT: """
        allow_no_stop print_model print_tp_plan heartbeat_timeout check_replicas_every output_dir overwrite save_path no_save
        certificate sign_key eval_steps evals_per_epoch saves_per_epoch logging_steps report_to use_wandb wandb_project run_name use_tensorboard parity_dump save_steps
        save_interval_minutes max_ckpt_num max_ckpt_mem load_checkpoint allow_change ckpt_format async_save save_hf_ckpt
        push_to_hub hub_model_id hub_private_repo hub_dry_run load_best_model_at_end save_only_model verify_resume parity_trace certify sample_pages timeline""",
}

EFFECT_OF: dict[str, str] = {flag: effect for effect, flags in EFFECTS.items() for flag in flags.split()}

BITS = {"cpu_matmul", "attn_implementation"}  # with --exact, these decide the bits of a run

# what a run uses if a flag without a default is not given, from its other flags
FOLLOWS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lora_alpha": lambda flags: flags["lora_rank"] and 2 * flags["lora_rank"],
    "kd_coef": lambda flags: float(not flags["teacher_answers"]),
    "teacher_weights": lambda flags: [1 / (count := max(1, len(names_in(flags["teacher"]))))] * count,
    "eps_clip_high": lambda flags: flags["eps_clip"],
    "dynamic_filtering_range": lambda flags: None if flags["dynamic_filtering"] else [0.0, 1.0],  # the older default
    "reward_range": lambda flags: [0.0, 1.0],
    "tis_mask_range": lambda flags: [1 / cap, cap] if flags["tis_mask"] and (cap := flags["tis_cap"]) else None,
    "tis_mask_level": lambda flags: flags["tis_level"],
    "engine_tensor_parallel_size": lambda flags: flags["tensor_parallel_size"],
}
WEIGHTS = ("loss_weights", "reward_weights")  # each is 1 if they are not given


def in_effect(flags: dict[str, Any]) -> dict[str, Any]:
    """The values that a run uses. So a flag that is given with the value that it has anyway is no change."""
    used = dict(flags)
    for name in used.keys() & FOLLOWS.keys():
        used[name] = FOLLOWS[name](flags) if flags[name] is None else flags[name]
    if used.get("exact") and used["attn_implementation"] == "auto":
        used["attn_implementation"] = "sdpa"
    used |= {name: None for name in used.keys() & set(WEIGHTS) if set(used[name] or ()) == {1}}
    if used.get("target_modules") == "all-linear":
        used["target_modules"] = None
    if names := used.get("target_modules"):
        used["target_modules"] = ",".join(sorted(set(names_in(names))))
    return used


def effect_of(flag: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """The effect of another value of `flag` in a resume from flags `old` with flags `new`. --exact promises equal bits."""
    return OBJECTIVE if flag in BITS and old.get("exact") and new.get("exact") else EFFECT_OF[flag]


def check_allowed(allowed: Iterable[str], command: type) -> list[str]:
    """The names of --allow_change, without dashes. Raises UserError for one that is no flag of the command or is fixed."""
    names = [name.lstrip("-") for name in allowed]
    known = {field.name for field, _ in flags_of(command)}
    for name in names:
        if name not in known:
            raise UserError("--allow_change", f"{name} is no flag of this command", "names of flags, such as beta")
        if EFFECT_OF[name] == FIXED:
            raise UserError("--allow_change", f"{name}: the checkpoint would not fit the run", "a new run")
    return names
