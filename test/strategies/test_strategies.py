"""Each strategy on two ranks, without the trainer. The checks themselves are in strategy_checks.py."""

import os
import sys

import pytest
import torch
from launch import ROOT, forked, run_process
from transformers import AutoModelForCausalLM

from trainer.datasets.demos.demo import make_demo


@pytest.mark.parametrize(("backend", "num_stages"), [("deepspeed", 4), ("fsdp2", 2), ("ddp", 1)])
def test_strategy_stands_alone(backend, num_stages, tmp_path):
    make_demo(str(tmp_path / "demo"))
    demo_model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo/model", dtype=torch.float16)
    demo_model.save_pretrained(tmp_path / "demo/fp16")
    script = str(ROOT / "test/strategies/strategy_checks.py")
    code, output = forked(2, script, backend, str(tmp_path / "demo"), timeout=400)
    assert code == 0, output[-6000:]
    assert output.count("ok check_") == 8 * num_stages


ALONE = """
import os
import torch, torch.distributed as dist
from trainer.strategies.fsdp2 import FSDP2Strategy
from trainer.distributed.collectives import broadcast_object, gather_objects
from trainer.strategies.options import StrategyOptions

torch.set_num_threads(2)
strategy = FSDP2Strategy(StrategyOptions(device="cpu"))
strategy.setup_distributed()
large = torch.ones(1 << 20)
large.mul(2)  # OpenMP's threads of the main thread are there now
threads = len(os.listdir("/proc/self/task"))
assert gather_objects(large)[0] is large and broadcast_object(large) is large
assert strategy.all_reduce(large).sum() == large.numel() and strategy.all_gather(large)[0].equal(large)
found = len(os.listdir("/proc/self/task"))
dist.all_gather_object([None], large)
print("more threads:", found - threads, len(os.listdir("/proc/self/task")) - found)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_a_rank_alone_starts_no_threads_to_communicate():
    """Gloo would start its own OpenMP threads, and those slow every small operation of the process."""
    code, output = run_process([sys.executable, "-c", ALONE], timeout=120)
    assert code == 0, output[-3000:]
    assert "more threads: 0 " in output and "more threads: 0 0" not in output, output
