"""Write docs/models.md from the results of the zoo, and keep the results beside it as JSON."""

import json
from pathlib import Path

from trainer.compare.zoo_models import FAMILIES, SKIPPED, published
from trainer.errors import UserError

SYMBOLS = {"pass": "yes", "refused": "refused", "wrong": "**wrong**", "crash": "**crash**", "missing": "-"}


def results_file(page: str | Path) -> Path:
    return Path(page).with_suffix(".json")


def read_results(page: str | Path) -> dict:
    """The results of earlier runs: {"versions", "models": {name: row}}. Empty if there are none."""
    path = results_file(page)
    if not path.is_file():
        return {"versions": {}, "models": {}}
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError("--output", f"{path} is not JSON: {error}", "a file that the zoo wrote") from None


def write_page(page: str | Path, results: dict, configurations: list[str]) -> None:
    results_file(page).write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
