"""What a sync of weights costs: bytes that a rank sends, and collectives. sync_checks.py compares the weights themselves."""

import re

from launch import ROOT, in_fork


def test_a_rank_sends_each_weight_once_in_the_dtype_of_the_engine(tmp_path):
    """At most 2 bytes for a weight of a bf16 engine. Gathering masters would send 4, in a collective per tensor.

    An adapter is merged in fp32, so its layers are sent in fp32. ZeRO 2 has the rounded weights on every rank.
    """
    code, output = in_fork(str(ROOT / "test/rollout/sync_checks.py"), str(tmp_path), timeout=500)
    assert code == 0, output[-4000:]
    rows = re.findall(r"ok (\S+) sent (\S+) calls (\d+) tensors (\d+)", output)
    assert len(rows) == 13
    for name, sent, calls, tensors in rows:
        assert float(sent) <= (2 * 1.1 if "lora" in name else 1.1), name
        assert int(calls) <= 4 < int(tensors), name
    assert {name: sent for name, sent, *_ in rows}["z2-dp2"] == "0.000"
    slices = re.findall(r"ok (\S+) slices (\d) received (\S+) calls (\d+)", output)
    assert len(slices) == 22 and {int(engine_tp) for _, engine_tp, *_ in slices} == {1, 2, 3}
    for name, engine_tp, received, calls in slices:  # of 2 bytes per weight / engine_tp, the slice of a rank
        assert float(received) <= 1.1 and int(calls) <= 4, (name, engine_tp)
