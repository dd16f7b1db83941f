"""What messages say to do can be done: the commands that they give can be parsed, and the flags that they name exist."""

import ast
import importlib
import json
import re
import shlex

import pytest
from docs.test_commands import ARGUMENTS, check_flags
from launch import ROOT
from test_help import HELP_OF_ALL, helps  # noqa: F401 (a fixture)

from trainer.cli.__main__ import NODE_FLAGS, OTHERS, RANKED
from trainer.errors import UserError
from trainer.flags.groups import flags_of
from trainer.model_folders.adapter_folder import how_to_merge

HOLE = "X"  # what an f-string fills in
COMMAND = re.compile(rf"(?:python -m trainer\.cli\.|\btrainer (?={'|'.join((*RANKED, *OTHERS))}))(\w+)([^.,;)]*)")
FLAG = re.compile(r"(?<![\w-])--([a-z_][a-z0-9_]*)(?![\w-])")
# rooms whose texts name flags of other programs: vllm, docker, pip, peers' trainers, scripts of the instrument
OTHERS_FLAGS = ("compare/", "cli/serve_engine.py", "cli/__main__.py", "planning/doctor_", "entry.py", "help_texts.py")


def texts(source: str) -> list[tuple[int, str]]:
    """(line, text) of the strings of a module that are no docstrings, with HOLE for what is filled in."""
    tree = ast.parse(source)
    skip = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skip:
            continue
        if isinstance(node, ast.JoinedStr):
            skip |= {id(value) for value in node.values}
            parts = (value.value if isinstance(value, ast.Constant) else HOLE for value in node.values)
            found.append((node.lineno, "".join(parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
    return found


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, its words) of the commands in a text. Plain words after them are prose."""
    found = []
    for name, rest in COMMAND.findall(text):
        words = re.sub(r"\{\}", HOLE, rest).split()
        prose = next(
            (n for n, word in enumerate(words) if word.islower() and "-" not in words[n - 1][:1] + word), len(words)
        )
        found.append((name, shlex.split(" ".join(words[:prose]))))
    return found


def parse(name: str, words: list[str]) -> None:
    """Raises UserError where the command does not take these words."""
    door = RANKED.get(name, name)
    assert door in (*RANKED.values(), *OTHERS), f"no such command: {name}"
    module = importlib.import_module(f"trainer.cli.{door}")
    if words and door not in ARGUMENTS:
        module.build_parser().parse_args(words)
    elif words:
        check_flags(door, words)


TEXTS = {
    f"{path.relative_to(ROOT / 'trainer')}:{line}": text
    for path in sorted((ROOT / "trainer").rglob("*.py"))
    for line, text in texts(path.read_text())
}
GIVEN = {where: commands(text) for where, text in TEXTS.items() if commands(text) and "help_texts" not in where}


@pytest.mark.parametrize("where", GIVEN)
def test_a_command_that_a_message_gives_can_be_parsed(where):
    for name, words in GIVEN[where]:
        parse(name, words)


def test_wrong_commands_are_noticed():
    [(name, words)] = commands(f"Merge it: python -m trainer.cli.export {HOLE} MODEL --bas BASE")
    assert (name, words) == ("export", [HOLE, "MODEL", "--bas", "BASE"])
    for wrong in (words, [HOLE], [HOLE, "MODEL", "--base"]):
        with pytest.raises(UserError):
            parse(name, wrong)
    assert commands("see python -m trainer.cli.serve_rm, and wait") == [("serve_rm", [])]
    assert commands("python -m trainer.cli.export merges an adapter") == [("export", [])]
    with pytest.raises(AssertionError):
        parse("exprot", [])


def test_a_flag_that_a_text_names_exists(helps):  # noqa: F811
    known = {field.name for kind in ARGUMENTS.values() for field, _ in flags_of(kind)} | set(NODE_FLAGS)
    known |= {name for text in helps.values() for name in FLAG.findall(text)}
    own = {where: text for where, text in TEXTS.items() if not where.startswith(OTHERS_FLAGS)}
    named = {(where, name) for where, text in own.items() for name in FLAG.findall(text)}
    assert len(named) > 800 and not [pair for pair in sorted(named) if pair[1] not in known]
    assert FLAG.findall("--adam_offload, --no-such and a--b") == ["adam_offload"]


@pytest.mark.parametrize(
    ("config", "end"),
    [
        ({"base_model_name_or_path": "here"}, ""), ({"base_model_name_or_path": "org/none"}, " --base BASE"),
        ({}, " --base BASE"), ([], " --base BASE"), (None, " --base BASE"),
    ],
)  # fmt: skip
def test_the_cure_for_an_adapter_names_the_base_where_export_needs_it(config, end, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    folder = tmp_path / "my adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{" if config is None else json.dumps(config))
    cure = how_to_merge(str(folder))
    assert cure == f"Merge it: python -m trainer.cli.export '{folder}' MODEL{end}"
