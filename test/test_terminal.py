"""What a terminal of 80 columns shows: lines that fit, a progress bar, and colours that NO_COLOR takes away."""
# ruff: noqa: F811 (a fixture of another file)

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from launch import _environment
from test_errors import DATA, MODEL, demo  # noqa: F401 (demo is a fixture)

from trainer.entry import PlainStream
from trainer.reports.live_view import view
from trainer.reports.run_rows import RunRows
from trainer.terminal import fitted

COLUMNS = 80
RATE = re.compile(r"step/s\]|s/step\]")  # the bar of a step that takes more than a second shows its seconds
COLOUR = re.compile(r"\x1b\[(?:\d+;)*[34]\d(?:;\d+)*m")


def on_terminal(command: list[str], cwd, **env: str) -> str:
    """What a command writes to a terminal of COLUMNS columns. It must end well within two minutes."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    env = {name: value for name, value in _environment(TERM="xterm", **env).items() if name != "COLUMNS"}
    process = subprocess.Popen(
        ["timeout", "120", sys.executable, "-m", "trainer.cli", *command],
        stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=env, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    written = b""
    try:
        while part := os.read(master, 1 << 16):
            written += part
    except OSError:  # the last process has closed the terminal
        pass
    os.close(master)
    assert process.wait() == 0, written.decode(errors="replace")[-3000:]
    return written.decode()


@pytest.fixture(scope="module")
def shown(demo):
    flags = [*MODEL, *DATA, "--max_steps", "2", "--eval_dataset", "demo/sft.jsonl#8", "--eval_steps", "1"]
    return on_terminal(["sft", *flags, "--train_batch_size", "8", "--output_dir", "shown"], demo)


def test_no_line_of_a_run_is_wider_than_the_terminal(shown):
    lines = re.split(r"[\r\n]+", shown)
    assert max(map(len, lines)) <= COLUMNS, max(lines, key=len)
    at = next(number for number, line in enumerate(lines) if line.startswith("step 2/2 | "))
    assert lines[at].endswith(" |") and lines[at + 1].startswith("    loss tokens ") and "tok/s" in lines[at + 1]
    assert "Sort these digits: " in shown and "model saved to shown/model" in shown


def test_the_bar_is_on_the_terminal_and_nothing_has_colour(shown):
    assert "2/2 [" in shown and RATE.search(shown)
    assert "\x1b[" not in shown.replace("\x1b[A", "") and "\\x1b" not in shown


REWARD = """import sys, warnings
def talks(prompts, responses, labels):
    print("a reward", "talks")
    print("to stderr", file=sys.stderr)
    sys.stdout.write("without an end")
    return [float(len(response) % 2) for response in responses]
"""


def on_screen(written: str) -> list[str]:
    """The lines that are left on the screen: text after a carriage return overwrites."""
    screen = []
    for line in written.split("\n"):
        cells = ""
        for part in line.split("\r"):
            cells = part + cells[len(part) :]
        screen.append(cells.rstrip())
    return screen


def test_nothing_that_is_printed_during_a_run_sticks_to_the_bar(demo):
    """Also what a user's function prints."""
    (demo / "talking.py").write_text(REWARD)
    flags = ["--rollout_batch_size", "2", "--n_samples_per_prompt", "2", "--train_batch_size", "4"]
    flags += [
        "--generate_max_len",
        "4",
        "--prompt_max_len",
        "128",
        "--max_steps",
        "2",
        "--reward_func",
        "talking.py:talks",
        "--save_steps",
        "1",
    ]
    flags += ["--pretrain", "demo/model", "--dataset", "demo/prompts.jsonl"]
    screen = on_screen(on_terminal(["ppo", *flags, "--output_dir", "talking"], demo))
    bars = [line for line in screen if RATE.search(line)]
    assert [line[-1] for line in bars] == ["]"] and bars[0].startswith("100%"), bars
    assert screen.count("to stderr") >= 2 and sum("a reward talks" in line for line in screen) >= 2, screen
    assert any("step 2/2 | " in line for line in screen)


@pytest.mark.parametrize("no_colour", [True, False])
def test_watch_shows_bold_not_its_codes_and_obeys_no_color(shown, demo, no_colour):
    """`shown` is over, so the only colour, that of a hang, does not occur: `view` of a silent run has it."""
    env = {"NO_COLOR": "1"} if no_colour else {}
    seen = on_terminal(["watch", "shown", "--once"], demo, **env)
    assert "\\x1b" not in seen and "\x1b[1m" in seen and "step 2 of 2, ended" in seen
    assert not COLOUR.search(seen) and "\x1b[2m" not in seen  # faint is hard to read
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in seen.splitlines()) <= COLUMNS


def test_only_a_hang_has_a_colour(tmp_path, monkeypatch):
    from rich.console import Console

    run = RunRows("a", str(tmp_path), steps={1: {"loss": 1.0, "step_time": 1.0}}, start={"total_steps": 9})
    for age, no_colour in ((0.0, False), (1e6, False), (1e6, True)):
        console = Console(force_terminal=True, color_system="standard", width=COLUMNS, no_color=no_colour)
        with console.capture() as captured:
            console.print(view(run, COLUMNS, age))
        assert bool(COLOUR.search(captured.get())) == (age > 0 and not no_colour)


def test_lines_are_broken_between_words_and_items(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    assert fitted("word " * 40) == "word " * 40  # no terminal
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "20")
    assert fitted("a bc | d ef | g hi jk | l") == "a bc | d ef |\n    g hi jk | l"
    assert fitted("one two three four five\n\n  six") == "one two three four\n    five\n\n  six"
    path = "/a/" + "long-name/" * 5
    assert fitted(f"saved to {path}") == f"saved to\n    {path}"  # a path stays whole
    assert PlainStream(PlainStream(sys.__stdout__)).unchecked is sys.__stdout__
