"""What was recognised in the rows of a set, and what was not used: one note for each row, a few lines for the set."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainer.metrics import in_words

NOTE = "note"  # the column of a tokenized row that holds its note
SEPARATOR, UNIT = "\t", "\x1f"
SHOWN = 10  # characters of a line
# names of a row that one line has for all rows; `{rows}` have some, `{first}` are the first ones
LINES = {
    "columns": "columns not used: {all}",
    "keys": "keys of messages not used: {all}",
    "lost": "WARNING: the tokenizer drops these characters, in {rows:row}: {first}",
    "spaces": "WARNING: the tokenizer reads these characters as a space, in {rows:row}: {first}",
    "changed": "WARNING: the tokenizer reads these characters as others, in {rows:row}: {first}",
    "runs": "WARNING: the tokenizer reads several of these characters as one, in {rows:row}: {first}",
    "ends": "WARNING: the tokenizer drops these characters at the ends of texts, in {rows:row}: {first}",
    "marks": "WARNING: {rows:row holds|rows hold} {all} as plain text, because they have no column of that kind",
    "left_out": "",
}


@dataclass
class Notes:
    """What is known of one row. `facts` are whole sentences. `lost` and the sets behind it are characters: see LINES.

    `left_out` are the names of --ignore_columns that the row has, as columns or as keys of messages.
    """

    shape: str = ""
    columns: set[str] = field(default_factory=set)  # not used
    keys: set[str] = field(default_factory=set)  # of messages and their parts, not used
    facts: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    spaces: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    runs: set[str] = field(default_factory=set)
    ends: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)  # of images, videos and audios that the row does not have

    def as_text(self) -> str:
        """The note as a column has it. Few different notes exist in a set."""
        sets = (getattr(self, name) for name in LINES)
        return SEPARATOR.join([self.shape, *(", ".join(sorted(names)) for names in sets), *sorted(self.facts)])


def summed(text: str, *numbers: int, without: str = "") -> str:
    """A fact for `Notes`. Its line is `text` with the sums of the numbers over all rows, or `without` if the first is 0.

    summed("{} of {:turn}", 1, 2) in three rows gives "3 of 6 turns". Without numbers, the rows are counted.
    """
    return UNIT.join([text, without, *map(str, numbers or (1,))])


def summary_of_notes(notes: Iterable[str]) -> tuple[list[str], set[str]]:
    """The lines for the start of a run, and what `left_out` of some rows has together."""
    shapes: Counter = Counter()
    found: dict[str, set[str]] = {name: set() for name in LINES}
    rows = dict.fromkeys(LINES, 0)
    facts, sums = set(), {}  # of `summed`: {(text, without): numbers}
    for note, count in Counter(notes).items():
        shape, *names = note.split(SEPARATOR) if note else [""] * (1 + len(LINES))
        shapes[shape] += count
        for kind, own in zip(LINES, names):
            found[kind] |= set(own.split(", ")) - {""}
            rows[kind] += count * bool(own)
        for fact in names[len(LINES) :]:
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
    for kind, text in LINES.items():
        if text and (all_names := sorted(found[kind])):
            first = " ".join(all_names[:SHOWN]) + " ..." * (len(all_names) > SHOWN)
            lines.append(in_words(text, rows=rows[kind], all=", ".join(all_names), first=first))
    told = [in_words(text if values[0] else without, *values) for (text, without), values in sums.items()]
    return lines + sorted(facts) + sorted(line for line in told if line), found["left_out"]
