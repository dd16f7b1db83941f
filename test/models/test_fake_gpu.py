"""No loss mixes tensors of host and device, and none waits for a GPU: every loss runs on fake tensors of a device."""

import sys

from launch import ROOT, run_process


def test_every_loss_stays_on_its_device_and_waits_for_nothing():
    code, output = run_process([sys.executable, str(ROOT / "test/models/fake_gpu.py")], timeout=400)
    assert code == 0, output[-4000:]
    assert output.count("ok ") == 28 + 3 * 7, output
