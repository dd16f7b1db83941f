#!/usr/bin/env bash
# SFT with FSDP2 and packed samples on NPROC ranks (default 2).
# Without --pretrain and --dataset it trains on the embedded demo.
# More flags go at the end: scripts/train_sft_fsdp2_packed.sh --learning_rate 1e-3
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
torchrun --standalone --nproc_per_node "${NPROC:-2}" -m trainer.cli.train_sft \
    --backend fsdp2 \
    --param_dtype bf16 \
    --packing_samples \
    "$@"
