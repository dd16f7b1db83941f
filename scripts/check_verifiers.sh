#!/usr/bin/env bash
# Environments of the packages verifiers and reasoning-gym through trainer/rollout/envs/verifiers_env.py, unchanged.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv_on_top.sh
VENV=.venv-verifiers
venv_on_top "$VENV" 0.4.0 "verifiers==0.4.0" "reasoning-gym==0.1.25" uv
# uv installs the chat program of verifiers
PATH="$PWD/$VENV/bin:$PATH" PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 "$VENV/bin/python" -m pytest test/rollout/test_verifiers.py "$@"
