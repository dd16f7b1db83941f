"""The commands in README.md and docs/*.md: fenced blocks, the marks above them, and what each command line asks for.

A block is preceded by `<!-- needs: gpu -->` (hub, cluster, vllm, docker ...), `<!-- slow: reason -->` or
`<!-- run by: test/... -->` where it is not to be run, and by `<!-- file: NAME -->` where it is the text of a file.
`<!-- from: FILE -->` marks lines of a file of the repository, which that file must have.
"""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from trainer.cli.__main__ import RANKED, TRAINING, split

FENCE = re.compile(r"( *)(`{3,})(\w*)[^`]*")
MARK = re.compile(r"<!--\s*(needs|slow|run by|file|from):\s*(.*?)\s*-->")
NEEDS = ("gpu", "hub", "cluster", "vllm", "bitsandbytes", "verifiers", "server", "docker")
COMPOUND = {"for": "done", "while": "done", "if": "fi", "case": "esac"}
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
STATE = ("export ", "source ", ". ", "cd ")  # what later commands of the page see
OPERATORS = {"|", "||", "&", "&&", ";", ">", ">>", "<", "<<", "(", ")"}


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its first line of text, `mark` the word of its mark and `note` the rest."""

    page: str
    line: int
    language: str
    text: str
    mark: str = ""
    note: str = ""


@dataclass
class Command:
    """One command of a page, to be run in the folder of that page."""

    block: Block
    line: int
    text: str
    kind: str  # train, tool, snippet, server, file, state or shell
    argv: list[str] = field(default_factory=list)  # of train, tool, server: the command's name and its flags
    num_ranks: int = 0  # of train: 0 without torchrun
    env: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.block.page}:{self.line}"


def read_blocks(path: Path, page: str) -> list[Block]:
    """The fenced blocks of a page."""
    blocks, mark, opened = [], ("", ""), None
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        fence = FENCE.fullmatch(line)
        if opened is None and fence:
            indent, ticks, language = fence.groups()
            opened = (indent, ticks, language, number + 1, [])
        elif opened is not None and line.strip() == opened[1]:
            indent, _, language, first, lines = opened
            text = "\n".join(text.removeprefix(indent) for text in lines)
            blocks.append(Block(page, first, language, text + "\n", *mark))
            mark, opened = ("", ""), None
        elif opened is not None:
            opened[4].append(line)
        elif line.strip():
            found = MARK.fullmatch(line.strip())
            mark = found.groups() if found else ("", "")
    assert opened is None, f"{page}: the block of line {opened[3]} has no end"
    return blocks


def statements(block: Block) -> list[tuple[int, str]]:
    """(line of the page, text) of each statement of a bash block; backslashes join lines, comments are left out."""
    found, lines = [], block.text.splitlines()
    position = 0
    while position < len(lines):
        first, text = position, lines[position]
        position += 1
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        while text.endswith("\\"):
            text = text[:-1] + " " + lines[position].strip()
            position += 1
        heredoc, compound = HEREDOC.search(text), COMPOUND.get(text.split()[0])
        end = heredoc.group(1) if heredoc else compound
        while end and lines[position - 1].strip().split(" ")[0] != end:
            text += "\n" + lines[position]
            position += 1
        found.append((block.line + first, text))
    return found


def read_commands(block: Block, folder: Path) -> list[Command]:
    """The commands of a block; `folder` is where a shell would expand their words."""
    if block.mark == "file":
        return [Command(block, block.line, block.text, "file")]
    if block.language == "python":
        return [Command(block, block.line, block.text, "snippet")]
    if block.language != "bash":
        return []
    return [read_command(block, line, text, folder) for line, text in statements(block)]


def read_command(block: Block, line: int, text: str, folder: Path) -> Command:
    """A command line by what it starts: training (by torchrun, python or a script), another module, a server, or the shell."""
    if text.startswith(STATE):
        return Command(block, line, text, "state")
    if "\n" in text or not is_simple(text):
        return Command(block, line, text, "shell")
    words = expand(text, folder)
    env = {}
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        name, _, env[name] = words.pop(0).partition("=")
    words = expand_script(words, env, folder)
    num_ranks, target = launched(words)
    if target is None or "--help" in target:
        return Command(block, line, text, "shell", argv=target or [])
    name = target[0]
    kind = "train" if name.startswith("train_") else "server" if name in ("serve_rm", "serve_train") else "tool"
    env.pop("OMP_NUM_THREADS", None)
    return Command(block, line, text, kind, target, num_ranks, env)


def is_simple(text: str) -> bool:
    """Whether a line is one command, without pipes, redirections and the like."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return not OPERATORS & set(lexer)


def expand(text: str, folder: Path) -> list[str]:
    """The words that a shell makes of a simple command line."""
    script = f"words() {{ printf '%s\\0' \"$@\"; }}; {as_words(text)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=folder, check=True)
    return done.stdout.split("\0")[:-1]


def as_words(text: str) -> str:
    """`text` as arguments of the shell function `words`; assignments before a command are words of their own."""
    assignments = re.match(r"(\s*[A-Za-z_]\w*=\S*\s+)*", text).group()
    return f"words {assignments}{text[len(assignments) :]}"


def expand_script(words: list[str], env: dict[str, str], folder: Path) -> list[str]:
    """scripts/train_*.sh as the torchrun command in it, with the flags that follow its name and NPROC of `env`."""
    words = words[1:] if words[:1] == ["bash"] else words
    if not words or not re.fullmatch(r"(\./)?scripts/train_\w+\.sh", words[0]):
        return words
    text = (folder / words[0]).read_text()
    assert os.access(folder / words[0], os.X_OK), f"{words[0]} is not executable"
    line = text[text.index("torchrun") :].replace("\\\n", " ").splitlines()[0]
    num_ranks = re.search(r'"\$\{NPROC:-(\d+)\}"', line)
    line = line.replace(num_ranks.group(), env.pop("NPROC", num_ranks.group(1))).replace('"$@"', "")
    return shlex.split(line) + words[1:]


def launched(words: list[str]) -> tuple[int, list[str] | None]:
    """(ranks of torchrun or `trainer`, or 0; [name, flags...] of a command of trainer.cli, or None)."""
    if words[:1] == ["trainer"] and words[1:]:
        num_ranks, _, flags = split(words[2:])
        name = RANKED.get(words[1], words[1])
        return num_ranks if name in TRAINING.values() else 0, [name, *flags]
    module = next((word for word in words if word.startswith("trainer.cli.")), None)
    if module is None or words[0] not in ("torchrun", "python"):
        return 0, None
    start = words.index(module)
    target = [module.removeprefix("trainer.cli."), *words[start + 1 :]]
    if words[0] == "python":
        return 0, target
    options = " ".join(words[1:start]).replace("=", " ")
    num_ranks = re.search(r"--nproc[_-]per[_-]node (\d+)", options)
    return int(num_ranks.group(1)) if num_ranks else 1, target
