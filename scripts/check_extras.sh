#!/usr/bin/env bash
# Resolve each extra of setup.py beside the tested torch: scripts/check_extras.sh [EXTRA ...]
# It needs the network and a minute or more for each, and installs nothing. It fails if an extra does not resolve: some
# package of it then wants another torch, or the ranges exclude each other.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
EXTRAS=("$@")
if [[ ${#EXTRAS[@]} == 0 ]]; then
    mapfile -t EXTRAS < <("$PYTHON" -c '
import setuptools
setuptools.setup = lambda **facts: print("\n".join(facts["extras_require"]))
exec(open("setup.py").read())')
fi
FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT
grep "^torch==" constraints.txt > "$FOLDER/torch.txt"
FAILED=0
for EXTRA in "${EXTRAS[@]}"; do
    # --ignore-installed: what is installed here must not hide what a new environment would get
    if "$PYTHON" -m pip install --dry-run --quiet --ignore-installed --no-build-isolation -c "$FOLDER/torch.txt" \
        --report "$FOLDER/report.json" ".[$EXTRA]" > "$FOLDER/log.txt" 2>&1; then
        "$PYTHON" - "$EXTRA" "$FOLDER/report.json" <<'CODE'
import json
import sys

packages = {entry["metadata"]["name"].lower(): entry["metadata"] for entry in json.load(open(sys.argv[2]))["install"]}
wanted = [text.split(";")[0].strip() for text in packages["trainer"]["requires_dist"] if f'extra == "{sys.argv[1]}"' in text]
names = sorted({text.split("[")[0].split(">")[0].split("<")[0].split("=")[0].lower() for text in wanted})
found = ", ".join(f"{name} {packages[name]['version']}" for name in ["torch", *names] if name in packages)
print(f"ok    {sys.argv[1]}: {found}")
CODE
    else
        echo "FAIL  $EXTRA: $(grep -m1 -E "ERROR|error" "$FOLDER/log.txt" || tail -1 "$FOLDER/log.txt")"
        FAILED=1
    fi
done
exit $FAILED
