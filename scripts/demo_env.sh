#!/usr/bin/env bash
# Reinforcement learning with an environment of two turns, on 2 ranks. SFT shows the tiny model the form of a
# conversation with a calculator. GRPO then teaches it to ask for the right sum and to quote the result.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
OUT="${OUT:-runs/demo_env}"
rm -rf "$OUT"
python -m trainer.cli.make_demo --output_dir "$OUT/demo"
python scripts/calculator_env.py "$OUT/data"

torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_sft \
    --backend fsdp2 \
    --param_dtype fp32 \
    --pretrain "$OUT/demo/model" \
    --dataset "$OUT/data/sft.jsonl" \
    --multiturn \
    --max_len 96 \
    --train_batch_size 32 \
    --micro_train_batch_size 16 \
    --learning_rate 2e-3 \
    --lr_scheduler constant \
    --max_steps 150 \
    --logging_steps 50 \
    --output_dir "$OUT/sft"

torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_ppo \
    --backend "${BACKEND:-fsdp2}" \
    --param_dtype fp32 \
    --pretrain "$OUT/sft/model" \
    --dataset "$OUT/data/prompts.jsonl" \
    --eval_dataset "$OUT/data/prompts_eval.jsonl" \
    --env scripts/calculator_env.py \
    --env_max_turns 2 \
    --advantage_estimator group_norm \
    --rollout_batch_size 16 \
    --n_samples_per_prompt 8 \
    --micro_rollout_batch_size 64 \
    --train_batch_size 128 \
    --micro_train_batch_size 64 \
    --prompt_max_len 32 \
    --generate_max_len 64 \
    --learning_rate 5e-4 \
    --lr_scheduler constant \
    --max_steps 40 \
    --eval_steps 10 \
    --logging_steps 10 \
    --output_dir "$OUT/grpo" \
    "$@"
