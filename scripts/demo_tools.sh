#!/usr/bin/env bash
# Reinforcement learning with tool calls, on 2 ranks and both backends. SFT shows the tiny model the form of a conversation with
# a tool that adds. GRPO then teaches it to call the tool with the right numbers, and to quote the result.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
OUT="${OUT:-runs/demo_tools}"
rm -rf "$OUT"
python -m trainer.cli.make_demo --output_dir "$OUT/demo"
python scripts/adder_env.py "$OUT/data"

torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_sft \
    --backend fsdp2 \
    --param_dtype fp32 \
    --pretrain "$OUT/demo/model" \
    --dataset "$OUT/data/sft.jsonl" \
    --tokenizer_chat_template scripts/adder.jinja \
    --multiturn \
    --max_len 128 \
    --train_batch_size 32 \
    --micro_train_batch_size 16 \
    --learning_rate 2e-3 \
    --lr_scheduler constant \
    --max_steps 600 \
    --logging_steps 200 \
    --output_dir "$OUT/sft"

for backend in ${BACKENDS:-fsdp2 deepspeed}; do
    torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_ppo \
        --backend "$backend" \
        --param_dtype fp32 \
        --pretrain "$OUT/sft/model" \
        --dataset "$OUT/data/prompts.jsonl" \
        --eval_dataset "$OUT/data/prompts_eval.jsonl" \
        --env scripts/adder_env.py \
        --env_max_turns 2 \
        --advantage_estimator group_norm \
        --rollout_batch_size 16 \
        --n_samples_per_prompt 8 \
        --micro_rollout_batch_size 64 \
        --train_batch_size 128 \
        --micro_train_batch_size 64 \
        --prompt_max_len 64 \
        --generate_max_len 80 \
        --learning_rate 5e-4 \
        --lr_scheduler constant \
        --max_steps 40 \
        --eval_steps 10 \
        --logging_steps 10 \
        --output_dir "$OUT/grpo_$backend" \
        "$@"
done
