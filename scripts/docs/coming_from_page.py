"""Write docs/coming_from.md from the table of other trainers' names: `python scripts/docs/coming_from_page.py`."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from trainer.flags.names.peer_row import ALL, FIXED, LEAVE_OUT, PEERS, RL, PeerName
from trainer.flags.names.suggestions import ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"
HEAD = """<!-- Written by scripts/docs/coming_from_page.py from the tables in trainer/flags/names/. Do not edit. -->

# Coming from TRL / LLaMA-Factory / axolotl / OpenRLHF / verl / ms-swift

You know another trainer. This page says which flag does the same here, and how to convert its value.

You need not look it up. Give the name that you know, and the error says what to write:

```text
error: --gradient_accumulation_steps: no such flag; per-device batch x accumulation x ranks: --train_batch_size 32
```

Give a whole file of another trainer to `--config`, and all its keys are answered at once. A path of verl, such as
`actor_rollout_ref.actor.optim.lr`, is a key too.

Three habits differ:

- A batch is the whole batch of an optimizer step. Accumulation follows from it: the number of ranks does not change the result.
- A command is a method: `train_sft`, `train_rm`, `train_dpo`, `train_ppo`, `train_kd`.
- A flag works or is refused. None is ignored.

After a change of the table, write this page again:

<!-- run by: test/test_peer_names.py -->
```bash
python scripts/docs/coming_from_page.py
```
"""
OF = {ALL: "", FIXED: "all but `train_ppo` and `train_dpo --online`", RL: "`train_ppo`, `train_dpo --online`"}


def as_code(text: str) -> str:
    """A text with its flags as code."""
    return re.sub(r"--\w+", r"`\g<0>`", text)


def entry(row: PeerName) -> str:
    names = ", ".join(f"`{name}`" for name in row.names.split())
    ours = f"`{row.ours}`" if row.ours and " and " not in row.ours else as_code(row.ours)
    commands = OF.get(row.commands, ", ".join(f"`{command}`" for command in row.commands))
    off = "" if row.off == LEAVE_OUT else f"false: {row.off}"
    words = as_code("; ".join(filter(None, [row.words, off])))
    return f"| {names} | {ours or 'no counterpart'} | {words} | {commands} |"


def page() -> str:
    """The text of docs/coming_from.md."""
    parts = [HEAD]
    for letter, name in PEERS.items():
        rows = [entry(row) for row in ROWS if letter in row.peers]
        head = "| There | Here | How | Only for |\n|---|---|---|---|\n"
        parts.append(f"## {name}\n\n{head}" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE}")
