"""Bad input of every command is one line, the last one, and exit code 2: a sample of the cases of bad_inputs.py."""

import re
import sys

from bad_inputs import cases
from launch import ROOT, run_process


def test_a_sample_of_bad_inputs_gives_one_line_each():
    code, output = run_process([sys.executable, str(ROOT / "test/bad_inputs.py"), "--every", "7"], timeout=280)
    assert code == 0, "\n".join(line for line in output.splitlines() if not line.startswith("ok |"))
    assert len(cases()) > 200 and int(re.search(r"(\d+) cases, 0 faults", output)[1]) == len(cases()[::7]) > 30


def test_a_small_command_names_what_is_missing_in_one_line():
    for command in ("check", "plan", "watch", "report", "verify_run"):
        code, output = run_process([sys.executable, "-m", "trainer.cli", command])
        assert code == 2 and len(output.splitlines()) == 1 and output.startswith("error: "), output
