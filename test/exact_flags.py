"""Runs of --exact that combine flags, so that each flag of a command is compared on several layouts: see test_exact_flags.py."""

import json
from collections.abc import Sequence
from pathlib import Path

from launch import FULL

ZERO = ("--backend", "deepspeed", "--zero_stage")
LAYOUTS = {
    "f": ("--backend", "fsdp2"),
    "f-dp2": ("--backend", "fsdp2"),
    "f-tp2": ("--backend", "fsdp2", "--tensor_parallel_size", "2"),
    "f-ring2": ("--backend", "fsdp2", "--ring_attn_size", "2"),
    "f-hsdp2": ("--backend", "fsdp2", "--dp_replicate_size", "2"),
    "z1-tp2": (*ZERO, "1", "--tensor_parallel_size", "2"),
    "z2": (*ZERO, "2", "--micro_rollout_batch_size", "16"),
    "z2-dp2": (*ZERO, "2"),
    "z3-ulysses2": (*ZERO, "3", "--ring_attn_size", "2", "--sp_mode", "ulysses"),
}
TWO_RANKS = ("f-dp2", "f-ring2", "z2-dp2", "f-tp2")

# --- train_ppo

REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(c in label for c in set(text)) / (1 + len(text)) for text, label in zip(responses, labels)]


def shorter(prompts, responses, labels):
    return [-len(text) / 7 for text in responses]
