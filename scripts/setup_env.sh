#!/usr/bin/env bash
# Create .venv and install the trainer into it. Does nothing if this is done already. Source it or run it.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
( # a subshell, so that a shell that sources this keeps its options
set -euo pipefail
PYTHON="${PYTHON:-python3}"
STAMP="$ROOT/.venv/.installed"
WANTED="$(cat "$ROOT/setup.py" "$ROOT/constraints.txt" "$ROOT/requirements.lock" | cksum)"
if [[ ! -f "$STAMP" || "$(cat "$STAMP")" != "$WANTED" ]]; then
    echo "installing into $ROOT/.venv (a few minutes, once)"
    [[ -x "$ROOT/.venv/bin/python" ]] || "$PYTHON" -m venv "$ROOT/.venv"
    "$ROOT/.venv/bin/pip" install --quiet --upgrade-strategy only-if-needed -c "$ROOT/constraints.txt" "torch==2.13.0"
    PLACE="$("$ROOT/.venv/bin/python" -c 'import platform as p; print(*p.python_version_tuple()[:2], p.system(), p.machine())')"
    if [[ "$PLACE" == "3 11 Linux x86_64" ]]; then # the lock is made here, and only its files may be installed
        "$ROOT/.venv/bin/pip" install --quiet --require-hashes --no-deps -r "$ROOT/requirements.lock"
        "$ROOT/.venv/bin/pip" install --quiet --no-deps -e "$ROOT"
    else
        "$ROOT/.venv/bin/pip" install --quiet -c "$ROOT/constraints.txt" -e "$ROOT[dev]"
    fi
    # apart: transformers imports torchao wherever it is installed, and each start would take half a second more
    for PACKAGE in torchao bitsandbytes; do
        "$ROOT/.venv/bin/pip" install --quiet --no-deps -c "$ROOT/constraints.txt" --target "$ROOT/.venv/apart" --upgrade "$PACKAGE" ||
            echo "$PACKAGE is not installed: its tests are skipped"
    done
    echo "$WANTED" > "$STAMP"
fi
)
[[ $? == 0 ]] || { return 1 2>/dev/null || exit 1; }  # not `( ... ) ||`: set -e does nothing inside that
export PATH="$ROOT/.venv/bin:$PATH"
