#!/usr/bin/env bash
# GRPO on pictures of digits with both backends on 2 ranks, from a model that reads some of them.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
OUT="${OUT:-runs/demo_vision_rl}"
SFT_STEPS="${SFT_STEPS:-210}"
STEPS="${STEPS:-240}"
rm -rf "$OUT"
python -m trainer.cli.make_demo --vision --output_dir demo_vision

torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_sft \
    --backend fsdp2 \
    --pretrain demo_vision/model \
    --dataset demo_vision/train.jsonl \
    --freeze_vision false \
    --param_dtype fp32 \
    --max_len 64 \
    --train_batch_size 32 \
    --micro_train_batch_size 16 \
    --learning_rate 1e-3 \
    --lr_scheduler constant \
    --max_steps "$SFT_STEPS" \
    --logging_steps 50 \
    --output_dir "$OUT/sft"

for BACKEND in fsdp2 deepspeed; do
    echo "=== GRPO with $BACKEND on 2 ranks"
    torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_ppo \
        --backend "$BACKEND" \
        --pretrain "$OUT/sft/model" \
        --dataset demo_vision/prompts.jsonl \
        --eval_dataset demo_vision/prompts_eval.jsonl \
        --label_key label \
        --reward_func exact_match \
        --advantage_estimator group_norm \
        --freeze_vision false \
        --param_dtype fp32 \
        --rollout_batch_size 32 \
        --n_samples_per_prompt 8 \
        --micro_rollout_batch_size 64 \
        --train_batch_size 256 \
        --micro_train_batch_size 64 \
        --prompt_max_len 64 \
        --generate_max_len 8 \
        --learning_rate 6e-4 \
        --lr_scheduler constant \
        --num_episodes 4 \
        --max_steps "$STEPS" \
        --eval_steps 40 \
        --logging_steps 10 \
        --output_dir "$OUT/$BACKEND" \
        "$@"
done
