"""Read a dataset of the Hugging Face hub."""

import os
import re
from typing import TYPE_CHECKING

from trainer.datasets.files.files import FORMATS
from trainer.datasets.rows import one_line
from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def read_hub(name: str, where: str) -> dict[str, "Dataset"]:
    """Return the splits of the dataset `name`. Raises UserError if it cannot be had."""
    import datasets

    if os.path.splitext(name)[1].lower() in FORMATS or not HUB_NAME.fullmatch(name):
        raise UserError(where, "file not found")
    try:
        return datasets.load_dataset(name)
    except Exception as error:  # absent, private, offline or several configurations: the library's message says which
        raise UserError(where, f"no such file or folder, and the hub does not give it: {one_line(error)}") from None
