"""docs/new_loss.md is followed to the letter, in a copy of the package: its functions and entries go in, its commands run."""

import importlib.util
import json
import math
import re
import shutil
import sys

import pytest
import torch
from doc_blocks import read_blocks, read_commands
from doc_runs import make_base, shorten
from launch import ROOT, read_steps, torchrun

BLOCKS = read_blocks(ROOT / "docs" / "new_loss.md", "new_loss.md")
# file, table, what the function of the page begins with, what its entry begins with
ADDED = [
    ("preference_loss.py", "PAIR_LOSSES", "def squared_hinge_loss(", '"squared_hinge": '),
    ("policy_loss.py", "POLICY_LOSSES", "def _weighted(", '"weighted": '),
]
FASTER = ["--learning_rate", "1e-3", "--lr_scheduler", "constant", "--param_dtype", "fp32"]  # the second step shows it


def python_of(beginning: str) -> str:
    """The Python block of the page with a line that begins like this."""
    lines = re.compile(rf"^\s*{re.escape(beginning)}", re.MULTILINE)
    [text] = [block.text for block in BLOCKS if block.language == "python" and lines.search(block.text)]
    return text


def add_to_table(source: str, table: str, function: str, entry: str) -> str:
    """The source with the function before the table and the entry in it."""
    head = re.compile(rf"^{table}\b.*= \{{\n", re.MULTILINE)
    assert len(head.findall(source)) == 1, table
    return head.sub(lambda found: f"{function}\n\n{found.group()}{entry}", source)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder in which the commands of the page have run, with the changed copy of the package."""
    folder = tmp_path_factory.mktemp("new_loss")
    make_base(folder)
    shutil.copytree(ROOT / "trainer", folder / "trainer")
    for name, table, function, entry in ADDED:
        path = folder / "trainer/models/losses" / name
        path.write_text(add_to_table(path.read_text(), table, python_of(function), python_of(entry)))
    commands = [command for block in BLOCKS for command in read_commands(block, ROOT) if command.kind == "train"]
    assert [command.argv[0] for command in commands] == ["train_dpo", "train_ppo"]
    shorten(commands, port=0)
    lines = [[*command.argv, *FASTER] for command in commands]
    (folder / "runs.json").write_text(json.dumps(lines))
    module = "trainer.compare.runs.many_runs"
    code, output = torchrun(2, "-m", module, "runs.json", cwd=folder, timeout=400, PYTHONPATH=str(folder))
    assert code == 0, output[-6000:]
    return folder / "runs"


def test_the_pair_loss_trains(runs):
    steps = read_steps(runs / "new_pair_loss")
    assert steps[0]["loss"] == pytest.approx(1, abs=1e-9)  # policy and reference are equal: max(0, 1 - 0)^2
    assert steps[-1]["loss"] != steps[0]["loss"]


def test_the_policy_loss_trains(runs):
    assert read_steps(runs / "new_policy_loss")
    path = runs.parent / "trainer/models/losses/policy_loss.py"
    spec = importlib.util.spec_from_file_location("changed_policy_loss", path)
    changed = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = changed  # dataclasses look their module up
    spec.loader.exec_module(changed)
    log_ratio, advantages = torch.tensor([[0.0, 0.5, -2.0]]).double(), torch.tensor([[1.0, -2.0, 3.0]]).double()
    tokens = changed.PolicyTokens(log_ratio, log_ratio, advantages, mean_by_sequence=None)
    losses, clipped, used = changed.POLICY_LOSSES["weighted"](tokens, changed.PolicyOptions())
    assert losses.tolist()[0] == pytest.approx([-1, 2 * math.exp(0.5), -3 * math.exp(-2)])
    assert not clipped.any() and used.equal(log_ratio)
