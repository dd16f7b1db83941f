"""Bad input of every command is one line, the last one, and exit code 2: a sample of the cases of bad_inputs.py."""

import re
import sys

import pytest
from bad_inputs import SAMPLE, cases, fault_on_ranks
from launch import ROOT, run_process


def test_a_sample_of_bad_inputs_gives_one_line_each():
    code, output = run_process([sys.executable, str(ROOT / "test/bad_inputs.py"), "--every", "7"], timeout=280)
    assert code == 0, "\n".join(line for line in output.splitlines() if not line.startswith("ok |"))
    assert len(cases()) > 200 and int(re.search(r"(\d+) cases, 0 faults", output)[1]) == len(cases()[::7]) > 30


@pytest.mark.parametrize(
    ("launcher", "words"), [("torchrun", SAMPLE[:2]), ("folder", SAMPLE[2:3]), ("trainer", SAMPLE[3:])]
)
def test_real_ranks_say_it_last_and_end(launcher, words):
    """The error is the last line on the screen, the exit code is 2, there is no traceback, and no rank is left."""
    command = [sys.executable, str(ROOT / "test/bad_inputs.py"), "--ranks", launcher, "--sample", *words]
    code, output = run_process(command, timeout=300)
    assert code == 0 and f"{len(words)} cases, 0 faults" in output, output


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, ""),
        ({"code": 0}, "exit code 0"),
        ({"left": [7]}, "processes [7] are left"),
        ({"output": "  exitcode  : 2 (pid: 1)\nerror: x\nmore"}, "the last line is 'more'"),
        ({"output": "  exitcode  : 1 (pid: 1)\nerror: x"}, "table"),
        ({"output": '  exitcode  : 2 (pid: 1)\n  File "/a/trainer/b.py", line 1\nerror: x'}, "own frames"),
    ],
)
def test_what_torchrun_shows_is_judged(changes, found):
    plain = {"code": 1, "left": [], "launcher": "folder"}
    plain["output"] = 'Traceback\n  File "/torch/run.py"\n  exitcode  : 2 (pid: 1)\nerror: x'
    judged = fault_on_ranks(**plain | changes)
    assert found in judged and bool(judged) == bool(found)


def test_a_small_command_names_what_is_missing_in_one_line():
    for command in ("check", "plan", "watch", "report", "verify_run"):
        code, output = run_process([sys.executable, "-m", "trainer.cli", command])
        assert code == 2 and len(output.splitlines()) == 1 and output.startswith("error: "), output
