#!/usr/bin/env bash
# Run the trainer on the CUDA build of torch without a card. The first run makes an environment of 7 GB in build/.
#     test/fake_gpu/run.sh [flags of run_cells.py]
#     test/fake_gpu/run.sh measure_memory.py | memory_cells.py
set -euo pipefail
cd "$(dirname "$0")/../.."
ENVIRONMENT="${FAKE_GPU_ENVIRONMENT:-$PWD/build/fake_gpu_environment}"
PYTHON="$ENVIRONMENT/bin/python"
if [[ ! -f "$ENVIRONMENT/.installed" ]]; then
    "${BASE_PYTHON:-python3}" -m venv "$ENVIRONMENT"
    # "===" takes the build without a local version, which is the one for CUDA
    PIP_FIND_LINKS= "$PYTHON" -m pip install --quiet "torch===2.13.0" --index-url https://pypi.org/simple
    "$PYTHON" -m pip install --quiet -c constraints.txt -e ".[lora]"
    # apart: transformers would take fla's kernels wherever it can import them
    "$PYTHON" -m pip install --quiet --no-deps --target "$ENVIRONMENT/kernels" flash-linear-attention==0.6.0 fla-core==0.6.0 \
        liger-kernel==0.8.5 einops==0.8.2
    touch "$ENVIRONMENT/.installed"
fi
if [[ ! -d "$ENVIRONMENT/packages" ]]; then # apart: transformers imports torchao wherever it is installed
    "$PYTHON" -m pip install --quiet --no-deps -c constraints.txt --target "$ENVIRONMENT/packages" torchao bitsandbytes
fi
LIBRARIES="$ENVIRONMENT/fake_gpu"
"$PYTHON" test/fake_gpu/make_library.py "$LIBRARIES"
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export LD_PRELOAD="$LIBRARIES/libfakecuda.so" LD_LIBRARY_PATH="$LIBRARIES" FAKE_CUDA_DEVICES=4 PYTHONPATH="$PWD"
trap 'rm -f /dev/shm/fakenccl-*' EXIT
SCRIPT=run_cells.py
[[ "${1:-}" == *.py ]] && SCRIPT="$1" && shift
"$PYTHON" "test/fake_gpu/$SCRIPT" "$@"
