"""Code that only a GPU reaches is named in docs/gpu.md, with the test that executes it without one, if there is any."""

import importlib.util
import re
import sys

import pytest
from launch import ROOT
from undone_mends import UNDONE

SCRIPT = ROOT / "scripts/gpu_branches.py"
SOURCE = """
def one(tensor, device):
    if tensor.is_cuda:
        return 1
    if device.type == "cpu" or not kernels:
        return 2
    if flag and device.type == "cpu":
        raise ValueError
    for name in names:
        if device.type != "cuda":
            continue
        copy(name)
    if torch.is_autocast_enabled(device.type):
        return 3

class Two:
    def three(self):
        if self.device.type == "cpu":
            a()
        else:
            b()

def takes(query) -> bool:
    fits = query.dtype in HALF
    return fits and on_gpu(query)

def by_name(tensor):
    cuda, wanted = torch.cuda.is_available(), 1
    if not cuda:
        return 4
    if takes(tensor) or device == "cuda":
        return five
    try:
        tensor()
    except Error:
        if torch.cuda.get_device_capability() < OLD:
            return 6
    if torch.version.cuda is None:
        return 7
    return 8

def in_a_line(tensors, pinned):
    pinned = pinned and tensor.is_cuda
    found = [seven(t) for t in tensors if t.is_cuda]
    rule = lambda f: f.on_gpu and eight(f)
    return not device.startswith("cuda") or nine(found)

def ten(tensor):
    return a() if tensor.device.type == "cpu" else b(tensor)
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_branches", SCRIPT)
    module = sys.modules["gpu_branches"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sides_of_conditions(script, tmp_path):
    (tmp_path / "source.py").write_text(SOURCE)
    lines = SOURCE.splitlines()
    found = {
        (b.function, lines[b.line - 1][max(b.column, 0) :].strip()) for b in script.branches(tmp_path / "source.py")
    }
    assert found == {
        ("one", "return 1"),
        ("one", 'if flag and device.type == "cpu":'),
        ("one", "copy(name)"),
        ("three", "b()"),
        ("by_name", 'if takes(tensor) or device == "cuda":'),
        ("by_name", "return five"),
        ("by_name", "return 6"),
        ("by_name", "return 8"),
        ("in_a_line", "seven(t) for t in tensors if t.is_cuda]"),
        ("in_a_line", "eight(f)"),
        ("in_a_line", "nine(found)"),
        ("ten", "b(tensor)"),
    }


def test_every_branch_has_its_line_on_the_page(script):
    page = (ROOT / "docs/gpu.md").read_text()
    named = re.findall(r"^\| `(\S+: \w+)` \| (.+) \|$", page, re.MULTILINE)
    assert {name for name, _ in named} == {str(branch).rpartition(": ")[0] for branch in script.all_branches()}
    for _, who in named:
        for test in re.findall(r"`(test_\w+\.py)`", who):
            assert list((ROOT / "test").rglob(test)), test


def test_every_mend_that_can_be_undone_is_still_in_the_code():
    """`python test/undone_mends.py` undoes each one, and sees its test fail."""
    assert [u.name for u in UNDONE if (ROOT / u.file).read_text().count(u.mended) != 1] == []
    assert {re.sub("[a-z]", "", u.name) for u in UNDONE} == {str(number) for number in range(1, 17)}


def test_lines_that_run_are_noted(script, tmp_path):
    """The tracing itself: a side that a test executes is found, and one that it does not is not."""
    tests = ["test/strategies/test_visible_gpus.py", "test/test_gpu_lines.py", "-k", "task_sees or one_piece"]
    hits = script.executed(script.all_branches(), tests)
    found = {str(b).rpartition(": ")[0] for b in script.all_branches() if b.place in hits}
    names = ("strategies/deepspeed.py: setup_distributed", "distributed/mesh.py: resolve_device")
    assert found == {*names, "models/losses/vocab_parallel.py: _num_pieces"}
