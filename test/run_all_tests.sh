#!/usr/bin/env bash
# Everything that CI runs: set-up, lint, format, the demo, the scripts, the tests. More pytest flags go at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
ruff check .
ruff format --check .
bash scripts/demo.sh
for SCRIPT in test/test_*.sh; do
    echo "=== $SCRIPT"
    bash "$SCRIPT"
done
python -m pytest test --durations=10 "$@"
