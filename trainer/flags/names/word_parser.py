"""Parsers of the small commands, which have words without a flag. A wrong flag is answered as in training."""

import argparse
import sys
from collections.abc import Sequence

from trainer.errors import UserError
from trainer.flags.names.repeats import refuse_repeated
from trainer.flags.names.suggestions import no_such_flags, value_of
from trainer.help_texts import PlainHelp, example_of, typed
from trainer.limits import HELP, raise_limits


class OneLineParser(argparse.ArgumentParser):
    """Raises UserError for wrong arguments, without the usage. No abbreviation of a flag is taken.

    `command` is a file of cli/ or a name of a module; --help begins with its example.
    """

    def __init__(self, command: str, **options):
        super().__init__(typed(command), **{"allow_abbrev": False, "formatter_class": PlainHelp, **options})
        self.command = command
        self.given: list[str] = []

    def format_help(self) -> str:
        return example_of(self.command) + super().format_help()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace=None):
        self.given = list(sys.argv[1:] if args is None else args)
        refuse_repeated(self.given)
        return super().parse_known_args(self.given, namespace)

    def error(self, message: str) -> None:
        """Name the flags that are none, with what to write instead; also where argparse first misses another word."""
        known = [flag.removeprefix("--") for flag in self._option_string_actions]
        unknown = [
            place
            for place, word in enumerate(self.given)
            if word.startswith("--") and word.partition("=")[0].removeprefix("--") not in ("", *known)
        ]
        if unknown and message.startswith(("unrecognized arguments", "the following arguments are required")):
            found = {self.given[place].partition("=")[0]: value_of(self.given, place) for place in unknown}
            raise no_such_flags(found, self.command, known)
        raise UserError("arguments", message, "see --help")


def _with_limits_last(argv: Sequence[str]) -> list[str]:
    """The words with --limits and its values behind the others: argparse would take a RUN after them for a value."""
    limits, others, is_value = [], [], False
    for word in argv:
        is_value = word == "--limits" or (is_value and "=" in word and word[0] != "-")
        (limits if is_value else others).append(word)
    return [*others, *limits]


class ReadingParser(OneLineParser):
    """The parser of a command that reads what others wrote: --limits holds from its `parse_args` on."""

    def __init__(self, command: str, **options):
        super().__init__(command, **options)
        self.add_argument("--limits", nargs="+", action="extend", metavar="NAME=NUMBER", help=HELP)

    def parse_args(self, argv: Sequence[str] | None = None):
        args = super().parse_args(_with_limits_last(sys.argv[1:] if argv is None else argv))
        raise_limits(vars(args).pop("limits") or ())
        return args
