"""Lines that fit the width of a terminal."""

import shutil
import sys
import textwrap


def fitted(text: str) -> str:
    """The text with its long lines broken between words, or between the items of a line with ` | `.

    Where stdout is no terminal, it is the text as it is: logs have one line for each step.
    """
    if not sys.stdout.isatty():
        return text
    wide = textwrap.TextWrapper(
        shutil.get_terminal_size().columns,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    )
    return "\n".join("\n".join(wide.wrap(_joined(line))) for line in text.split("\n")).replace("\xa0", " ")


def _joined(line: str) -> str:
    """A line whose items cannot be broken."""
    return " | ".join(item.replace(" ", "\xa0") for item in line.split(" | ")) if " | " in line else line
