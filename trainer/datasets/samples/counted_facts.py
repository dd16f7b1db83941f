"""Facts of rows that have numbers. The lines of a set add them up."""

from collections import Counter
from collections.abc import Iterable

from trainer.datasets.shapes.notes import SEPARATOR, summary_of_notes

UNIT = "\x1f"


def counted(text: str, *numbers: int, without: str = "") -> str:
    """A fact for `Notes`. Its line is `text` with the sums of the numbers over all rows, or `without` if the first is 0.

    counted("{} of {} turns", 1, 2) in three rows gives "3 of 6 turns". Without numbers, the rows are counted.
    """
    return UNIT.join([text, without, *map(str, numbers or (1,))])


def summary_with_counts(notes: Iterable[str]) -> tuple[list[str], set[str]]:
    """`summary_of_notes`, with the facts of `counted` added up."""
    plain, sums = Counter(), {}
    for note, count in Counter(notes).items():
        parts = note.split(SEPARATOR)
        plain[SEPARATOR.join(part for part in parts if UNIT not in part)] += count
        for part in (part for part in parts if UNIT in part):
            text, without, *numbers = part.split(UNIT)
            before = sums.get((text, without), [0] * len(numbers))
            sums[text, without] = [a + count * int(b) for a, b in zip(before, numbers, strict=True)]
    lines, left_out = summary_of_notes(plain)
    found = [(text if values[0] else without).format(*values) for (text, without), values in sums.items()]
    return lines + sorted(line for line in found if line), left_out
