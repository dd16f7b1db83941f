"""The command `trainer`: it checks flags before ranks start, and its ranks end with it."""
# ruff: noqa: F811 (a fixture of another file)

import signal
import subprocess
import sys

import pytest
from launch import run_until_gone
from test_errors import CASES, DATA, MODEL, assert_one_line, demo  # noqa: F401 (demo is a fixture)


@pytest.mark.parametrize("case", ["unknown flag", "missing file", "broken line"])
def test_ranks_start_only_for_flags_that_can_be(demo, case):
    """The error is all that is printed, and no rank stays. A wrong flag imports no torch."""
    arguments, parts = CASES[case]
    command = [sys.executable, "-X", "importtime", "-m", "trainer.cli", "sft", "--nproc", "2", *arguments]
    code, output, seconds = run_until_gone([*command, "--micro_train_batch_size", "4"], cwd=demo, timeout=120)
    imported = {line.rpartition("|")[2].strip() for line in output.splitlines() if "import time:" in line}
    printed = [line for line in output.splitlines() if "import time:" not in line]
    assert code == 2 and printed[-1].startswith("error: ") and "Traceback" not in output, output[-3000:]
    assert_one_line(output, parts)
    assert ("torch" in imported) == (case == "broken line") and seconds < 30


def test_a_signal_to_the_command_trainer_ends_its_ranks(demo):
    """A signal before the first step: one line at most, and no traceback."""
    flags = [*MODEL, *DATA, "--max_steps", "9999", "--output_dir", "stopped", "--param_dtype", "fp32"]
    command = [sys.executable, "-m", "trainer.cli", "sft", "--nproc", "2", *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=demo, start_new_session=True, **streams)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=120)[0]  # the pipe closes when every rank is gone
    assert process.returncode == 75 and "Traceback" not in rest, "".join(lines)[-2000:] + rest
    assert rest.count("SIGINT") == 1 and rest.splitlines()[-1].startswith("stopped by SIGINT"), rest
