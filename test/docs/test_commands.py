"""Every command in README.md and docs/ works: it is run, or its block is marked and its flags exist.

What the blocks may be marked with is told in test/doc_blocks.py, in which folder a page's commands run in test/doc_runs.py.
"""

import importlib
import shlex
from pathlib import Path

import pytest
from doc_blocks import NEEDS, OPERATORS, Block, launched, read_blocks, read_commands, statements
from doc_runs import Runner, make_base, make_page_folder, overlap, resources, shorten
from launch import ROOT

from trainer.compare.runs.launch import free_port
from trainer.datasets.demos.demo import MODEL_SHAPE
from trainer.flags.common_flags import SFTArguments
from trainer.flags.generating_flags import EvaluateArguments, OnlineDPOArguments, ServeTrainArguments
from trainer.flags.kd_flags import KDArguments
from trainer.flags.parse_flags import parse_arguments
from trainer.flags.preference_flags import DPOArguments, RMArguments
from trainer.flags.rl_flags import PPOArguments
from trainer.runs.flag_checks import refuse_length

ARGUMENTS = {"train_sft": SFTArguments, "train_rm": RMArguments, "train_dpo": DPOArguments, "train_ppo": PPOArguments}
ARGUMENTS |= {"train_kd": KDArguments, "evaluate": EvaluateArguments, "serve_train": ServeTrainArguments}
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
BLOCKS = [
    block
    for page in PAGES
    for block in read_blocks(ROOT / page, page)
    if block.language in ("bash", "python") or block.mark == "file"
]
MARKED = [block for block in BLOCKS if block.mark and block.mark != "file"]
RUN = {command.where: command for block in BLOCKS if block not in MARKED for command in read_commands(block, ROOT)}


@pytest.fixture(scope="module")
def runner(request, tmp_path_factory):
    """All commands of the pages that are asked for have been run."""
    root = tmp_path_factory.mktemp("pages")
    (root / "base").mkdir()
    make_base(root / "base")
    items = [item for item in request.session.items if getattr(item, "function", None) is test_command_of_a_page]
    asked = {item.callspec.params["where"].rpartition(":")[0] for item in items}
    runner, pages = Runner(root), []
    for page in filter(asked.__contains__, PAGES):
        commands = [command for command in RUN.values() if command.block.page == page]
        make_page_folder(root / "base", runner.folder(commands[0]))
        shorten(commands, free_port())
        pages.append(commands)
    inputs = {path.name for path in runner.folder(pages[0][0]).iterdir()}
    runner.run_all(pages, inputs)
    print("\n".join(runner.launches))
    for where, outcome in sorted(runner.outcomes.items(), key=lambda pair: -pair[1].seconds)[:15]:
        print(f"{outcome.seconds:.1f} s: {where}")
    return runner


@pytest.mark.parametrize("where", RUN)
def test_command_of_a_page(runner, where):
    outcome, command = runner.outcomes[where], RUN[where]
    shown = shlex.join(command.argv) if command.argv else command.text
    if outcome.problem is not None:
        pytest.fail(f"{where}: {shown}\n{outcome.problem}\n--- output\n{outcome.output[-3000:]}", pytrace=False)


def segments(text: str) -> list[list[str]]:
    """The words of each torchrun, python or trainer command in a text, up to a pipe, a redirection and the like."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if word in OPERATORS:
            found.append([])
        elif found[-1] or word in ("torchrun", "python", "trainer"):
            found[-1].append(word)
    return [words for words in found if words]


def check_flags(name: str, flags: list[str]) -> None:
    """Raises UserError, or ImportError, where there is no such command or flag."""
    if name in ARGUMENTS:
        kind = OnlineDPOArguments if "--online" in flags else ARGUMENTS[name]
        parse_arguments(kind, name, [flag for flag in flags if flag != "--help"])
    else:
        importlib.import_module(f"trainer.cli.{name}")


@pytest.mark.parametrize("block", MARKED, ids=lambda block: f"{block.page}:{block.line}")
def test_marked_block(block):
    if block.mark == "needs":
        assert block.note.split(",")[0].strip() in NEEDS, f"{block.page}:{block.line} needs {block.note}"
    if block.mark == "from":
        assert stripped(block.text) in stripped((ROOT / block.note).read_text()), f"{block.note} has other lines"
    text = "" if block.mark != "run by" else (ROOT / block.note).read_text()
    for line, statement in statements(block) if block.language == "bash" else []:
        for words in segments(statement):
            _, target = launched(words)
            if target is not None:
                check_flags(target[0], target[1:])
        name = script_name(statement)
        assert not text or name in text, f"{block.page}:{line}: {block.note} does not run {name}"


def test_lengths_of_rollouts_fit_the_model_that_the_pages_use():
    """`shorten` gives the commands small lengths before they run, so a page's own ones are looked at here."""
    args = [command.argv[1:] for command in RUN.values() if command.argv[:1] == ["train_ppo"]]
    lengths = {"--prompt_max_len", "--generate_max_len"}
    given = [parse_arguments(PPOArguments, "train_ppo", own) for own in args if lengths <= set(own)]
    assert len(given) >= 2
    for own in given:
        refuse_length(own, MODEL_SHAPE["max_position_embeddings"])


