"""Rules for the flags that the training commands share: layers, data, LoRA, output, checkpoints, images."""

import os

from trainer.comma_separated import addresses_in, names_in
from trainer.flags.data_rules import ADD_EVALUATION, DATA_RULES, REMOVE, has_evaluation
from trainer.flags.layout_rules import ONE
from trainer.flags.rule import Rule

# of train_kd and train_ppo
TEACHERS_HAVE_WEIGHTS = Rule(
    "teacher_weights",
    lambda f: f.teacher and len(f.teacher_weights) != len(names_in(f.teacher)),
    "with --teacher {teacher}",
    "the numbers of weights and of models differ",
    "Give one weight for each model.",
    which="of another number",
)
# of train_kd
ONE_FOR_ALL_ROWS = Rule(
    "teacher",
    lambda f: any("=" in name and not os.path.isdir(name) for name in names_in(f.teacher)),
    "for some of the rows",
    "no column chooses the teacher of a row",
    "Name models alone, or take one run for each part of the rows.",
    which="of the form NAME=MODEL",
)
PLAIN_LOOP_LACKS = ("streaming", "lora_rank", "load_in_4bit", "fp8", "merge_adapter", "aux_loss_coef")
PLAIN_LOOP_LACKS += ("expert_bias_update_rate", "add_tokens")


def has_projects(f) -> bool:
    """Whether a tracker is used that has projects and named runs."""
    return f.use_wandb or bool(set(names_in(f.report_to)) - {"none", "tensorboard"})


