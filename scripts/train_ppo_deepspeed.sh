#!/usr/bin/env bash
# PPO with DeepSpeed ZeRO-2 on NPROC ranks (default 2). Without --pretrain and --dataset it trains on the embedded demo.
# A policy that train_sft has trained a little learns fastest: see scripts/demo_rl.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
torchrun --standalone --nproc_per_node "${NPROC:-2}" -m trainer.cli.train_ppo \
    --backend deepspeed \
    --zero_stage 2 \
    --advantage_estimator gae \
    --param_dtype bf16 \
    "$@"
