"""What an environment has told the model. Turns were sampled behind it, so it stays as it is until a `History` replaces it."""

import copy
from typing import Any

from trainer.errors import UserError

STAY = "only new messages, or a History, which replaces all"


class GivenMessages:
    """The messages and tools that one environment has given for this history, each list with a copy of it."""

    def __init__(self) -> None:
        self._pairs: list[tuple[list, list]] = []

    def add(self, *values: Any) -> None:
        """`values` are what `reset` or `step` returned, and the tools: their lists are what the model reads.

        Raises: UserError if the environment has edited or dropped what it gave before. A list may have grown at its end, and
        one whose objects are given again is only used again.
        """
        parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
        lists = [part for part in parts if isinstance(part, list)]
        again = {id(item) for part in lists for item in (part, *part)}
        self._pairs = [(now, then) for now, then in self._pairs if again.isdisjoint((id(now), *map(id, now)))]
        if any(now[: len(then)] != then for now, then in self._pairs):
            raise UserError("", "changes messages or tools that it gave before", STAY)
        self._pairs += [(part, copy.deepcopy(part)) for part in lists]


def check_new(opening: list[dict], messages: list[dict]) -> None:
    """Check that `messages` of a step are not the conversation from its start again, whole or shortened.

    Raises: UserError if they are. The model would read them behind the turns that they were to replace.
    """
    whole = len(messages) > len(opening) and messages[: len(opening)] == opening
    if whole or (messages[0] == opening[0] and opening[0]["role"] == "system"):
        raise UserError("", "gives the first messages again", STAY)