# fmt: off
SHARED_RULES = (
    Rule("sp_mode", lambda f: f.ring_attn_size == 1, "with --ring_attn_size 1",
         "one rank holds each sequence, so no attention runs over several ranks",
         "Set --ring_attn_size to 2 or more."),
    Rule("ring_attn_kernel", lambda f: f.ring_attn_size == 1 or f.sp_mode != "ring", "without a ring",
         "it chooses the code of ring attention", "Set --ring_attn_size to 2 or more, with --sp_mode ring."),
    Rule("activation_offload", lambda f: not f.gradient_checkpointing, "without --gradient_checkpointing",
         "it moves the inputs of layers that are recomputed", "Add --gradient_checkpointing."),
    Rule("activation_offload", lambda f: f.on_cpu, "on the CPU", "activations are already in host memory", REMOVE),
    Rule("gradient_checkpointing", lambda f: f.selective_checkpointing, "with --selective_checkpointing",
         "both say what the backward pass recomputes", ONE),
    Rule("micro_train_batch_size", lambda f: f.max_tokens_per_micro_batch, "with --max_tokens_per_micro_batch",
         "both say how large a micro-batch is", ONE),
    Rule("cpu_matmul", lambda f: f.on_gpu, "on a GPU", "it chooses the CPU's matrix products",
         "Add --device cpu, or remove the flag."),
    Rule("attn_implementation", lambda f: f.packing_samples, "with --packing_samples",
         "it has no kernel that keeps the documents of a row apart",
         "Take sdpa, flash_attention_2 or flash_attention_3.", values=("eager",)),
    Rule("attn_implementation", lambda f: f.ring_attn_size > 1, "with --ring_attn_size {ring_attn_size}",
         "ring and Ulysses attention have no such kernel", "Take sdpa or flash_attention_2.",
         values=("eager", "flash_attention_3")),
    Rule("attn_implementation", lambda f: f.param_dtype == "fp32", "with --param_dtype fp32",
         "its kernels are for half precision", "Take sdpa, or --param_dtype bf16 or fp16.",
         values=("flash_attention_2", "flash_attention_3")),
    Rule("ring_attn_kernel", lambda f: f.param_dtype == "fp32", "with --param_dtype fp32",
         "its kernels are for half precision", "Take native, or --param_dtype bf16 or fp16.",
         values=("ring_flash_attn",)),
    Rule("fp8", lambda f: f.param_dtype == "fp16", "with --param_dtype fp16",
         "gradients that are scaled for fp16 would be scaled twice", "Take --param_dtype bf16."),
    Rule("fp8", lambda f: f.on_gpu and f.param_dtype == "fp32", "with --param_dtype fp32 on a GPU",
         "its products give bf16", "Take --param_dtype bf16."),
    Rule("fp8", lambda f: f.load_in_4bit, "with --load_in_4bit", "frozen weights of 4 bits have their own products", ONE),
    Rule("adam_betas adam_eps", lambda f: f.optim == "adafactor", "with --optim adafactor",
         "they are those of AdamW", REMOVE),
    Rule("dataset_probs", lambda f: not f.dataset, "without --dataset", "it mixes the sets of --dataset", REMOVE),
    Rule("dataset_flags", lambda f: f.streaming, "with --streaming", "a stream reads all sets in the same way",
         "Take sets with the same columns, or no --streaming."),
    Rule("evals_per_epoch", lambda f: f.eval_steps, "with --eval_steps {eval_steps}", "both say when", ONE),
    Rule("saves_per_epoch", lambda f: f.save_steps, "with --save_steps {save_steps}", "both say when", ONE),
    Rule("evals_per_epoch saves_per_epoch", lambda f: f.streaming, "with --streaming",
         "nobody knows the length of a stream", "Take --eval_steps and --save_steps."),
    Rule("eval_steps evals_per_epoch max_eval_samples", lambda f: not has_evaluation(f), "without --eval_dataset",
         "nothing is evaluated", ADD_EVALUATION),
    Rule("eval_split", lambda f: not f.eval_dataset, "without --eval_dataset", "it names a split of that set",
         "Add --eval_dataset, or remove the flag."),
    Rule("eval_fraction", lambda f: f.eval_dataset, "with --eval_dataset", "both give the rows of the evaluation", ONE),
    Rule("eval_fraction", lambda f: f.streaming, "with --streaming",
         "nobody knows the number of rows before the run has read them", "Take --eval_dataset, a file of its own."),
    Rule("wandb_project run_name", lambda f: not has_projects(f), "without a tracker that has projects",
         "it names the project or the run there", "Add --report_to with wandb, trackio, mlflow or swanlab, or remove the flag."),
    Rule("save_path", lambda f: f.no_save, "with --no_save", "no model is written", ONE),
    Rule("push_to_hub", lambda f: f.no_save, "with --no_save", "no model is written", ONE),
    Rule("push_to_hub", lambda f: f.verify_resume, "with --verify_resume",
         "such a run ends after its proof, without a model", ONE),
    Rule("push_to_hub", lambda f: not (f.hub_model_id or f.output_dir), "without --hub_model_id or --output_dir",
         "nothing names the repository", "Add --hub_model_id."),
    Rule("hub_model_id hub_private_repo hub_dry_run", lambda f: not f.push_to_hub, "without --push_to_hub",
         "nothing is uploaded", "Add --push_to_hub, or remove the flag."),
    Rule("min_lr_ratio",
         lambda f: not (f.lr_scheduler.endswith("with_min_lr") or f.lr_scheduler == "warmup_stable_decay"),
         "with --lr_scheduler {lr_scheduler}", "this schedule has no lowest rate",
         "Take a schedule *_with_min_lr or warmup_stable_decay, or remove the flag."),
    Rule("lr_warmup_ratio", lambda f: f.lr_scheduler == "constant" and f.lr_warmup_ratio,
         "with --lr_scheduler constant", "this schedule has no warm-up",
         "Take another schedule, such as constant_with_warmup, or remove the flag.", which="above 0"),
    Rule("warmup_steps", lambda f: f.lr_scheduler == "constant" and f.warmup_steps,
         "with --lr_scheduler constant", "this schedule has no warm-up",
         "Take another schedule, such as constant_with_warmup, or remove the flag.", which="above 0"),
    Rule("lr_warmup_ratio", lambda f: f.warmup_steps is not None, "with --warmup_steps {warmup_steps}",
         "both say how long the warm-up is", ONE),
    Rule("overwrite", lambda f: f.load_checkpoint, "with --load_checkpoint", "a run is either resumed or replaced",
         ONE),
    Rule("load_checkpoint", lambda f: f.output_dir is None, "without --output_dir",
         "the latest checkpoint is that of a run folder", "Add --output_dir, or name a checkpoint.",
         values=("latest",)),
    Rule("verify_resume", lambda f: f.on_gpu and not f.deterministic, "with --deterministic false",
         "on CUDA, no two passes are bitwise the same", "Remove --deterministic."),
    Rule("allow_change", lambda f: f.load_checkpoint is None, "without --load_checkpoint",
         "it says what may differ from the run of a checkpoint", "Add --load_checkpoint, or remove the flag."),
    Rule("early_stopping_patience", lambda f: not (f.eval_steps or f.evals_per_epoch),
         "without --eval_steps or --evals_per_epoch", "an evaluation at the end stops nothing early",
         "Add one of them."),
    Rule("save_only_model", lambda f: f.verify_resume, "with --verify_resume",
         "a resume needs the optimizer", ONE),
    Rule("load_best_model_at_end", lambda f: f.no_save, "with --no_save", "no model is written", ONE),
    Rule("load_best_model_at_end early_stopping_patience", lambda f: f.verify_resume, "with --verify_resume",
         "such a run ends after its proof, without a model", ONE),
    Rule("best_metric_key load_best_model_at_end early_stopping_patience", lambda f: not has_evaluation(f), "without --eval_dataset", "no evaluation gives the metric",
         ADD_EVALUATION),
)
# fmt: on

