"""Measure mixtures of experts on every layout against the plain loop, and write the table into docs/parity.md.

    python scripts/docs/mixtures_table.py [--runs FOLDER] [--families qwen3_moe,gpt_oss]

Eight families, six layouts of four ranks, padded and packed: 96 runs, some 20 minutes on 2 cores. With --families, only
their rows are measured and written; the other rows stay.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/parity.md"
BEGIN, END = "<!-- mixtures -->", "<!-- end of mixtures -->"
FAMILIES = {
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_5_moe_text": "Qwen3.5-MoE",
    "mixtral": "Mixtral",
    "deepseek_v3": "DeepSeek-V3",
    "glm4_moe": "GLM-4.5 MoE",
    "gpt_oss": "gpt-oss",
    "olmoe": "OLMoE",
    "minimax_m2": "MiniMax-M2",
}
LAYOUTS = ("ep2", "ep4", "tp2", "ep2-tp2", "ep2-ring2", "ep2-hsdp2")


def run(folder: Path, families: list[str]) -> None:
    cells = [name for layout in LAYOUTS for name in (layout, f"{layout}-packed")]
    script = ROOT / "test/distributed/expert_parallel_checks.py"
    part = f"{','.join(families)}:{','.join(cells)}"
    subprocess.run([sys.executable, str(script), str(folder), part], check=True, cwd=ROOT)


def table(rows: dict) -> list[str]:
    lines = [f"| | {' | '.join(LAYOUTS)} |", f"|---|{'---|' * len(LAYOUTS)}"]
    for model, family in ((model, FAMILIES[model]) for model in rows):
        found = []
        for layout in LAYOUTS:
            both = [rows[model][name] for name in (layout, f"{layout}-packed")]
            if any(cell["verdict"] != "pass" for cell in both):
                found.append(" / ".join(cell["verdict"] for cell in both))
                continue
            notes = [dict(re.findall(r"(\w+) ([0-9.e+-]+)", cell["note"])) for cell in both]
            numbers = [max(float(note[key]) for note in notes) for key in ("loss", "gradient")]
            numbers.append(max(cell["worst_expert"] for cell in both))
            found.append(", ".join(f"{number:.0e}" for number in numbers))
        lines.append(f"| {family} | {' | '.join(found)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of runs; if it has a rows.json already, nothing is run")
    parser.add_argument("--families", default=",".join(FAMILIES), help="names of models, comma-separated")
    options = parser.parse_args()
    families = options.families.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "rows.json").exists():
            run(folder.resolve(), families)
        lines = table(json.loads((folder / "rows.json").read_text()))
    before, rest = PAGE.read_text().split(BEGIN)
    old, after = rest.split(END)
    rows = {
        row.split(" | ")[0]: row for row in [*old.strip().splitlines()[2:], *lines[2:]]
    }  # a new row takes its place
    PAGE.write_text("\n".join([f"{before}{BEGIN}", *lines[:2], *rows.values(), END]) + after)


if __name__ == "__main__":
    main()
