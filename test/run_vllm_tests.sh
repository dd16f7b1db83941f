#!/usr/bin/env bash
# The tests of --rollout_engine vllm and vllm_server, in an environment of their own. More pytest flags go at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_vllm_env.sh
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# apart: vLLM makes the groups of experts once in a process, and only if the first model there has experts
python -m pytest test/rollout/test_vllm_mixtures.py --durations=10 "$@"
# apart: drafts import numba, behind which vLLM 0.32 starts no second engine in a process
python -m pytest test/rollout/test_vllm_drafts.py --durations=10 "$@"
python -m pytest test/rollout/test_vllm_engine.py test/rollout/test_vllm_server.py test/rollout/test_vllm_images.py \
    --durations=10 "$@"