# fmt: off
LORA_RULES = (
    Rule("merge_adapter", lambda f: not f.lora_adapter, "without an adapter", "there is nothing to merge",
         "Give --pretrain ADAPTER, or remove the flag."),
    Rule("merge_adapter", lambda f: f.lora_rank and f.has_images, "with --lora_rank and rows that have images",
         "the merged base would be a model of text only", "Remove --merge_adapter or --lora_rank."),
    Rule("lora_alpha lora_dropout use_dora use_rslora target_modules load_in_4bit lora_experts", lambda f: f.lora_rank is None,
         "without --lora_rank", "no adapter is trained", "Add --lora_rank, or remove the flag."),
    Rule("lora_dropout", lambda f: f.tensor_parallel_size > 1, "with --tensor_parallel_size {tensor_parallel_size}",
         "the ranks would drop the same positions of different parts", "Set it to 0."),
    Rule("lora_dropout", lambda f: f.ring_attn_size > 1, "with --ring_attn_size {ring_attn_size}",
         "the ranks would drop the same positions of different parts", "Set it to 0."),
    Rule("use_dora", lambda f: f.tensor_parallel_size > 1, "with --tensor_parallel_size {tensor_parallel_size}",
         "a rank does not hold whole rows of each weight", "Set it to 1, or remove --use_dora."),
    Rule("use_dora", lambda f: f.lora_experts, "with --lora_experts", "peft has no DoRA of stacked experts", ONE),
    Rule("lora_experts", lambda f: f.lora_dropout, "with --lora_dropout {lora_dropout}",
         "peft adds the update to the weights of experts, so nothing can be dropped", ONE),
    Rule("lora_experts", lambda f: f.tensor_parallel_size > 1, "with --tensor_parallel_size {tensor_parallel_size}",
         "adapters of experts are not sharded over tp", ONE),
    Rule("lora_experts", lambda f: f.load_in_4bit, "with --load_in_4bit", "experts are not quantized", ONE),
    Rule("lora_experts", lambda f: f.compile, "with --compile",
         "peft changes the weights of experts in each forward pass", ONE),
)
# fmt: on

# fmt: off
TOKEN_RULES = (
    Rule("add_tokens", lambda f: f.lora_rank or f.lora_adapter, "with an adapter",
         "the embedding is frozen below an adapter, so the new rows would never train", "Train all weights."),
    Rule("add_tokens", lambda f: f.has_images, "with rows that have images",
         "the processor of images has a tokenizer of its own", "Take rows without images."),
    Rule("add_tokens", lambda f: f.ref_model, "with --ref_model", "that model has no rows for the new tokens",
         "Remove --ref_model: the reference is then --pretrain with the same rows."),
    Rule("add_tokens", lambda f: f.certificate, "with --certificate",
         "it names the folder of --pretrain, which lacks the new rows", ONE),
)
# fmt: on

# fmt: off
STREAMING_RULES = (
    Rule("streaming_buffer", lambda f: not f.streaming, "without --streaming", "only a stream has a buffer",
         "Add --streaming, or remove the flag."),
    Rule("streaming", lambda f: not f.max_steps, "without --max_steps", "nobody knows the length of a stream",
         "Add --max_steps."),
    Rule("dataset_num_proc", lambda f: f.streaming, "with --streaming", "the ranks tokenize a stream themselves",
         REMOVE),
    Rule("streaming", lambda f: f.vision_learning_rate or not f.freeze_vision or f.image_max_pixels or f.image_min_pixels,
         "with flags for images",
         "a stream has rows of text only", "Remove one of them."),
)
# fmt: on

