#!/usr/bin/env bash
# SFT with DeepSpeed ZeRO-2 on NPROC ranks (default 2). Without --pretrain and --dataset it trains on the embedded demo.
# More flags go at the end: scripts/train_sft_deepspeed.sh --zero_stage 3
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
torchrun --standalone --nproc_per_node "${NPROC:-2}" -m trainer.cli.train_sft \
    --backend deepspeed \
    --zero_stage 2 \
    --param_dtype bf16 \
    "$@"
