#!/usr/bin/env bash
# SFT with DeepSpeed and ring attention on NPROC ranks (default 2). SP ranks (default 2) split each sequence.
# Without --pretrain and --dataset it trains on the embedded demo. More flags go at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
torchrun --standalone --nproc_per_node "${NPROC:-2}" -m trainer.cli.train_sft \
    --backend deepspeed \
    --ring_attn_size "${SP:-2}" \
    --packing_samples \
    --param_dtype bf16 \
    "$@"
