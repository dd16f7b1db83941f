"""Each strategy on two ranks, without the trainer. The checks themselves are in strategy_checks.py."""

import os
import sys
from pathlib import Path

import pytest
from doc_blocks import read_blocks, statements
from launch import ROOT, forked, run_process

CHECKS = ROOT / "test/strategies/strategy_checks.py"
FOLDER_OF_PAGE = "/tmp/ddp_demo"


@pytest.mark.parametrize(("backend", "num_stages"), [("deepspeed", 4), ("fsdp2", 2)])
def test_strategy_stands_alone(backend, num_stages, tmp_path):
    code, output = forked(2, str(CHECKS), backend, str(tmp_path / "demo"), timeout=400)
    assert code == 0, output[-6000:]
    assert output.count("ok check_") == 8 * num_stages


def test_the_third_strategy_stands_alone_by_the_command_of_its_page(tmp_path):
    blocks = read_blocks(ROOT / "docs/new_strategy.md", "new_strategy.md")
    [line] = [text for block in blocks if block.language == "bash" for _, text in statements(block)]
    assert CHECKS.name in line and FOLDER_OF_PAGE in line
    line = line.replace(FOLDER_OF_PAGE, str(tmp_path / "demo"))
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    code, output = forked(2, str(CHECKS), "ddp", str(tmp_path / "demo"), timeout=400)
    assert code == 0, output[-6000:]
    code, output = run_process(["bash", "-c", line], timeout=400, PATH=path)  # a folder of an earlier run does no harm
    assert code == 0, output[-6000:]
    assert output.count("ok check_") == 8


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


WITHOUT_COMPILER = """
import sys
from trainer.cli import train_sft

train_sft.run(sys.argv[1:])
print("imported:", *{"deepspeed.runtime.zero.muon.muon_optimizer", "torch._inductor.compile_fx"} & sys.modules.keys())
"""


def test_deepspeed_starts_without_the_compiler(tmp_path):
    """It would be a second of every start, for a Muon that no run uses."""
    flags = ["--backend", "deepspeed", "--max_steps", "1", "--no_save", "--output_dir", str(tmp_path / "run")]
    code, output = run_process([sys.executable, "-c", WITHOUT_COMPILER, *flags, "--device", "cpu"], timeout=120)
    assert code == 0 and "imported: deepspeed.runtime.zero.muon.muon_optimizer\n" in output, output[-3000:]
