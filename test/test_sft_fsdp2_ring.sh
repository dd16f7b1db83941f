#!/usr/bin/env bash
# The script of this configuration, run on the embedded demo: the loss must fall under half of its start.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
OUT="$(mktemp -d)"
trap 'rm -rf "$OUT"' EXIT
bash scripts/train_sft_fsdp2_ring.sh --logging_steps 20 --output_dir "$OUT/run" "$@"
python test/assert_learned.py "$OUT/run"
