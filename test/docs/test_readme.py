"""README.md and the menu are short, parity figures agree with the table, sentences are short, and no link is broken."""

import ast
import re
import unicodedata
from pathlib import Path

import pytest
import yaml
from launch import ROOT

from trainer.limits import DEFAULTS

README = ROOT / "README.md"
GENERATED = {"flags.md", "models.md"}
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
HAND_WRITTEN = [page for page in PAGES if page.name not in GENERATED]
CODE = ("trainer", "scripts", "test", "examples")
MAX_README_BYTES = 10_000
MAX_WORDS, MAX_MEAN_WORDS = 25, 20  # of a sentence
MAX_MENU_ENTRIES, MAX_GROUP_PAGES = 20, 5  # a group of pages is one entry
TABLE = re.compile(r"<!-- parity table.*?<!-- end of the parity table -->", re.DOTALL)
WRITTEN_BY_SCRIPTS = re.compile(r"<!-- (?:plan )?([\w ]+) -->.*?<!-- end (?:of )?\1 -->", re.DOTALL)
FENCED = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2[ \t]*$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
ITEM = re.compile(r"^\s*([-*+]|\d+\.)\s+")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)


def sentences(text: str) -> list[str]:
    """The sentences of a page. Code, tables, headings, pictures, addresses and parts that scripts write are left out."""
    text = COMMENT.sub("", FENCED.sub("\n", WRITTEN_BY_SCRIPTS.sub("", TABLE.sub("", text))))
    text = LINK.sub(lambda link: "" if link.group().startswith("!") else link.group(1), text)
    text = re.sub(r"https?://\S+", "", text)
    blocks, block = [], []
    for line in [*text.splitlines(), ""]:
        is_text = line.strip() and not line.lstrip().startswith(("|", "#"))
        if (not is_text or ITEM.match(line)) and block:
            blocks.append(" ".join(block))
            block = []
        if is_text:
            block.append(ITEM.sub("", line, count=1).strip())
    found = [part.strip() for block in blocks for part in re.split(r"(?<=[.!?])[*)`\"]*\s+(?=[^a-z])", block)]
    return [sentence for sentence in found if re.search(r"\w", sentence)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    names: set[str] = set()
    for heading in HEADING.findall(FENCED.sub("", page.read_text())):
        plain = unicodedata.normalize("NFKD", LINK.sub(r"\1", heading).replace("`", "")).lower()
        names.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip()))
    return names


def parity_table() -> list[dict[str, str]]:
    """The rows of the table in docs/parity.md, by the names of its columns."""
    lines = [line for line in TABLE.search(PARITY.read_text()).group().splitlines() if line.startswith("|")]
    heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(heads, row, strict=True)) for row in rows]


PARITY = ROOT / "docs" / "parity.md"


def test_readme_is_short():
    assert len(README.read_bytes()) <= MAX_README_BYTES


def test_the_quickstart_names_every_extra():
    nodes = ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    extras = next(node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "extras_require")
    table = (ROOT / "docs/quickstart.md").read_text().partition("These are the other extras")[2]
    assert [name.value for name in extras.keys if f"`{name.value}`" not in table and name.value != "dev"] == []


def test_readme_tells_the_parity_of_the_table():
    rows = parity_table()
    text = README.read_text()
    count = re.search(r"^- (\d+) of (\d+) configurations pass", text, re.MULTILINE)
    assert (int(count[1]), int(count[2])) == (sum(row["result"] == "pass" for row in rows), len(rows))
    for word, column in (("the loss", "loss"), ("a gradient", "worst gradient")):
        told = re.search(rf"^- The worst relative difference of {word} is (\S+) \(", text, re.MULTILINE)
        worst = max(rows, key=lambda row: float(row[column].split()[0]))[column].split()[0]
        assert told[1] == worst, f"{column}: {told[1]} in README.md, {worst} in docs/parity.md"


def test_the_menu_is_short():
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    entries = [entry for heading in menu for entries in heading.values() for entry in entries]
    assert len(entries) <= MAX_MENU_ENTRIES
    assert all(
        len(pages) <= MAX_GROUP_PAGES for entry in entries for pages in entry.values() if isinstance(pages, list)
    )


