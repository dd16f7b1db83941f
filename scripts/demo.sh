#!/usr/bin/env bash
# The whole main job: SFT on the embedded demo with both backends on 2 ranks, then a comparison of their losses.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
OUT="${OUT:-runs/demo}"
rm -rf "$OUT"

for BACKEND in deepspeed fsdp2; do
    echo "=== SFT with $BACKEND on 2 ranks"
    torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_sft \
        --backend "$BACKEND" \
        --param_dtype fp32 \
        --logging_steps 10 \
        --output_dir "$OUT/$BACKEND"
done

echo "=== the same loss curve?"
python compare_backends.py \
    --deepspeed_log "$OUT/deepspeed" \
    --fsdp2_log "$OUT/fsdp2" \
    --threshold 1e-4 \
    --max_rows 8 \
    --plot "$OUT/loss_curves.png"

echo "=== the trained model, loaded with transformers"
python scripts/ask.py "$OUT/fsdp2/model" demo/prompts_eval.jsonl

cat <<EOF

Loss curves: $OUT/loss_curves.png      Model: $OUT/fsdp2/model      Every step: $OUT/fsdp2/metrics.jsonl

To train on your own data (JSONL rows with "messages", or any two columns):
    source .venv/bin/activate
    torchrun --nproc_per_node 2 -m trainer.cli.train_sft --backend fsdp2 \\
        --pretrain path/to/model --dataset data.jsonl --input_key question --output_key answer --apply_chat_template \\
        --train_batch_size 32 --micro_train_batch_size 4 --learning_rate 1e-5 --output_dir runs/mine
EOF
