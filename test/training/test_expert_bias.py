"""--expert_bias_update_rate: biases of routers move as in the plain loop, in every layout."""

import json

import pytest
from launch import ROOT, in_fork


@pytest.fixture(scope="module")
def endings(tmp_path_factory) -> dict[str, list]:
    script = str(ROOT / "test/training/expert_bias_runs.py")
    code, output = in_fork(script, str(tmp_path_factory.mktemp("bias")), timeout=400)
    assert code == 0, output[-4000:]
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("run", ["deepspeed", "recomputed", "packed", "ring", "ep", "tp"])
def test_biases_move_as_in_the_plain_loop(endings, run):
    verdict, note, moved = endings[run]
    assert verdict == "pass", note
    assert moved == pytest.approx(0.02, rel=1e-3)  # two steps of 0.01, of the expert that moved the most


def test_a_model_without_such_biases_is_refused(endings):
    verdict, note, _ = endings["no bias"]
    assert verdict == "refused" and "no router of qwen3_moe has e_score_correction_bias" in note