"""
OF_ROLLOUTS = {
    "scores": """--init_kl_coef 0.05 --kl_in_score --kl_estimator k3 --kl_target 0.01 --kl_horizon 100 --normalize_reward
        --reward_clip_range -1.5 1.5 --overlong_buffer_len 4 --overlong_penalty_factor 0.5 --loss_agg sequence
        --advantage_batch_std --dynamic_filtering --dual_clip 2 --mask_truncated --curriculum learnable --num_episodes 3
        --temperature 0.9 --eps_clip 0.1 --eps_clip_high 0.3 --max_epochs 2 --gamma 0.95 --max_samples 3 --stop e
        --ref_model {folder}/demo/model --offload_ref --gradient_checkpointing""",
    "loss": """--init_kl_coef 0.05 --use_kl_loss --kl_estimator k3 --kl_unbiased --loss_agg prompt --no_advantage_std_norm
        --dynamic_filtering --dynamic_filtering_range 0.01 0.5 --reward_range -1 2 --curriculum easy_first --num_episodes 3
        --max_samples 3 --reward_func {folder}/reward.py:reward_func,{folder}/reward.py:shorter --reward_weights 1 0.01
        --eval_dataset {folder}/demo/prompts.jsonl --max_eval_samples 2 --eval_samples 2 --eval_temperature 0.5
        --eval_top_p 0.7 --eval_steps 2 --offload_actor_optimizer --selective_checkpointing""",
    "teacher": """--teacher {folder}/demo/model,{folder}/demo/model --teacher_weights 0.25 0.75 --init_kl_coef 0.5
        --loss_agg fixed_length --kl_target 0.1 --packing_samples""",
    "teachers of rows": """--teacher a={folder}/demo/model,b={folder}/demo/model --teacher_key who --init_kl_coef 0.5
        --dataset {folder}/chosen.jsonl --loss_agg sum --max_tokens_per_micro_batch 300
        --attn_implementation eager""",
}


def _micro_size(more: Sequence[str]) -> list[str]:
    """A limit of tokens takes the place of a number of samples."""
    return [] if "--max_tokens_per_micro_batch" in more else ["--micro_train_batch_size", "1"]


def rl_line(name: str, layout: str, folder, *more: str) -> list[str]:
    """The command line of a run of train_ppo on a layout. `folder` holds the demo and the reward."""
    flags = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl"]
    flags += ["--reward_func", f"{folder}/reward.py", "--label_key", "label", "--exact", "--param_dtype", "fp32"]
    flags += ["--advantage_estimator", "group_norm", "--rollout_batch_size", "4", "--n_samples_per_prompt", "4"]
    flags += ["--train_batch_size", "8", *_micro_size(more), "--micro_rollout_batch_size", "5"]
    flags += ["--prompt_max_len", "96", "--generate_max_len", "12", "--learning_rate", "1e-3", "--max_steps", "4"]
    flags += ["--device", "cpu", "--no_save", *more, *LAYOUTS[layout]]
    return ["train_ppo", *flags, "--output_dir", f"{folder}/{name}", "--parity_dump", f"{folder}/{name}/parity"]


def combined_rl_line(kind: str, layout: str, folder) -> list[str]:
    """A run of `OF_ROLLOUTS`: two rollouts of two prompts."""
    more = OF_ROLLOUTS[kind].format(folder=folder).split()
    return rl_line(f"{kind.replace(' ', '-')}-{layout}", layout, folder, "--rollout_batch_size", "2", *more)


# --- commands with rows

LABELS, PAIRS = "--input_key question --output_key answer", "--eval_fraction 0.3 --eval_steps 1"
OF_ROWS = {
    "tokens": ("train_sft", f"""{LABELS} --attn_implementation eager --selective_checkpointing --add_tokens <calc>,</calc>
        --max_norm 0.3 --lr_scheduler linear --warmup_steps 1 --adam_betas 0.8 0.9 --adam_eps 1e-4 --weight_decay 0.1
        --eval_dataset {{data}}/gsm8k/test.jsonl --max_eval_samples 3 --eval_steps 1 --max_epochs 2 --no_shuffle --seed 7
        --max_len 200 --cpu_matmul onednn"""),
    "text": ("train_sft", """--pretrain_mode --input_key answer --dataset {data}/gsm8k/train.jsonl,{data}/gsm8k/test.jsonl
        --dataset_probs 0.5,0.5 --min_lr_ratio 0.3 --max_norm 0 --max_tokens_per_micro_batch 300"""),
    "adapter": ("train_sft", f"""{LABELS} --lora_rank 4 --lora_alpha 3 --use_rslora --target_modules q_proj,down_proj,o_proj
        --lr_scheduler warmup_stable_decay --lr_warmup_ratio 0.5 --gradient_checkpointing {PAIRS}"""),
    "apart": ("train_dpo", f"""--loss apo_zero,robust --loss_weights 1 0.3 --label_smoothing 0.1 --nll_loss_coef 0.2 --beta 0.3
        --ref_model {{folder}}/steep-1.5 --ref_offload {PAIRS}"""),
    "divergence": ("train_dpo", "--loss cdpo,ipo --f_divergence alpha --f_alpha 0.7 --label_smoothing 0.1 --learning_rate 1e-5"),
    "many": ("train_dpo", "--loss hinge,apo_down,sppo,nca,bco"),
    "alone": ("train_dpo", "--loss simpo,orpo --simpo_gamma 0.2"),
    "centered": ("train_rm", f"--loss logexp --center_rewards_coef 0.1 --compute_fp32_loss {PAIRS}"),
    "margins": ("train_rm", "--margin_key margin --dataset {folder}/margins.jsonl --attn_implementation eager"),
    "teachers": ("train_kd", f"""--input_key prompt --output_key chosen --kd_coef 0.3 --kd_loss reverse_kl --kd_temperature 2
        --teacher {{folder}}/steep-1.5,{{data}}/models/stories260K-hf --teacher_weights 0.3 0.9 --teacher_offload {PAIRS}"""),
    "likeliest": ("train_kd", """--input_key prompt --output_key chosen --teacher {folder}/steep-1.5 --kd_loss jsd --kd_beta 0.3
        --kd_top_k 9"""),
}  # fmt: skip
# a ring refuses eager attention; a teacher's likeliest tokens are refused for split samples and vocabularies
REFUSED_LAYOUTS = {"tokens": {"f-ring2"}, "margins": {"f-ring2"}, "likeliest": {"f-ring2", "f-tp2"}}


def layouts_of(kind: str) -> list[str]:
    """Layouts of two ranks: all, or in CI one, another one for each kind of run."""
    layouts = [layout for layout in TWO_RANKS if layout not in REFUSED_LAYOUTS.get(kind, ())]
    return layouts if FULL else [layouts[list(OF_ROWS).index(kind) % len(layouts)]]


def row_line(kind: str, layout: str, folder, data) -> list[str]:
    """The command line of a run of `OF_ROWS` on a layout."""
    command, more = OF_ROWS[kind]
    rows = "train.jsonl" if command == "train_sft" else "pairs.jsonl"
    flags = ["--pretrain", f"{data}/models/stories260K-hf", "--dataset", f"{data}/gsm8k/{rows}", "--no_save"]
    flags += ["--max_len", "100", "--max_samples", "9", "--train_batch_size", "4", *_micro_size(more.split())]
    flags += ["--max_steps", "2", "--learning_rate", "1e-3", "--exact", "--param_dtype", "fp32"]
    flags += [*more.format(folder=folder, data=data).split(), *LAYOUTS[layout]]
    out = f"{folder}/{kind}-{layout}"
    return [command, *flags, "--output_dir", out, "--parity_dump", f"{out}/parity"]


MEASURED = ("time", "tokens_per_second", "peak_memory", "mfu", "sync_bytes", "eval_time", "step_time")


def numbers_of(run: Path) -> list[dict]:
    """All metrics of each step and of each evaluation, except what is measured with a clock or in bytes."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows if "event" not in row]