# fmt: off
IMAGE_RULES = (
    Rule("sequence_parallel expert_parallel_size load_in_4bit compile aux_loss_coef expert_bias_update_rate parity_trace",
         lambda f: f.has_images, "with rows that have images", "this is not built for models of images",
         "Remove the flag, or take rows without images."),
    Rule("freeze_vision vision_learning_rate cache_pixels image_max_pixels image_min_pixels", lambda f: f.no_images,
         "without images", "no row has an image", "Remove the flag, or take rows with images."),
    Rule("freeze_vision", lambda f: f.lora_rank, "with --lora_rank", "an adapter trains the language model only", ONE),
    Rule("vision_learning_rate", lambda f: f.freeze_vision or f.lora_rank, "with a frozen vision tower",
         "a frozen tower has no learning rate", "Add --freeze_vision false."),
    Rule("vision_learning_rate", lambda f: f.optim == "muon", "with --optim muon", "Muon has groups of its own",
         "Take another --optim."),
)
# fmt: on

# fmt: off
LAYOUT_AUTO_RULES = (
    Rule("layout", lambda f: f.is_demo, "with the demo", "the demo trains on any layout",
         "Give --pretrain and --dataset."),
    Rule("layout", lambda f: f.load_in_4bit, "with --load_in_4bit", "the plan knows no quantized weights", ONE),
    Rule("backend zero_stage dp_replicate_size tensor_parallel_size ring_attn_size expert_parallel_size adam_offload gradient_checkpointing reduce_once",
         lambda f: f.layout == "auto", "with --layout auto", "auto chooses this flag", ONE),
)
# fmt: on

# fmt: off
TRACE_RULES = (
    Rule("sign_key", lambda f: not (f.certificate or f.certify), "without --certificate", "it signs the certificate",
         "Add --certificate."),
    Rule("parity_trace", lambda f: f.load_checkpoint or f.verify_resume, "with --load_checkpoint or --verify_resume",
         "it traces the first step of a run", "Start a new run."),
    Rule("parity_trace", lambda f: f.aux_loss_coef, "with --aux_loss_coef", "this loss runs each micro-batch twice",
         ONE),
    Rule("parity_trace", lambda f: f.param_dtype == "fp16", "with --param_dtype fp16",
         "its loss scale differs from run to run", "Take bf16 or fp32."),
    Rule("parity_trace", lambda f: f.compile and f.tensor_parallel_size > 1,
         "with --compile and --tensor_parallel_size {tensor_parallel_size}",
         "a compiled layer shows only its own output, and tp shards it", "Remove one of them."),
    *(
        Rule("certify", lambda f, flag=flag: getattr(f, flag), f"with --{flag}", "the plain loop does not have it", ONE)
        for flag in PLAIN_LOOP_LACKS
    ),
    Rule("certify certificate", lambda f: f.load_best_model_at_end or f.early_stopping_patience,
         "with --load_best_model_at_end or --early_stopping_patience", "a rerun compares the last model", ONE),
    Rule("certify certificate", lambda f: f.no_save, "with --no_save", "a run without a model has no certificate", ONE),
    Rule("certify certificate", lambda f: f.verify_resume, "with --verify_resume",
         "such a run ends after its proof, without a model", ONE),
)

