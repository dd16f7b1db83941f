"""The heads of linear attention, Mamba 2 and short convolutions, shared out over the ranks of tp and of sp."""

from launch import ROOT, in_fork


def test_a_mixer_with_shared_heads_is_the_whole_one():
    """Output, input gradient and every weight gradient, on 4 ranks that are threads: sp 4, tp 4, sp 2 with tp 2, packed."""
    code, output = in_fork(str(ROOT / "test/models/head_share_checks.py"), timeout=300)
    assert code == 0, output[-6000:]
    assert output.count("ok ") == 14 * 4, output
