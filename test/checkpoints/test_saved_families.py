"""What is saved and exported of 22 model families has the names, shapes and bits of the source. transformers loads it."""

import json

from launch import ROOT, in_fork


def test_saved_and_exported_models_are_the_source(tmp_path):
    script = str(ROOT / "test/checkpoints/saved_family_runs.py")
    code, output = in_fork(script, str(tmp_path), timeout=600)
    assert code == 0, output[-4000:]
    endings = json.loads(output.splitlines()[-1])
    assert len(endings) == 22 and not any(endings.values()), endings
