#!/usr/bin/env bash
# Environments of the package openenv-core through trainer/rollout/envs/openenv_env.py, unchanged.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv_on_top.sh
VENV=.venv-openenv
venv_on_top "$VENV" 0.3.0 "openenv-core==0.3.0"
PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 "$VENV/bin/python" -m pytest test/rollout/test_openenv.py "$@"
