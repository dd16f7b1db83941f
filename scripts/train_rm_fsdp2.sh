#!/usr/bin/env bash
# A reward model with FSDP2 on NPROC ranks (default 2).
# Without --pretrain and --dataset it trains on the embedded demo.
# More flags go at the end: scripts/train_rm_fsdp2.sh --learning_rate 1e-3
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
torchrun --standalone --nproc_per_node "${NPROC:-2}" -m trainer.cli.train_rm \
    --backend fsdp2 \
    --param_dtype bf16 \
    "$@"
