#!/usr/bin/env bash
# SFT with DeepSpeed ZeRO-3 on NPROC ranks (default 2). Without --pretrain and --dataset it trains on the embedded demo.
# More flags go at the end: scripts/train_sft_deepspeed_zero3.sh --adam_offload
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
torchrun --standalone --nproc_per_node "${NPROC:-2}" -m trainer.cli.train_sft \
    --backend deepspeed \
    --zero_stage 3 \
    --param_dtype bf16 \
    "$@"
