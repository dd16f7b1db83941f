#!/usr/bin/env bash
# SFT with FSDP2 and tensor parallelism on NPROC ranks (default 2). TP ranks (default 2) split each layer.
# Without --pretrain and --dataset it trains on the embedded demo. More flags go at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
torchrun --standalone --nproc_per_node "${NPROC:-2}" -m trainer.cli.train_sft \
    --backend fsdp2 \
    --tensor_parallel_size "${TP:-2}" \
    --packing_samples \
    --param_dtype bf16 \
    "$@"
