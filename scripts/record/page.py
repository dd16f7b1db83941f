"""Writes docs/record.md and docs/record.png from docs/record.json: `python scripts/record/page.py`."""

import json
import textwrap
from pathlib import Path

import matplotlib
from cases import CONDITIONS, EPOCHS
from judge import LOSS_LIMIT, NORM_LIMIT, WEIGHT_LIMIT
from methods import METHODS

DOCS = Path(__file__).parents[2] / "docs"
COLOURS = {"equal": "🟩", "convention": "🟦", "wrong": "🟥", "refused": "⬜"}  # the site shows a square instead
WORDS = {"equal": "equal", "convention": "convention", "wrong": "differs", "refused": "refuses", "none": "not offered"}
SIGNS = {
    verdict: f'<span class="verdict {verdict}">{COLOURS[verdict]}</span> {word}' if verdict in COLOURS else f"– {word}"
    for verdict, word in WORDS.items()
}
OPENING = f"""# The record

Does a trainer give the losses, gradients and weights of the plain loop? This page asks the trainers of the field, this one first, under the
conditions that people use. Each cell is a real run on a CPU with two cores.

The plain loop has one process, one sample at a time, fp32, and the mean over all tokens of a global batch. A cell is equal if each
loss is within {LOSS_LIMIT:g}, each gradient norm within {NORM_LIMIT:g}, and the change of the weights within {WEIGHT_LIMIT:g}.
All runs start from the same tiny model and the same {EPOCHS} epochs of conversations of uneven lengths.

![Trainers and conditions as colours](record.png)
"""
OPENING_OF_METHODS = """
## Pairs and rollouts

DPO and reward models train on 8 or 11 pairs, with the mean over the pairs of a step. GRPO trains on given rollouts: two prompts, four
responses each, with the mean over the tokens of a step. The plain loop takes one sequence at a time here too.
"""
CLOSING = """
- <span class="verdict equal">🟩</span> **equal**: within the limits. The number is the worst relative difference of a loss.
- <span class="verdict convention">🟦</span> **convention**: equal to the plain loop with another choice, which the notes name.
- <span class="verdict wrong">🟥</span> **differs**: not equal. The notes name the mistake of the plain loop that gives the same numbers, if one does.
- <span class="verdict refused">⬜</span> **refuses**: the trainer ends with an error on this machine.
- **– not offered**: the trainer has no such feature.

The limits are relative. Where a log rounds its values, the rounding is allowed too. So is that of the plain loop, in the second
table: there it runs in fp64, too, if a cell is slightly off. AdamW widens rounding, as [below](#known-reports). Five cells of
axolotl have one cause: these conditions accumulate over micro-batches.

{runs}

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
  The factor: of T loss tokens in four micro-batches, one in a micro-batch with t counts T / (4 t) times.
- **axolotl 0.19.0, last short batch.** 11 rows, 8 rows a step and 4 epochs are 8 steps: each epoch ends with a step of 3 rows. The run
  ends after 6 steps. The fourth epoch is not trained, without a word. `calculate_total_num_steps` (`axolotl/utils/trainer.py`) takes
  11 x 4 / 8, rounded up. `core/builders/base.py` gives that to the HF Trainer as `max_steps`. For pairs, `common/datasets.py` has the same
  formula. Its trainers of pairs do not read `curriculum_sampling`, so their order is random, and only the number of steps is judged. The smallest input is 3 rows, 2 rows a step and 2 epochs: 3 of 4 steps.
- **Evaluation.** The HF Trainer 5.19, TRL, axolotl and Oumi average the means of batches, weighted by rows. LLaMA-Factory and ms-swift average
  them without weights. Batches with more loss tokens count too little. The training loss is not touched.
  The smallest input is two batches with different numbers of loss tokens.
- **The line break behind a turn.** LLaMA-Factory and ms-swift have a `chatml` template of their own. It also trains the line break
  after `<|im_end|>`. The template of the model ends the trained part at `<|im_end|>`, but they do not read it. The plain loop with
  their choice has equal numbers.
- **Oumi 0.9, packing.** With `pack: true`, `PretrainingAsyncTextDataset` has one queue for all its iterators. Oumi reads a first example in
  `oumi/train.py`, and TRL reads another one. The eight rows fill one sequence. So the second reader meets the end mark of the first:
  `StopIteration`, before the first step. Each input that fills one sequence does it. With more sequences it runs, but its labels are all
  ids: `assistant_only` is lost.
- **Oumi 0.9, 2 ranks.** Its `init_distributed` asks for a GPU by `torch.cuda.set_device`.
- **Oumi 0.9, DPO.** Its recipes train with TRL's trainers (here TRL 1.6), on rows that Oumi renders and masks. So its DPO has TRL's mean.
- **TRL 1.16, DPO and reward model, last short batch.** `DPOTrainer` and `RewardTrainer` take the mean over a micro-batch, and the HF
  Trainer divides it by the number of micro-batches. The last step has micro-batches of two pairs and one pair. So the lone pair counts
  twice. The smallest input is three pairs with micro-batches of two. Full micro-batches are equal.
- **LLaMA-Factory 0.9.5 and ms-swift 4.6, last short batch.** LLaMA-Factory, and the reward model of ms-swift, have the same mean of means.
- **ms-swift 4.6, DPO, last short batch.** `swift/rlhf_trainers/dpo_trainer.py` divides the mean of a micro-batch by
  `gradient_accumulation_steps`. The last step has two micro-batches and is divided by four. So its loss and gradient are half of the
  mean of means.
- **ms-swift 4.6, reward model.** `--train_dataloader_shuffle false` does not reach this trainer, without a word. Here its rows come in order
  through `--train_sampling_strategy sequential`.
- **LLaMA-Factory 0.9.5, reward model.** Its value head has a dropout of 0.1, which `summary_dropout_prob` in `config.json` turns off
  here. It cannot save a model with tied embeddings: `RuntimeError: Some tensors share memory`. So these cells start from an untied copy.
- **axolotl 0.19.0, reward model.** The rows need a column `system`. An empty one becomes an empty turn before the prompt, without a
  word. These cells set `drop_system_message: true`.
- **TRL 1.16, GRPO with `top_k`.** Its log-probs cover the full vocabulary, but the sampler takes the 150 best tokens. Without an engine
  this is a choice. With the log-probs of an engine, the two are divided by each other. `GRPOConfig` asks vLLM for
  `processed_logprobs`, and these are over the kept tokens. So each token counts by the kept mass, in place of 1. The page gives TRL such
  log-probs through `rollout_func`, with `vllm_importance_sampling_mode="token_truncate"`. vLLM itself does not run.
- **Tensor parallelism 2.** TRL, LLaMA-Factory and ms-swift shard by AutoTP of DeepSpeed 0.19.8, as the docs of transformers say. `ParallelismConfig`
  of accelerate refuses a CPU.
- **Reward models of this trainer, LLaMA-Factory, ms-swift and axolotl.** The score is that of the last token, as in transformers. With a
  chat template, it is the line break behind the answer. TRL gets token ids without it.

## Known reports

These mistakes were reported for trainers of the field. Where no peer here shows one, a test plants it, and the judge names it.

| Report | Where it is found |
|---|---|
| mean of means under accumulation | axolotl, "accumulation 4, uneven lengths" |
| DPO with uneven batches | TRL, Oumi, LLaMA-Factory and ms-swift, "DPO, last short batch" |
| log-probs over the full vocabulary against a truncated sampler | TRL, "GRPO, top-k sampling, log-probs of the engine" |
| evaluation as a mean of batch means | LLaMA-Factory and ms-swift, "evaluation, uneven batches" |
| loss of a reward model that depends on the tensor-parallel size | TRL in bf16, and this trainer too; with the losses below |
"""
SIZES = """
**Losses by the tensor-parallel size.** {trainers} train a reward model on 1, 2 and 4 ranks. The worst step's loss differs by {bf16} between
these sizes in bf16, and by {fp32} in fp32. So the cause is rounding: each rank rounds its part of a sum before the parts are added.
AdamW makes it larger: it divides each gradient by its own size, so a gradient near 0 becomes a whole step of rounding. Ours shows
it in fp32: 1.5e-08 before the first update, 8e-06 after it with an epsilon of 1e-8, 1e-06 with 1e-5, and 3e-07 with 1e-3.
`python scripts/record/tensor_parallel.py "this trainer, fsdp2" --eps 1e-5` shows these figures in a minute.
A factor of the ranks is another mistake. No peer has it here: TRL, LLaMA-Factory and ms-swift are equal to the plain loop in fp32. A test
plants this factor, and the judge names it.
"""
REPEAT = """
## Repeat it

<!-- slow: the environments take 15 GB, all cells an hour -->
```bash
bash scripts/record/environments.sh
python scripts/record/record.py
python scripts/record/tensor_parallel.py TRL "this trainer, fsdp2"
python scripts/record/page.py
```

The first command makes an environment for each trainer. The second runs all cells, the third the losses by the tensor-parallel size.
The three scripts run in this trainer's own environment, with its extra `lora`.
For one cell, name its environment, its trainer and its condition:

<!-- slow: two environments -->
```bash
bash scripts/record/environments.sh runs/record/environments oumi
python scripts/record/record.py Oumi --conditions "DPO, last short batch"
bash scripts/record/environments.sh runs/record/environments trl
python scripts/record/record.py "HF Trainer" --conditions "evaluation, uneven batches"
```

From nothing, with an empty cache and an index near by, Oumi's environment took 77 seconds and its cell 53. The environment of the HF
Trainer took 27 seconds and its cell 30. The machine was busy with other work. Over a network, the download of some GB is added. The
scripts `scripts/record/run_*.py` hold the settings of each trainer, as a user would write them. A cell that looks wrong to you is
welcome as an issue, with the settings that you expect.

## What it does not show

- A resume within an epoch: here an epoch is one step, except in "last short batch".
- GPU kernels, bf16 and FlashAttention: all runs are fp32 on a CPU. A refusal here may be no refusal there.
- GRPO with ms-swift, axolotl and Oumi, which take their samples themselves. Tensor parallelism with axolotl,
  which refuses two ranks.
- Trainers that do not start here. The next four were tried by hand, and no command here repeats that.
- verl 0.9.1 asks for a GPU's memory when its SFT trainer starts: `AssertionError: Torch not compiled with CUDA enabled`.
- OpenRLHF 0.11.2 asks for a GPU when its SFT trainer starts: `RuntimeError: Found no NVIDIA driver on your system`, from
  `torch.cuda.set_device`. It imports flash-attn 2.8.3, whose package installs with `FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE` and imports with
  `FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE`. No stub was used. Its weights are bf16 or fp16 only, so no cell could be equal.
- torchtune 0.6.1 imports with torch 2.6 and torchao 0.9, but has no Qwen3, which is the model of all cells.
- torchtitan 0.3.0 has Qwen3, but its trainer ends with the same error, from `set_device`.
"""


