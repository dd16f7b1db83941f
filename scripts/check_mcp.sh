#!/usr/bin/env bash
# The tools of a server that the package mcp makes, through trainer/rollout/envs/mcp_env.py.
# The package goes into .venv-mcp, which only the server uses.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=.venv-mcp
if [[ ! -f "$VENV/.installed" ]]; then
    .venv/bin/python -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet "mcp>=1.10"
    touch "$VENV/.installed"
fi
PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 MCP_SERVER="$VENV/bin/python test/mcp_package_server.py" \
    .venv/bin/python -m pytest test/rollout/test_mcp_env.py "$@"
