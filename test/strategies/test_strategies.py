"""Each strategy standing alone on two ranks; the checks themselves are in strategy_checks.py."""

import pytest
from launch import ROOT, torchrun

from trainer.datasets.demo import make_demo


@pytest.mark.parametrize(("backend", "num_stages"), [("deepspeed", 4), ("fsdp2", 2)])
def test_strategy_stands_alone(backend, num_stages, tmp_path):
    make_demo(str(tmp_path / "demo"))
    script = str(ROOT / "test/strategies/strategy_checks.py")
    code, output = torchrun(2, script, backend, str(tmp_path / "demo"), timeout=400)
    assert code == 0, output[-6000:]
    assert output.count("ok check_") == 8 * num_stages
