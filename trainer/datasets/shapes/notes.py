"""What was recognised in the rows of a set, and what was not used: one note for each row, a few lines for the set."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

NOTE = "note"  # the column of a tokenized row that holds its note
SEPARATOR, UNIT = "\t", "\x1f"
SHOWN = 10  # characters that are dropped


@dataclass
class Notes:
    """What is known of one row. `facts` are whole sentences, `lost` characters that the tokenizer drops.

    `left_out` are the names of --ignore_columns that the row has, as columns or as keys of messages.
    """

    shape: str = ""
    columns: set[str] = field(default_factory=set)  # not used
    keys: set[str] = field(default_factory=set)  # of messages and their parts, not used
    facts: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)  # of images, videos and audios that the row does not have

    def as_text(self) -> str:
        """The note as a column has it. Few different notes exist in a set."""
        sets = (self.columns, self.keys, self.lost, self.left_out, self.marks)
        return SEPARATOR.join([self.shape, *(", ".join(sorted(names)) for names in sets), *sorted(self.facts)])


def counted(text: str, *numbers: int, without: str = "") -> str:
    """A fact for `Notes`. Its line is `text` with the sums of the numbers over all rows, or `without` if the first is 0.

    counted("{} of {} turns", 1, 2) in three rows gives "3 of 6 turns". Without numbers, the rows are counted.
    """
    return UNIT.join([text, without, *map(str, numbers or (1,))])


def summary_of_notes(notes: Iterable[str]) -> tuple[list[str], set[str]]:
    """The lines for the start of a run, and what `left_out` of some rows has together."""
    shapes: Counter = Counter()
    columns, keys, lost, left_out, marks, facts, num_lossy, num_marked = *(set() for _ in range(6)), 0, 0
    sums: dict[tuple[str, str], list[int]] = {}  # of `counted`
    for note, count in Counter(notes).items():
        shape, *names = note.split(SEPARATOR) if note else [""] * 6
        shapes[shape] += count
        for found, own in zip((columns, keys, lost, left_out, marks), names):
            found |= set(own.split(", ")) - {""}
        num_lossy += count * bool(names[2])
        num_marked += count * bool(names[4])
        for fact in names[5:]:
            text, *rest = fact.split(UNIT)
            if not rest:
                facts.add(fact)
                continue
            without, *numbers = rest
            before = sums.get((text, without), [0] * len(numbers))
            sums[text, without] = [a + count * int(b) for a, b in zip(before, numbers, strict=True)]
    shapes.pop("", None)
    total = sum(shapes.values())
    lines = [shape if count == total else f"{count} of them: {shape}" for shape, count in shapes.items()]
    if columns:
        lines.append(f"columns not used: {', '.join(sorted(columns))}")
    if keys:
        lines.append(f"keys of messages not used: {', '.join(sorted(keys))}")
    if lost:
        first = " ".join(sorted(lost)[:SHOWN]) + " ..." * (len(lost) > SHOWN)
        lines.append(f"WARNING: the tokenizer drops these characters, in {num_lossy} rows: {first}")
    if marks:
        shown = ", ".join(sorted(marks))
        lines.append(f"WARNING: {num_marked} rows hold {shown} as plain text, because they have no column of that kind")
    found = [(text if values[0] else without).format(*values) for (text, without), values in sums.items()]
    return lines + sorted(facts) + sorted(line for line in found if line), left_out
