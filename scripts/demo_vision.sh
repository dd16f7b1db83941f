#!/usr/bin/env bash
# SFT on pictures of digits with both backends on 2 ranks: the same loss curve, and answers to held-out pictures.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
OUT="${OUT:-runs/demo_vision}"
STEPS="${STEPS:-450}"
rm -rf "$OUT"
python -m trainer.cli.make_demo --vision --output_dir demo_vision

for BACKEND in deepspeed fsdp2; do
    echo "=== SFT with $BACKEND on 2 ranks"
    torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_sft \
        --backend "$BACKEND" \
        --pretrain demo_vision/model \
        --dataset demo_vision/train.jsonl \
        --eval_dataset demo_vision/eval.jsonl \
        --freeze_vision false \
        --param_dtype fp32 \
        --max_len 64 \
        --train_batch_size 32 \
        --micro_train_batch_size 16 \
        --learning_rate 1e-3 \
        --lr_scheduler warmup_stable_decay \
        --max_steps "$STEPS" \
        --logging_steps 50 \
        --output_dir "$OUT/$BACKEND" \
        "$@"
    python scripts/ask_vision.py "$OUT/$BACKEND/model" demo_vision/eval.jsonl
done

echo "=== the same loss curve?"
python compare_backends.py \
    --deepspeed_log "$OUT/deepspeed" \
    --fsdp2_log "$OUT/fsdp2" \
    --threshold 1e-3 \
    --max_rows 8