def stripped(text: str) -> str:
    """Lines without their indentation."""
    return "\n".join(line.strip() for line in text.splitlines())


def script_name(statement: str) -> str:
    """`train_sft` of `torchrun ... -m trainer.cli.train_sft ...`, `demo.sh` of `scripts/demo.sh`."""
    words = shlex.split(statement, comments=True)
    module = next((word for word in words if word.startswith("trainer.cli.")), None)
    if module is not None:
        return module.removeprefix("trainer.cli.")
    path = next((word for word in words if word.endswith((".sh", ".py"))), words[0])
    return Path(path).name


# --- how pages are read


PAGE = """# A page

```bash
# a comment
python -m trainer.cli.export a b \\
    c        # another
NPROC=4 scripts/train_sft_fsdp2_tp.sh --max_steps 3
cat > reward.py <<'EOF'
x = 1
EOF
```

<!-- needs: gpu -->

```bash
torchrun --nproc_per_node 8 -m trainer.cli.train_sft --input_template $'Q: {}\\nA: ' | tee log
```

1. in a list

    <!-- file: x.yaml -->
    ```yaml
    a: 1
    ```

```text
torchrun: not a command
```
"""


def test_blocks_and_commands(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    blocks = read_blocks(tmp_path / "page.md", "page.md")
    assert [(b.line, b.language, b.mark, b.note) for b in blocks] == [
        (4, "bash", "", ""),
        (16, "bash", "needs", "gpu"),
        (23, "yaml", "file", "x.yaml"),
        (27, "text", "", ""),
    ]
    assert blocks[2].text == "a: 1\n"
    tool, script, heredoc = read_commands(blocks[0], ROOT)
    assert (tool.kind, tool.line, tool.argv) == ("tool", 5, ["export", "a", "b", "c"])
    assert (script.kind, script.num_ranks, script.argv[0]) == ("train", 4, "train_sft")
    assert script.argv[-2:] == ["--max_steps", "3"] and "--tensor_parallel_size" in script.argv
    assert heredoc.kind == "shell" and heredoc.text.endswith("\nEOF")
    assert [words[0] for words in segments(blocks[1].text)] == ["torchrun"]


def command_of(line: str):
    return read_commands(Block("page", 1, "bash", line + "\n"), ROOT)[0]


def test_words_are_those_of_a_shell():
    command = command_of("A=1 torchrun --nproc_per_node=2 -m trainer.cli.train_sft --input_template $'Q: {}\\nA'")
    assert (command.num_ranks, command.env) == (2, {"A": "1"})
    assert command.argv == ["train_sft", "--input_template", "Q: {}\nA"]
    command = command_of("trainer sft --nproc 2 --max_len 8")
    assert (command.num_ranks, command.argv) == (2, ["train_sft", "--max_len", "8"])
    assert command_of("trainer export a b").argv == ["export", "a", "b"]


def test_commands_that_need_each_other():
    train = "torchrun --nproc_per_node 2 -m trainer.cli.train_sft --pretrain my_model --output_dir runs"
    export = "python -m trainer.cli.export runs/a/checkpoints/step_2 exported"
    lines = [f"{train}/a", f"{train}/b", export]
    first, second, third = (resources(command_of(line), {"my_model"}) for line in lines)
    assert not overlap(first, second) and not overlap(second, third) and overlap(first, third)
