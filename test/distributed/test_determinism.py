"""--deterministic is strict where it is promised, costs no filling of memory, and tells an operation that breaks it."""

import os
import sys
import threading

import pytest
import torch
from launch import ROOT, run_process

from trainer.distributed.determinism import without_refusals
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.parse_flags import from_flat
from trainer.flags.rules import refuse

# seeding for CUDA sets only flags, so it needs no GPU; put_ has no deterministic kernel on any device
CHECK = """
import os, torch
from trainer.entry import run_command
from trainer.distributed.mesh import seed_everything

def main(argv):
    seed_everything(1, False, torch.device("cuda"))
    assert not torch.are_deterministic_algorithms_enabled() and "FLASH_ATTENTION_DETERMINISTIC" not in os.environ
    seed_everything(1, True, torch.device("cuda"))
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1" and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    print("strict")
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))

run_command(main, [])
"""


def test_strict_and_told_in_one_line():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # scripts/gpu_branches.py traces by it
    code, output = run_process([sys.executable, "-c", CHECK], timeout=120, PYTHONPATH=path)
    assert "strict" in output, output
    assert code == 2 and "error: --deterministic: put_ does not have a deterministic implementation" in output
    assert "Traceback" not in output


def test_without_refusals_restores_the_mode():
    torch.use_deterministic_algorithms(True)
    try:
        with without_refusals():
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_thread_of_rollouts_cannot_leave_strict_mode():
    """The mode is the process's: training beside it would take kernels that are not deterministic."""
    found = []

    def rollouts():
        try:
            with without_refusals():
                found.append("left")
        except AssertionError:
            found.append("refused")

    thread = threading.Thread(target=rollouts)
    thread.start()
    thread.join()
    assert found == ["refused"]


def test_verify_resume_needs_deterministic_kernels():
    flags = from_flat(SFTArguments, {"verify_resume": 2, "deterministic": False})
    refuse("train_sft", flags, on_cpu=True)
    with pytest.raises(UserError, match="--verify_resume 2 with --deterministic false: on CUDA, no two passes"):
        refuse("train_sft", flags, on_gpu=True)
