# Sourced by each test_*.sh with the name of a script: run it on the embedded demo; the loss must fall under half of its start.
set -euo pipefail
SCRIPT="$1"
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
OUT="$(mktemp -d)"
trap 'rm -rf "$OUT"' EXIT
bash "scripts/$SCRIPT" --max_steps 30 --logging_steps 10 --output_dir "$OUT/run" "$@"
python test/assert_learned.py "$OUT/run"