def sizes_text(sizes: dict) -> str:
    """How far losses depend on the tensor-parallel size: the result of tensor_parallel.py in words."""
    worst = {
        dtype: max(
            (max(step) - min(step)) / min(step) for found in sizes.values() for step in zip(*found[dtype].values())
        )
        for dtype in ("bf16", "fp32")
    }
    trainers = " and ".join(sorted(name.partition(",")[0] for name in sizes))
    return SIZES.format(trainers=trainers, **{dtype: f"{value:.0e}" for dtype, value in worst.items()})


def runs_text(record: dict) -> str:
    """How many cells of other trainers were run again. A cell that is not offered has no run."""
    cells = [
        cell
        for name, row in record.items()
        if not name.startswith("this trainer")
        for cell in row.values()
        if cell["verdict"] != "none"
    ]
    again = [cell for cell in cells if cell.get("runs", 1) > 1]
    wrong = [[cell for cell in group if cell["verdict"] == "wrong"] for group in (again, cells)]
    return (
        f"Of other trainers, {len(again)} of {len(cells)} cells ran again on the same version, with the same verdict and "
        f"note. Of those that differ, it is {len(wrong[0])} of {len(wrong[1])}."
    )


def cell_text(cell: dict | None) -> str:
    if cell is None:
        return "not run"
    return SIGNS[cell["verdict"]] + (f" {cell['loss']:.0e}" if cell["verdict"] in ("equal", "convention") else "")


