"""Ranks wait for rank 0 for as long as its work takes, while a hang in training still ends the run."""

from launch import ROOT, forked, torchrun


def test_a_slow_rank_0_is_waited_for(tmp_path):
    """Also while it writes a part of a checkpoint, or commits one to a slow disk."""
    code, output = torchrun(2, str(ROOT / "test/distributed/slow_rank_0.py"), str(tmp_path), timeout=120)
    assert "the checkpoint is whole" in output, output[-3000:]
    assert "training does not wait so long" in output and "AssertionError" not in output, output[-3000:]
    assert code in (0, 1), output[-3000:]


def test_the_first_rank_of_each_node_prepares_data_for_it(tmp_path):
    """Nodes that share their caches use what rank 0 made."""
    code, output = forked(4, str(ROOT / "test/distributed/node_caches.py"), str(tmp_path), timeout=120)
    assert code == 0 and "each node prepared its rows" in output, output[-3000:]
