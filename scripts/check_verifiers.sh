#!/usr/bin/env bash
# Environments of the packages verifiers and reasoning-gym through trainer/rollout/envs/verifiers_env.py, unchanged.
# The packages go into .venv-verifiers, on top of .venv: their versions of other packages may not suit the trainer.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=.venv-verifiers
if [[ ! -f "$VENV/.installed-0.4.0" ]]; then
    .venv/bin/python -m venv --without-pip "$VENV"
    packages="$("$VENV/bin/python" -c "import site; print(site.getsitepackages()[0])")"
    .venv/bin/python -c "import site; print(site.getsitepackages()[0])" > "$packages/trainer.pth"
    "$VENV/bin/python" -m pip install --quiet "verifiers==0.4.0" "reasoning-gym==0.1.25" uv
    touch "$VENV/.installed-0.4.0"
fi
# uv installs the chat program of verifiers
PATH="$PWD/$VENV/bin:$PATH" PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 "$VENV/bin/python" -m pytest test/rollout/test_verifiers.py "$@"