def row(trainer: str, cells: dict, conditions: dict) -> str:
    cells, dates = {name: cell for name, cell in cells.items() if name in conditions}, {}
    for cell in cells.values():
        dates.setdefault(cell["version"], set()).add(cell["date"].replace("-", "&#8209;"))  # a date does not break
    versions = [f"{version}, {' to '.join(sorted({min(days), max(days)}))}" for version, days in sorted(dates.items())]
    texts = [cell_text(cells.get(condition)) for condition in conditions]
    return f"| **{trainer}** ({'; '.join(versions)}) | " + " | ".join(texts) + " |"


def page(record: dict, sizes: dict) -> str:
    """The page as Markdown, from record.json and record_tensor_parallel.json."""
    lines, notes = [OPENING], {}
    for opening, conditions in (("", CONDITIONS), (OPENING_OF_METHODS, METHODS)):
        lines += [opening] * bool(opening)
        lines += ["| Trainer | " + " | ".join(conditions) + " |", "|---|" + "---|" * len(conditions)]
        lines += [
            row(trainer, cells, conditions) for trainer, cells in record.items() if conditions.keys() & cells.keys()
        ]
    for trainer, cells in record.items():
        for condition, cell in cells.items():
            if cell["note"]:
                notes.setdefault((trainer, cell["verdict"], cell["note"]), []).append(condition)
    lines.append(CLOSING.rstrip("\n").format(runs=runs_text(record)))
    for (trainer, _, note), conditions in notes.items():
        where = "all conditions" if len(conditions) == len(record[trainer]) else "; ".join(conditions)
        lines.append(f"| {trainer} | {where} | {' '.join(note.split()).replace('|', '/')} |")
    return "\n".join(lines) + "\n" + FINDINGS + sizes_text(sizes) + REPEAT


