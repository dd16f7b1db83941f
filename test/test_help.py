"""--help of every command: it begins with an example that has flags of the command, and has no names of types. No torch."""

import json
import re
import shlex
import sys

import pytest
from docs.test_commands import ARGUMENTS, check_flags
from launch import run_process

from trainer.cli.__main__ import OTHERS, RANKED, run, split
from trainer.errors import UserError
from trainer.flags.generating_flags import OnlineDPOArguments
from trainer.flags.groups import flags_of
from trainer.flags.names.word_parser import OneLineParser
from trainer.flags.parse_flags import build_parser
from trainer.help_texts import EXAMPLES, example_of, with_default

DOORS = [*RANKED.values(), *OTHERS]
HELP_OF_ALL = f"""
import contextlib, importlib, io, json, sys
shown = {{}}
for name in {DOORS}:
    door, text = importlib.import_module("trainer.cli." + name), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        getattr(door, "run", door.main)(["--help"])
    shown[name] = text.getvalue()
print(json.dumps([shown, "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    code, output = run_process([sys.executable, "-c", HELP_OF_ALL])
    shown, has_torch = json.loads(output.splitlines()[-1])
    assert code == 0 and not has_torch
    return shown


@pytest.mark.parametrize("name", DOORS)
def test_help_begins_with_an_example_and_has_no_names_of_types(helps, name):
    text = helps[name]
    assert text.startswith(example_of(name)) and len(EXAMPLES[name]) in (2, 3)
    usage = text.splitlines()[len(EXAMPLES[name]) + 2]
    assert usage.startswith("usage: trainer ") and usage.split()[2] in (*RANKED, *OTHERS), "as a person types it"
    for noise in ("type:", "None", "null", "default: True", "default: False", "Literal", "Optional", "\b"):
        assert noise not in text, noise
    assert not re.search(r"default:? [\d.]+e-0", text)
    last = EXAMPLES[name][-1].removesuffix(" \\")
    assert all(word in text for word in shlex.split(last) if word.startswith("--") and word != "--nproc")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_lines_of_an_example_can_be_parsed(name):
    for line in "\n".join(EXAMPLES[name]).replace("\n    ", " ").splitlines():
        program, command, *flags = shlex.split(line)
        door = RANKED.get(command, command)
        assert program == "trainer" and door in DOORS
        check_flags(door, split(flags)[2] if door in ARGUMENTS else flags)


def test_every_default_can_be_read(helps):
    """Against the fields: a default that is set is shown as it may be typed."""
    assert "(default 5e-6)" in with_default("rate", 5e-06)
    assert [with_default("x", value) for value in (None, False, "", 0, True, [0.9, 0.95], 1e20)] == [
        "x", "x", "x", "x (default 0)", "x (default on)", "x (default 0.9 0.95)", "x (default 1e20)"
    ]  # fmt: skip
    assert with_default("size (default: that of SOURCE)", 2) == "size (default: that of SOURCE)"
    for name, kind in ARGUMENTS.items():
        plain = re.sub(r"\s", "", helps[name])
        for field, _ in flags_of(kind):
            assert re.sub(r"\s", "", with_default(field.metadata["help"], default_of(field))) in plain, field.name


def default_of(field):
    return field.default_factory() if callable(field.default_factory) else field.default


def test_a_percent_sign_is_no_placeholder():
    parser = OneLineParser("plan")
    parser.add_argument("--share", type=float, default=0.5, help="100% of it")
    assert "100% of it (default 0.5)" in parser.format_help()
    with pytest.raises(UserError, match="--shar"):
        parser.parse_args(["--shar", "1"])
    groups = [kind for field, kind in OnlineDPOArguments.__annotations__.items()][:1]
    assert build_parser(groups, "train_dpo --online", None).format_help().startswith(example_of("train_dpo --online"))


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_help_before_a_command_is_the_help_of_the_command(word, capsys, monkeypatch):
    """`trainer help plan` is `trainer plan --help`; a name that is no command is refused."""
    monkeypatch.setattr(sys, "argv", ["trainer"])
    with pytest.raises(SystemExit, match="0"):
        run([word, "plan"])
    assert capsys.readouterr().out.startswith(example_of("plan"))
    with pytest.raises(UserError, match="no such command"):
        run([word, "plann"])
