"""Checks of flags about texts and sets that need no tokenizer and no rows. It imports no torch."""

import json
import math
import os
from typing import Any

from trainer.errors import UserError
from trainer.metrics import counted

TEMPLATE = "--tokenizer_chat_template"


def check_input_template(input_template: str | None) -> None:
    """Check that --input_template has one {} for the text. Raises UserError otherwise."""
    if input_template is not None and input_template.count("{}") != 1:
        raise UserError("--input_template", f"{input_template.count('{}')} times {{}}", "exactly one {}")


def read_arguments(arguments: str | None) -> dict[str, Any] | None:
    """The object of --template_args, or None without the flag. Raises UserError for anything but a JSON object."""
    if arguments is None:
        return None
    try:
        values = json.loads(arguments)
    except ValueError as error:
        raise UserError("--template_args", f"broken JSON ({error})", '{"enable_thinking": false}') from None
    if not isinstance(values, dict):
        raise UserError("--template_args", repr(arguments), 'a JSON object such as {"enable_thinking": false}')
    return values


def is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


def check_template_file(value: str | None) -> None:
    """Raise UserError for a path that is no file. Whether a name is known, only the tokenizer says."""
    if value is None or is_jinja(value) or os.path.isfile(value):
        return
    if value.endswith(".jinja") or os.sep in value:
        raise UserError(TEMPLATE, f"{value}: file not found", "a file, a name such as chatml, or a Jinja text")


def parse_probs(probs: str, num_sets: int) -> list[float]:
    """Read the numbers of --dataset_probs and scale them to a sum of 1. Raises UserError for anything else."""
    try:
        odds = [float(part) for part in probs.split(",")]
    except ValueError:
        raise UserError("--dataset_probs", probs, "numbers with commas between them") from None
    if len(odds) != num_sets:
        raise UserError(
            "--dataset_probs",
            f"{counted(len(odds), 'number')} for {counted(num_sets, 'dataset')}",
            "one number per dataset",
        )
    if not all(math.isfinite(p) and p > 0 for p in odds):
        raise UserError("--dataset_probs", probs, "numbers above 0")
    return [p / sum(odds) for p in odds]
