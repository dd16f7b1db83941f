#!/usr/bin/env bash
# Environments of the package openenv-core through trainer/rollout/envs/openenv_env.py, unchanged.
# The package goes into .venv-openenv, on top of .venv: its versions of other packages may not suit the trainer.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=.venv-openenv
if [[ ! -f "$VENV/.installed-0.3.0" ]]; then
    .venv/bin/python -m venv --without-pip "$VENV"
    packages="$("$VENV/bin/python" -c "import site; print(site.getsitepackages()[0])")"
    .venv/bin/python -c "import site; print(site.getsitepackages()[0])" > "$packages/trainer.pth"
    "$VENV/bin/python" -m pip install --quiet "openenv-core==0.3.0"
    touch "$VENV/.installed-0.3.0"
fi
PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 "$VENV/bin/python" -m pytest test/rollout/test_openenv.py "$@"