# with --exact: what is not proved to keep every bit
EXACT_RULES = (
    Rule("exact", lambda f: f.on_gpu, "on a GPU", "no GPU has run its products of fixed tiles yet",
         "Add --device cpu, or remove the flag."),
    Rule("exact", lambda f: f.param_dtype != "fp32", "with --param_dtype {param_dtype}",
         "equal bits are proved for fp32 only", "Add --param_dtype fp32."),
    Rule("exact", lambda f: f.tensor_parallel_size not in (1, 2, 4),
         "with --tensor_parallel_size {tensor_parallel_size}", "equal bits are proved for these sizes only",
         "Take 1, 2 or 4."),
    Rule("exact", lambda f: f.tensor_parallel_size > 1 and (f.use_hf_tp_plan or f.sequence_parallel),
         "with --use_hf_tp_plan or --sequence_parallel", "equal bits are proved for plans of ours on whole sequences",
         "Remove the other flag."),
    Rule("exact", lambda f: f.tensor_parallel_size > 1 and f.dp_replicate_size > 1,
         "with --tensor_parallel_size and --dp_replicate_size", "equal bits are not proved for both",
         "Set one of them to 1."),
    Rule("exact", lambda f: f.tensor_parallel_size > 1 and f.parity_trace,
         "with --tensor_parallel_size and --parity_trace", "a rank has only a part of a sample's gradient",
         "Set --tensor_parallel_size to 1."),
    Rule("exact", lambda f: f.ring_attn_size not in (1, 2, 4), "with --ring_attn_size {ring_attn_size}",
         "equal bits are proved for these sizes only", "Take 1, 2 or 4."),
    Rule("exact", lambda f: f.ring_attn_size > 1 and f.cpu_matmul == "onednn",
         "with --ring_attn_size and --cpu_matmul onednn", "only large products take it, and a split sample has smaller ones",
         "Take --cpu_matmul mkl."),
    Rule("exact", lambda f: f.ring_attn_size > 1 and f.dp_replicate_size > 1,
         "with --ring_attn_size and --dp_replicate_size", "equal bits are not proved for both",
         "Set one of them to 1."),
    Rule("exact", lambda f: f.ring_attn_size > 1 and f.parity_trace, "with --ring_attn_size and --parity_trace",
         "a rank has only a part of a sample's gradient", "Set --ring_attn_size to 1."),
    Rule("exact", lambda f: f.expert_parallel_size > 1, "with --expert_parallel_size {expert_parallel_size}",
         "the tokens of an expert then come in another order", "Set it to 1."),
    Rule("exact", lambda f: f.lora_dropout, "with --lora_dropout {lora_dropout}",
         "each rank drops other elements", "Set it to 0."),
    Rule("exact", lambda f: f.lora_experts, "with --lora_experts", "equal bits are not proved for them",
         "Remove one of them."),
    Rule("exact", lambda f: f.use_dora, "with --use_dora", "equal bits are not proved for it", "Remove one of them."),
    Rule("exact", lambda f: f.merge_adapter, "with --merge_adapter", "equal bits are not proved for merged weights",
         "Remove one of them."),
    Rule("exact", lambda f: f.load_in_4bit, "with --load_in_4bit", "equal bits are not proved for 4-bit weights",
         "Remove one of them."),
    Rule("exact", lambda f: f.fp8, "with --fp8 {fp8}", "scales depend on the shape of a micro-batch",
         "Remove one of them."),
    Rule("exact", lambda f: f.compile, "with --compile", "a compiled layer depends on the shape of a batch",
         "Remove one of them."),
    Rule("exact", lambda f: f.optim != "adamw", "with --optim {optim}", "only AdamW has a step of single roundings",
         "Take --optim adamw."),
    Rule("exact", lambda f: f.adam_offload, "with --adam_offload", "equal bits are not proved for its path of gradients",
         "Remove one of them."),
    Rule("exact", lambda f: f.reduce_once or f.reduce_dtype != "fp32", "with --reduce_once or --reduce_dtype",
         "it always reduces once, as whole numbers", "Remove the other flag."),
    Rule("exact", lambda f: f.attn_implementation not in ("auto", "sdpa", "eager"),
         "with --attn_implementation {attn_implementation}", "equal bits are not proved for this kernel",
         "Take sdpa or eager."),
    Rule("exact", lambda f: f.aux_loss_coef or f.expert_bias_update_rate, "with flags of routers",
         "they count over the micro-batches of a rank", "Remove one of them."),
    Rule("exact", lambda f: f.loss == "kto", "with --loss kto", "equal bits are not proved for its estimate of the KL",
         "Take a loss of pairs."),
    Rule("exact", lambda f: f.teacher_answers, "with --teacher_answers",
         "the bits of sampled answers depend on the layout", "Write the answers once, and train on them."),
    Rule("exact", lambda f: f.precompute_ref_logps, "with --precompute_ref_logps",
         "its file may hold log-probs of a run without --exact", "Remove one of them."),
    Rule("exact", lambda f: f.streaming, "with --streaming", "equal bits are not proved for streams",
         "Remove one of them."),
    Rule("exact", lambda f: f.has_images, "with rows that have images", "equal bits are not proved for vision towers",
         "Take rows without images."),
)

# with --exact and a teacher
EXACT_TEACHER_RULES = (
    Rule("exact", lambda f: addresses_in(f.teacher), "with a server in --teacher", "its bits depend on its other requests",
         "Load the teacher here."),
    Rule("exact", lambda f: f.tensor_parallel_size > 1 and f.kd_top_k, "with --tensor_parallel_size and --kd_top_k",
         "tokens of equal probability may be taken in another order", "Set --tensor_parallel_size to 1."),
    Rule("exact", lambda f: max(f.tensor_parallel_size, f.ring_attn_size) > 1 and f.kd_loss == "jsd",
         "with --tensor_parallel_size or --ring_attn_size and --kd_loss jsd",
         "the last elements of a part of its logits may round in another way", "Take kl or reverse_kl."),
)

