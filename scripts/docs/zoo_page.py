"""Write docs/models.md from docs/models.json, the results of the zoo.

python scripts/docs/zoo_page.py [--results JSON] [--page MD]
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.zoo import read_results
from scripts.zoo_models import SKIPPED
from trainer.compare.zoo.zoo import CONFIGURATIONS

ROOT = Path(__file__).resolve().parents[2]
# family: {model_type: published models, as people search for them}
FAMILIES = json.loads(Path(__file__).with_name("zoo_families.json").read_text())
SHOWN = {"pass": "yes", "refused": "no", "wrong": "**wrong**", "crash": "**crash**", "unchecked": "(yes)"}
HEAD = """# Which models can it train?

<!-- written by scripts/docs/zoo_page.py from the results of python -m scripts.zoo; do not edit -->

Search this page for the name of your model. A model of another name belongs to the row of its `model_type`, which is in its
`config.json`.

Each row is a tiny random model of one architecture, with every kind of layer that the published models have. Each cell is
a run of `train_sft` on it, in fp32, on CPU. The run is compared with the plain single-process loop: the losses to 1e-5,
the gradients of the first step and the final weights to 1e-4. The column `rl` is a step of `train_ppo`: the log-probs of the
rollout engine and of the policy must agree. The last two columns compare the bits of runs with [`--exact`](exact.md).

