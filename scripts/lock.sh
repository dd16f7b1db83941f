#!/usr/bin/env bash
# Install the versions of constraints.txt into .venv, without hashes. Then write requirements.lock: the versions that .venv has,
# with the sha256 of each file that the package index has of them.
# torch is left out: its builds for the CPU and for CUDA have other hashes, and come from other indexes.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/pip install --quiet -c constraints.txt -e ".[dev]"
[[ -x build/lock/bin/uv ]] || { python3 -m venv build/lock && build/lock/bin/pip install --quiet uv; }
LEFT_OUT='^(torch|torchvision|triton|nvidia-.*|cuda-.*|pip|setuptools)=='
.venv/bin/pip list --format freeze --exclude-editable | grep -Ev "$LEFT_OUT" > build/lock/installed.txt
build/lock/bin/uv pip compile build/lock/installed.txt --quiet --no-deps --generate-hashes --no-header --no-annotate \
    --python .venv/bin/python --output-file requirements.lock