# with --exact and rollouts: what is not proved to generate and train with the same bits
EXACT_ROLLOUT_RULES = (
    Rule("exact", lambda f: f.rollout_engine != "hf", "with --rollout_engine {rollout_engine}",
         "only the embedded engine computes as training does", "Take --rollout_engine hf."),
    Rule("exact", lambda f: f.lora_rank, "with --lora_rank and rollouts",
         "the engine merges the adapter, and training does not", "Train all weights."),
    Rule("exact", lambda f: f.max_staleness, "with --max_staleness {max_staleness}",
         "the speed of a rank decides which weights generate", "Set it to 0."),
    Rule("exact", lambda f: f.top_p < 1 or f.top_k or f.min_p, "with --top_p, --top_k or --min_p",
         "equal bits are proved for samples from all tokens", "Remove the other flags."),
    Rule("exact", lambda f: f.env, "with --env {env}", "equal bits are proved for one turn", "Take --reward_func."),
    Rule("exact", lambda f: f.remote_rm_url, "with --remote_rm_url {remote_rm_url}",
         "a server may give a text other scores, or none in time", "Take --reward_func."),
    Rule("exact", lambda f: "judge" in names_in(f.reward_func), "with --reward_func {reward_func}",
         "a judge may give a text other scores, or none in time", "Take another function."),
    Rule("exact", lambda f: f.cpu_matmul == "onednn", "with --cpu_matmul onednn and rollouts",
         "only large products take it, and a token alone has smaller ones", "Take --cpu_matmul mkl."),
    Rule("exact", lambda f: f.reward_pretrain, "with --reward_pretrain {reward_pretrain}",
         "equal bits are not proved for the head of a reward model", "Take --reward_func."),
    Rule("exact", lambda f: f.advantage_estimator != "group_norm",
         "with --advantage_estimator {advantage_estimator}", "equal bits are proved for group_norm only",
         "Take --advantage_estimator group_norm."),
    Rule("exact", lambda f: f.policy_loss != "ppo", "with --policy_loss {policy_loss}",
         "equal bits are proved for ppo only", "Take --policy_loss ppo."),
    Rule("exact", lambda f: f.entropy_loss_coef or f.entropy_target or f.positive_nll_coef, "with another term of the policy loss",
         "equal bits are proved for the loss alone", "Remove --entropy_loss_coef, --entropy_target and --positive_nll_coef."),
    Rule("exact", lambda f: f.bypass_mode or f.tis_cap is not None or f.tis_mask or f.rollout_kl_max is not None
         or f.off_policy_mask_threshold is not None or f.top_entropy_quantile is not None,
         "with corrections of the rollout", "rollout and training have the same log-probs, so there is nothing to correct",
         "Remove the flags of the correction."),
    Rule("exact", lambda f: f.ema_beta is not None, "with --ema_beta {ema_beta}",
         "equal bits are not proved for averages", "Remove one of them."),
    Rule("exact", lambda f: f.share_prompts, "with --share_prompts", "each sample is run alone", "Remove one of them."),
    Rule("exact", lambda f: f.routing_replay, "with --routing_replay", "equal bits are not proved for experts",
         "Remove one of them."),
)
# fmt: on


TRAINING_RULES = (
    *SHARED_RULES, *DATA_RULES, *LORA_RULES, *TOKEN_RULES, *STREAMING_RULES, *IMAGE_RULES, *LAYOUT_AUTO_RULES,
    *TRACE_RULES,
)  # fmt: skip


_WHY = "equal bits of rollouts are proved for train_ppo only"
_NOT_EXACT = Rule("exact", lambda f: True, "with train_dpo --online", _WHY, "Remove the flag.")


def _no_new_tokens(command: str, why: str) -> Rule:
    return Rule("add_tokens", lambda f: True, f"with {command}", why, "Add them in train_sft first.")


_UNTAUGHT = "the policy would have to sample tokens that no text taught"
NEVER = {
    "train_ppo": (_no_new_tokens("train_ppo", _UNTAUGHT),),
    "train_dpo --online": (_NOT_EXACT, _no_new_tokens("train_dpo --online", _UNTAUGHT)),
} | {"train_kd": (_no_new_tokens("train_kd", "the teacher does not know them"),)}
