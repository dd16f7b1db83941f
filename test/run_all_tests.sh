#!/usr/bin/env bash
# Everything that CI runs: set-up, lint, format, the pages, the demo, the scripts, the tests. More pytest flags go at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
ruff check .
ruff format --check .
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet # the pages of docs/ as a site, in build/site
bash scripts/demo.sh
for SCRIPT in test/test_*.sh; do
    echo "=== $SCRIPT"
    bash "$SCRIPT"
done
# two workers: much of a launch is imports, which take one core; a file stays with one worker, for its fixtures
python -m pytest test -n 2 --dist loadfile --durations=10 "$@"
