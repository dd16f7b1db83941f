"""How often a micro-batch waits for a GPU."""

import json

import pytest
from launch import ROOT, forked

from trainer.datasets.demos.demo import make_demo


@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "demo"
    make_demo(str(folder))
    code, output = forked(1, str(ROOT / "test/training/sync_counts.py"), str(folder), timeout=400)
    assert code == 0, output[-6000:]
    return json.loads((folder / "syncs.json").read_text())


def per_micro_batch(waits: dict, name: str) -> tuple[list[str], int]:
    """The places where a step waits, without the one at its end that reads the loss, and its number of micro-batches."""
    (num_micro_batches, places), at_end = waits[name][-1], "tolist in loop.py:forward_backward"
    assert num_micro_batches >= 4 and places.count(at_end) == 1
    return [place for place in places if place != at_end], num_micro_batches


@pytest.mark.parametrize("chunks", ["", "_by_linear_loss"])
@pytest.mark.parametrize(
    "name",
    ["packed", "packed_zero_2", "padded", "padded_zero_0", "padded_zero_2", "dpo", "dpo_zero_2", "dpo_packed"]
    + [f"{name}{role}" for name in ("ppo", "ppo_zero_2", "ppo_packed") for role in ("", "_critic")],
)
def test_a_micro_batch_never_waits(waits, name, chunks):
    """But once for the sizes of the sets that --top_p kept, if the logits are made in chunks."""
    name, of_sets = name + chunks, "tolist in policy_values.py:_by_chunks"
    places, num_micro_batches = per_micro_batch(waits, name)
    has_sets = name.startswith("ppo") and name.endswith("linear_loss") and "critic" not in name
    assert places == [of_sets] * num_micro_batches * has_sets
