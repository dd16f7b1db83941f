"""Writes docs/record.md and docs/record.png from docs/record.json: `python scripts/record/page.py`."""

import json
from pathlib import Path

import matplotlib
from cases import CONDITIONS, EPOCHS
from judge import LOSS_LIMIT, NORM_LIMIT, WEIGHT_LIMIT

DOCS = Path(__file__).parents[2] / "docs"
SIGNS = {
    "equal": "🟩 equal",
    "convention": "🟦 convention",
    "wrong": "🟥 differs",
    "refused": "⬜ refuses",
    "none": "– not offered",
}
OPENING = f"""# The record

Does a trainer give the losses, gradients and weights of the plain loop? This page asks the trainers of the field, this one first, under the
conditions that people use. Each cell is a real run on a CPU with two cores.

The plain loop has one process, one sample at a time, fp32, and the mean over all tokens of a global batch. A cell is equal if each
loss is within {LOSS_LIMIT:g}, each gradient norm within {NORM_LIMIT:g}, and the change of the weights within {WEIGHT_LIMIT:g}.
All runs start from the same tiny model and the same {EPOCHS} epochs of conversations of uneven lengths.

![Trainers and conditions as colours](record.png)
"""
CLOSING = """
- **🟩 equal**: within the limits. The number is the worst relative difference of a loss.
- **🟦 convention**: equal to the plain loop with another choice, which the notes name.
- **🟥 differs**: not equal. The notes name the mistake of the plain loop that gives the same numbers, if one does.
- **⬜ refuses**: the trainer ends with an error on this machine.
- **– not offered**: the trainer has no such feature.

The limits are relative. Where a log rounds its values, the rounding is allowed too. Five of the cells of axolotl have one cause: these
conditions accumulate over micro-batches.

## Notes

| Trainer | Condition | What differs, or the trainer's own error |
|---|---|---|
"""
FINDINGS = """
## Where the differences come from

- **axolotl 0.19.0, accumulation above 1.** `AxolotlTrainer.__init__` (`axolotl/core/trainers/base.py`) sets
  `model_accepts_loss_kwargs` to False if the inner model's `forward` has no argument of the name `num_items_in_batch`. The models of
  transformers take this count through `**kwargs`. So the count over all micro-batches is not used, and a step is a mean of means.
  The smallest input is two micro-batches with different numbers of loss tokens. With accumulation 1, or with packed rows, it is equal.
- **axolotl 0.19.0, last short batch.** 11 rows, 8 rows a step and 4 epochs are 8 steps. The run ends after 6 steps.
- **Evaluation.** The HF Trainer 5.19, TRL and axolotl average the means of batches, weighted by rows. LLaMA-Factory and ms-swift average
  them without weights. Batches with more loss tokens count too little. The training loss is not touched.
- **The line break behind a turn.** LLaMA-Factory and ms-swift have a `chatml` template of their own. It also trains the line break
  after `<|im_end|>`. The template of the model ends the trained part at `<|im_end|>`, but they do not read it. The plain loop with
  their choice has equal numbers.
"""
REPEAT = """
## Repeat it

<!-- slow: the environments take 6 GB, all cells an hour -->
```bash
bash scripts/record/environments.sh
python scripts/record/record.py
python scripts/record/record.py "HF Trainer" --conditions "evaluation, uneven batches"
python scripts/record/page.py
```

The first command makes an environment for each trainer. The second runs all cells. The third runs one cell, in about a minute. The
scripts `scripts/record/run_*.py` hold the settings of each trainer, as a user would write them. A cell that looks wrong to you is
welcome as an issue, with the settings that you expect.

## What it does not show

- A resume within an epoch: here an epoch is one step, except in "last short batch".
- GPU kernels, bf16 and FlashAttention: all runs are fp32 on a CPU. A refusal here may be no refusal there.
- DPO, reward models and GRPO. [Preference training](preference.md) compares these losses with TRL.
- OpenRLHF, verl and torchtitan are not tried yet. torchtune 0.6.1 does not import with the torchao of torch 2.13.
"""


def cell_text(cell: dict | None) -> str:
    if cell is None:
        return "not run"
    return SIGNS[cell["verdict"]] + (f" {cell['loss']:.0e}" if cell["verdict"] in ("equal", "convention") else "")


def page(record: dict) -> str:
    """The page as Markdown."""
    lines = [OPENING, "| Trainer | " + " | ".join(CONDITIONS) + " |", "|---|" + "---|" * len(CONDITIONS)]
    notes = {}
    for trainer, cells in record.items():
        versions = sorted({f"{cell['version']}, {cell['date']}" for cell in cells.values()})
        row = [cell_text(cells.get(condition)) for condition in CONDITIONS]
        lines.append(f"| **{trainer}** ({'; '.join(versions)}) | " + " | ".join(row) + " |")
        for condition, cell in cells.items():
            if cell["note"]:
                notes.setdefault((trainer, cell["verdict"], cell["note"]), []).append(condition)
    lines.append(CLOSING.rstrip("\n"))
    for (trainer, _, note), conditions in notes.items():
        where = "all conditions" if len(conditions) == len(record[trainer]) else "; ".join(conditions)
        lines.append(f"| {trainer} | {where} | {' '.join(note.split()).replace('|', '/')} |")
    return "\n".join(lines) + "\n" + FINDINGS + REPEAT


def picture(record: dict, path: Path) -> None:
    """The cells as colours: a row for each trainer, a column for each condition."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"equal": "#2e9e5b", "convention": "#3b7dd8", "wrong": "#d8433b", "refused": "#c8c8c8", "none": "#eeeeee"}
    figure, axes = plt.subplots(figsize=(9, 0.6 * len(record) + 2.2))
    for row, cells in enumerate(record.values()):
        for column, condition in enumerate(CONDITIONS):
            verdict = cells.get(condition, {}).get("verdict")
            axes.add_patch(plt.Rectangle((column, row), 0.95, 0.9, color=colours.get(verdict, "#ffffff")))
    axes.set_xlim(0, len(CONDITIONS))
    axes.set_ylim(len(record), 0)
    axes.set_xticks([column + 0.5 for column in range(len(CONDITIONS))], CONDITIONS, rotation=30, ha="left")
    axes.set_yticks([row + 0.45 for row in range(len(record))], record)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.savefig(path, dpi=90, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    results = json.loads((DOCS / "record.json").read_text())
    (DOCS / "record.md").write_text(page(results))
    picture(results, DOCS / "record.png")
