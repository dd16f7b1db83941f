"""Every message that README.md and docs/ quote is one that the trainer can print."""

import ast
import re
from itertools import product

import pytest
from doc_blocks import read_blocks
from launch import ROOT

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
MESSAGES = {
    f"{page}:{block.line + number}": line
    for page in PAGES
    for block in read_blocks(ROOT / page, page)
    for number, line in enumerate(block.text.splitlines())
    if block.language == "text" and line.startswith(("error: ", "stopped by "))
}
FEWEST_LETTERS = 12  # that a message has in common with one of the source, beside what is filled in
ANYTHING = ".*"


def pattern(node: ast.expr, assigned: dict[str, list[ast.expr]]) -> list[str]:
    """Regular expressions of what an expression may be as text: its constants, and anything for what is filled in."""
    if isinstance(node, ast.Constant):
        return [re.escape(str(node.value))]
    if isinstance(node, ast.JoinedStr):
        return ["".join(re.escape(v.value) if isinstance(v, ast.Constant) else ANYTHING for v in node.values)]
    if isinstance(node, ast.IfExp):
        return pattern(node.body, assigned) + pattern(node.orelse, assigned)
    if isinstance(node, ast.Name):
        return [p for value in assigned.get(node.id, []) for p in pattern(value, {})] or [ANYTHING]
    return [ANYTHING]


def messages_of(source: str) -> list[str]:
    """Regular expressions of the messages of a module: UserError(where, found, allowed) and what else ends a run."""
    tree, assigned = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            for target, value in _pairs(node.targets[0], node.value):
                assigned.setdefault(target, []).append(value)
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id == "UserError" and not any(isinstance(part, ast.Starred) for part in node.args):
            for where, what, *allowed in product(*(pattern(part, assigned) for part in node.args)):
                end = rf"( \(allowed: {allowed[0]}\))?" if allowed else ""
                found.append(f"error: ({ANYTHING}: )?{where}: {what}{end}")
        elif node.func.id in ("_tell", "Interrupted"):
            start = "error: " if node.func.id == "_tell" else ""
            found += [start + text for text in pattern(node.args[0], assigned)]
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return [pair for t, v in zip(target.elts, value.elts) for pair in _pairs(t, v)]
    return [(target.id, value)] if isinstance(target, ast.Name) else []


@pytest.fixture(scope="module")
def patterns() -> list[re.Pattern]:
    texts = [text for path in (ROOT / "trainer").rglob("*.py") for text in messages_of(path.read_text())]
    return [re.compile(text) for text in texts if len(re.sub(r"error: |allowed|\W", "", text)) >= FEWEST_LETTERS]


@pytest.mark.parametrize("where", MESSAGES)
def test_a_quoted_message_is_one_of_the_trainer(patterns, where):
    message = MESSAGES[where]
    assert any(known.fullmatch(message) for known in patterns), f"{where}: no such message: {message}"


def test_a_message_that_nobody_prints_is_noticed():
    source = "def f(n):\n    found = f'{n} of 3 things'\n    raise UserError('--flag', found, 'all of them, or none')\n"
    known = [re.compile(text) for text in messages_of(source)]
    assert any(p.fullmatch("error: --flag: 2 of 3 things (allowed: all of them, or none)") for p in known)
    assert not any(p.fullmatch("error: --flag: 2 of 3 things (allowed: all of them)") for p in known)
