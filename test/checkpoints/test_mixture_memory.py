"""A rank that loads or saves a mixture of experts needs its share and one tensor. mixture_memory.py measures it."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from launch import ROOT, run_process

from scripts.measured_memory import GLIBC
from trainer.planning.predicted_memory import BUFFER_BYTES, predict

SLACK = 8 << 20  # for what is not tensors
LAYERS = 4  # 41 M parameters


def test_a_rank_holds_its_share_and_one_tensor():
    root = "/dev/shm" if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 2 << 30 else None
    with tempfile.TemporaryDirectory(dir=root) as folder:
        script = str(ROOT / "test/checkpoints/mixture_memory.py")
        code, output = run_process([sys.executable, script, folder, str(LAYERS)], timeout=300, **GLIBC)
    assert code == 0, output[-4000:]
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
    assert [(backend, ranks) for backend, ranks, *_ in lines] == [*(("fsdp2", n) for n in (1, 2, 4)), ("deepspeed", 2)]
    for backend, ranks, num_params, largest, found in lines:
        tensor, share = 4 * largest, predict(backend, 3, "bf16", ranks, num_params).load
        gathered = tensor if ranks == 1 else 2 * tensor  # gloo copies what it gathers; NCCL does not
        allowed = {"load": share + tensor, "write": BUFFER_BYTES, "read": tensor, "save": gathered}
        for phase, size in allowed.items():
            assert found[phase] <= size + SLACK, (backend, ranks, phase, found, allowed)
