"""Meshes over the same ranks share a process group: each one is a communicator with memory of its own."""

from launch import ROOT, in_fork


def test_no_two_groups_have_the_same_ranks_and_each_has_the_right_ones():
    code, output = in_fork(str(ROOT / "test/distributed/mesh_groups.py"))
    assert code == 0, output[-3000:]
    assert output.count("ok") == 8
