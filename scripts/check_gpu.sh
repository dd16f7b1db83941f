#!/usr/bin/env bash
# Check the trainer on the GPUs of this machine, and write docs/gpu.md: scripts/check_gpu.sh [--tiny] [--out FILE] [--part NAME ...]
cd "$(dirname "$0")/.." || exit 1
source scripts/setup_env.sh
exec python -m scripts.check_gpu "$@"