def picture(record: dict, path: Path) -> None:
    """The cells as colours: a row for each condition, a column for each trainer, narrow enough to read on a phone."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"equal": "#2e9e5b", "convention": "#3b7dd8", "wrong": "#d8433b", "refused": "#c8c8c8", "none": "#eeeeee"}
    conditions = [*CONDITIONS, *METHODS]
    figure, axes = plt.subplots(figsize=(3.2, 0.42 * len(conditions)))
    for column, cells in enumerate(record.values()):
        for place, condition in enumerate(conditions):
            verdict = cells.get(condition, {}).get("verdict")
            axes.add_patch(plt.Rectangle((column, place), 0.93, 0.9, color=colours.get(verdict, "#ffffff")))
    axes.set_xlim(0, len(record))
    axes.set_ylim(len(conditions), 0)
    axes.set_xticks([column + 0.4 for column in range(len(record))], record, rotation=60, ha="left")
    names = [textwrap.fill(condition, 24) for condition in conditions]
    axes.set_yticks([place + 0.45 for place in range(len(conditions))], names, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    results = json.loads((DOCS / "record.json").read_text())
    (DOCS / "record.md").write_text(page(results, json.loads((DOCS / "record_tensor_parallel.json").read_text())))
    picture(results, DOCS / "record.png")
