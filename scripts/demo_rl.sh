#!/usr/bin/env bash
# Reinforcement learning from nothing: SFT on the embedded demo until about half of its answers are right, then GRPO with
# both backends on 2 ranks, and a picture of their rewards.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
OUT="${OUT:-runs/demo_rl}"
rm -rf "$OUT"

torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_sft \
    --backend fsdp2 \
    --param_dtype fp32 \
    --max_steps 200 \
    --logging_steps 20 \
    --eval_steps 100 \
    --output_dir "$OUT/sft"

for BACKEND in fsdp2 deepspeed; do
    torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_ppo \
        --backend "$BACKEND" \
        --param_dtype fp32 \
        --pretrain "$OUT/sft/model" \
        --dataset demo/prompts.jsonl \
        --eval_dataset demo/prompts_eval.jsonl \
        --reward_func exact_match \
        --label_key label \
        --advantage_estimator group_norm \
        --rollout_batch_size 16 \
        --n_samples_per_prompt 8 \
        --micro_rollout_batch_size 64 \
        --train_batch_size 128 \
        --micro_train_batch_size 64 \
        --prompt_max_len 96 \
        --generate_max_len 32 \
        --learning_rate 2e-4 \
        --lr_scheduler constant \
        --max_steps 40 \
        --eval_steps 10 \
        --output_dir "$OUT/grpo-$BACKEND" \
        "$@"
done
python scripts/plot_rewards.py "$OUT/rewards.png" "$OUT/grpo-fsdp2" "$OUT/grpo-deepspeed"
echo "reward curves: $OUT/rewards.png"
