"""Embedding and head have FSDP groups of their own: the root does not hold both, whole, for the whole step."""

import json

from launch import ROOT, read_steps, torchrun

VOCAB, WIDTH, LAYERS = 20000, 128, 2


def test_groups_of_embedding_and_head_lower_the_peak(tmp_path):
    folder = tmp_path / "demo"
    command = [str(ROOT / "test/strategies/group_memory.py"), str(folder), *map(str, (VOCAB, WIDTH, LAYERS))]
    code, output = torchrun(2, *command, timeout=300)
    assert code == 0, output[-6000:]
    peaks = json.loads((folder / "peaks.json").read_text())
    assert peaks["split"][0] <= peaks["whole"][0] - 2 * VOCAB * WIDTH  # one matrix in bf16
    # a group is gathered for each of the two passes, but the root, which goes from one to the other, only once
    gathers = {name: number for name, (_, number) in peaks.items()}
    assert gathers == {"whole": 2 * LAYERS + 1, "split": 2 * (LAYERS + 2) + 1}
    for one, other in zip(read_steps(folder / "split"), read_steps(folder / "whole"), strict=True):
        assert one["loss"] == other["loss"]