- **yes**: the run gives what the plain loop gives.
- **no**: the trainer refuses it before the first step, in one line. [The reasons](#reasons) are below the tables.
- **(yes)**: it runs, and the plain loop with peft fails. So there is nothing to compare with.
- **wrong** or **crash**: an error of the trainer that is not solved yet. [The list](#wrong-and-crashing-cells) says what
  happens.
- **-**: not run.

A tiny model shows that the layers work. It does not show that a large model fits into memory.
"""
ODD = """
## Unusual configs

These rows are tiny models that are unusual in one way each. No published model has most of them. `test/unusual_configs.py`
holds their configs.
"""
LEGEND = """
## The columns

| Column | Flags of `train_sft`, or the command | Ranks |
|---|---|---:|
"""
AGAIN = """
## Run it again

A run of all models takes more than an hour on 2 cores that do nothing else. It keeps its results in `docs/models.json`. A run of
some models or cells replaces only their results. The last command writes this page from the results.

<!-- slow: a run of every model takes more than an hour -->

```bash
python -m scripts.zoo
python -m scripts.zoo --models qwen3 mamba2 --configurations ring2 lora --work_dir runs/zoo
python scripts/docs/zoo_page.py
```

`test/test_zoo.py` runs a few models in every test run. `scripts/docs/zoo_families.json` holds the published models.
`test/unusual_configs.py` holds configs that no published model has. `--models llama-9-heads` runs one of them. `--configs FILE` reads
other configs.
"""


def published(model_type: str) -> str:
    """The published models of an architecture. Empty if the families do not have it."""
    return next((models[model_type] for models in FAMILIES.values() if model_type in models), "")


def page_text(results: dict) -> str:
    """The page of results as `read_results` returns them. A row with `about` has an unusual config."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))
    parts = [HEAD, f"Measured with {versions}.\n", _totals(results["models"])]
    for family, names in _families(results["models"]).items():
        parts += [f"\n## {family}\n", _table(names, results["models"])]
    if unusual := _unusual(results["models"]):
        parts += [ODD, _table(unusual, results["models"])]
    parts += [LEGEND + "\n".join(f"| {c.name} | `{' '.join(c.args)}` | {c.nproc} |" for c in CONFIGURATIONS)]
    parts += [
        "",
        "`save` is the model that `fsdp2-2r` saves. transformers must load it, with the names of the source and the final weights.",
        "`exact` is FSDP2 on 1 rank and ZeRO 3 on 2 ranks. `exact-split` is tensor parallelism and a ring on 2 ranks. All bits are equal.",
        AGAIN,
    ]
    parts += [_reasons("Wrong and crashing cells", ("wrong", "crash"), results["models"])]
    parts += [_reasons("Reasons", ("refused", "unchecked"), results["models"]), _left_out(results["models"])]
    return "\n".join(parts).rstrip() + "\n"


def _unusual(rows: dict) -> list[str]:
    return [name for name, row in sorted(rows.items()) if "about" in row]


def _families(rows: dict) -> dict[str, list[str]]:
    """The models with a row, by family."""
    found = {family: [name for name in models if name in rows] for family, models in FAMILIES.items()}
    known = {name for names in found.values() for name in names} | set(_unusual(rows))
    found["Further architectures"] = sorted(set(rows) - known)
    return {family: names for family, names in found.items() if names}


def _totals(rows: dict) -> str:
    verdicts = [cell["verdict"] for row in rows.values() for cell in row["cells"].values()]
    counts = ((verdicts.count(verdict), words) for verdict, words in (
        ("pass", "pass"), ("refused", "are refused"), ("wrong", "are wrong"), ("crash", "crash"),
        ("unchecked", "have nothing to compare with"),
    ))  # fmt: skip
    ran = sum(bool(row["cells"]) for row in rows.values() if "about" not in row)
    unusual = f" and {len(_unusual(rows))} unusual configs" if _unusual(rows) else ""
    return (
        f"{ran} architectures{unusual}, {len(verdicts)} cells: {', '.join(f'{n} {words}' for n, words in counts if n)}."
    )


def _table(names: list[str], rows: dict) -> str:
    lines = [f"| Model | {' | '.join(c.name for c in CONFIGURATIONS)} |", "|---|" + "---|" * len(CONFIGURATIONS)]
    for name in names:
        cells = rows[name]["cells"]
        shown = [SHOWN[cells[c.name]["verdict"]] if c.name in cells else "-" for c in CONFIGURATIONS]
        text = rows[name].get("about") or published(name)
        models = f"`{name}`" + (f": {text}" if text else "")
        lines.append(f"| {models} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _reasons(title: str, verdicts: tuple[str, ...], rows: dict) -> str:
    """Each note once, with the cells that have it."""
    cells_of: dict[str, dict[str, list[str]]] = {}
    for name, row in sorted(rows.items()):
        for configuration, cell in row["cells"].items():
            if cell["verdict"] in verdicts:
                note = cell["note"].replace(name, "MODEL") if len(name) > 3 else cell["note"]
                cells_of.setdefault(note, {}).setdefault(name, []).append(configuration)
    lines = [f"\n## {title}\n"]
    for note, models in sorted(cells_of.items(), key=lambda pair: -len(pair[1])):
        by_cells: dict[str, list[str]] = {}
        for name, configurations in models.items():
            by_cells.setdefault(", ".join(sorted(configurations)), []).append(f"`{name}`")
        where = "; ".join(f"{', '.join(names)} ({cells})" for cells, names in by_cells.items())
        lines.append(f"- `{note.replace('`', chr(39))}`: {where}")
    return "\n".join(lines if len(lines) > 1 else [*lines, "None."]) + "\n"


def _left_out(rows: dict) -> str:
    lines = ["\n## Not in the tables\n"]
    reasons: dict[str, list[str]] = {}
    for name, reason in SKIPPED.items():
        names = reasons.setdefault(reason, [])
        names.append(f"`{name}`" + (f" ({published(name)})" if published(name) else ""))
    lines += [f"- {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    lines += [f"- `{name}`: `{row['problem']}`" for name, row in sorted(rows.items()) if row["problem"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=str(ROOT / "docs/models.json"), metavar="JSON", help="what the zoo wrote")
    parser.add_argument("--page", default=str(ROOT / "docs/models.md"), metavar="MD", help="the page to write")
    options = parser.parse_args()
    Path(options.page).write_text(page_text(read_results(options.results)))


if __name__ == "__main__":
    main()
