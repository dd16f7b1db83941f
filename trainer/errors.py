"""UserError, the error that users see: one line that says where, what was found and what to do.

What users see has no secret of an address in it, and no control character: text of a file could drive the terminal.
"""

import re
from typing import Any

LEFT_OUT = "***"  # in place of a secret
# user and password of an address; values of its query whose name says that they are secret
USER = re.compile(r"(?<=://)[^/\s?#]*(?=@)")
SECRETS = r"key|token|secret|(?<!by)pass(?:word|wd|phrase|code)?|pwd|signature|sig|credentials?|auth|authorization"
QUERY = re.compile(rf"(?i)([?&;#][^=&;\s]*(?:{SECRETS})=)[^&;\s,#]+")
TYPE = re.compile(r"<class '(?:\w+\.)*(\w+)'>")  # as Python writes a type
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def without_secrets(value: Any) -> Any:
    """`value` with *** in place of the secrets of addresses, also in lists and dicts."""
    if isinstance(value, str):
        return QUERY.sub(rf"\1{LEFT_OUT}", USER.sub(LEFT_OUT, value))
    if isinstance(value, dict):
        return {name: without_secrets(own) for name, own in value.items()}
    return [without_secrets(own) for own in value] if isinstance(value, (list, tuple)) else value


def has_left_out(value: Any) -> bool:
    """Whether `without_secrets` left something out of this text."""
    return isinstance(value, str) and (f"://{LEFT_OUT}@" in value or f"={LEFT_OUT}" in value)


def plain(text: str) -> str:
    """A text for the screen: without secrets of addresses, and with control characters as \\x1b and so on."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), without_secrets(text))


def as_line(text: str) -> str:
    """`plain` in one line: a name of a file could have a line of its own, which looks like one of ours."""
    return plain(text).replace("\n", "\\n")


class UserError(Exception):
    """Something is wrong with the arguments, the data, the layout or a checkpoint.

    `where` is the flag or the file (and line). `found` is what was found there. `allowed` is what would be accepted.
    `instead` is a sentence that says what to do, in place of `allowed`.
    """

    def __init__(self, where: str, found: str, allowed: str = "", instead: str = ""):
        super().__init__(where, found, allowed, instead)  # all go into args, so that the error survives pickling
        self.where, self.found, self.allowed, self.instead = where, found, allowed, instead

    def __str__(self) -> str:
        end = f". {self.instead}" if self.instead else f" (allowed: {self.allowed})" if self.allowed else ""
        return as_line(f"{self.where}: {self.found}{end}")


class Failed(UserError):
    """What may go well the next time: a server, a sandbox or a time limit failed. Only the samples that need it are lost."""


def one_line(error: BaseException) -> str:
    """The first line of an error that says something, with plain names of types. Without a line, the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Error(s) in loading")] or lines  # torch; the cause follows
    return TYPE.sub(r"\1", lines[0]).rstrip(":") if lines else type(error).__name__


class Interrupted(Exception):
    """A signal asked the run to stop. The message says whether the run could save a checkpoint first."""


class NothingLeft(Exception):
    """The run that a command asks for has ended already. The command ends with exit code 0."""