def test_the_site_is_dark_and_light_and_asks_no_other_site():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert {palette["scheme"] for palette in site["theme"]["palette"]} == {"default", "slate"}
    assert site["theme"]["font"] is False and "offline" in site["plugins"]
    scripts = site["extra"]["polyfills"]  # the plugin `offline` adds one of another site if none of them has this name
    assert any("iframe-worker" in script for script in scripts)
    style = (ROOT / "docs" / site["extra_css"][0]).read_text()
    [headings] = re.findall(r"\.md-typeset h1,\s*\.md-typeset h2,\s*\.md-typeset h3 \{([^}]*)\}", style)
    assert "color: var(--md-default-fg-color);" in headings  # in both palettes; the theme's own is a pale grey
    assert all((ROOT / "docs" / script).is_file() for script in scripts)


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_sentences_are_short(page):
    found = sentences(page.read_text())
    assert not (long := [sentence for sentence in found if len(sentence.split()) > MAX_WORDS]), long
    counts = [len(sentence.split()) for sentence in found]
    assert not counts or sum(counts) / len(counts) <= MAX_MEAN_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = COMMENT.sub("", FENCED.sub("", page.read_text()))
    for _, target in LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name}: {target}: no such file"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}: no such heading"


def test_the_map_of_the_code_names_files_that_exist():
    named = re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "docs" / "architecture.md").read_text())
    paths = {path.relative_to(ROOT).as_posix() + "/" * path.is_dir() for path in ROOT.glob("trainer/**/*")}
    missing = {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in paths)}
    assert not {name for name in missing if not (ROOT / name).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_that_a_page_names_exists(page):
    named = re.findall(r"`((\w+)/[\w/]+\.(?:py|sh))\b", page.read_text())
    paths = [f"/{path.relative_to(ROOT).as_posix()}" for folder in CODE for path in (ROOT / folder).rglob("*.*")]
    folders = {part for path in paths for part in path.split("/")[:-1]}  # files of other packages have others
    missing = {name for name, first in named if first in folders and not any(p.endswith(f"/{name}") for p in paths)}
    assert not missing


def test_how_sentences_are_counted():
    text = """# A heading. Not counted

One sentence of five words. Two `code words` here! A [link](https://a.b/c.d) is its text, see
the next line.

- An item without a full stop
- Two parts. In one item

| a table | is. | left out |
|---|---|---|

<!-- a_table -->
Neither. this
<!-- end of a_table -->
```bash
not this. nor this
```
Version 3.11 is no end.
"""
    assert [len(sentence.split()) for sentence in sentences(text)] == [5, 4, 9, 6, 2, 3, 5]


def test_the_tests_that_the_threat_model_names_are_there():
    """A row of the table names files below test/, each with parts of names of its tests."""
    table = (ROOT / "SECURITY.md").read_text().split("| # | Kind | Test |")[1].split("\n\n")[0]
    for name, tests in re.findall(r"`([\w/]+\.py)`(?::((?:,? `\w+`)+))?", table):
        code = (ROOT / "test" / name).read_text()
        missing = [
            test for test in re.findall(r"\w+", tests) if not re.search(rf"^def test_\w*{test}", code, re.MULTILINE)
        ]
        assert not missing, f"{name} has no test {missing}"
    assert len(re.findall(r"^\| \d+ \|", table, re.MULTILINE)) == 14


def test_the_table_of_limits_is_that_of_the_code():
    """Every name of --limits once, with its default, in the order of the code."""
    table = (ROOT / "SECURITY.md").read_text().split("| Name | Default |")[1].split("\n\n")[0]
    shown = {}
    for names, numbers in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", table, re.MULTILINE):
        defaults = [int(number.replace(",", "")) for number in numbers.split(", ")]
        shown |= dict(zip(re.findall(r"`(\w+)`", names), defaults, strict=True))
    assert shown == {name: default for name, (default, _) in DEFAULTS.items()}
