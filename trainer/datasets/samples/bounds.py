"""Whether a model can take the token samples: their ids against its embedding, their lengths against its positions."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainer.errors import UserError
from trainer.metrics import counted

ID_COLUMNS = ("input_ids", "chosen_ids", "rejected_ids", "prompt_ids")


@dataclass(frozen=True)
class Bounds:
    """What a model takes: ids below `vocab_size`, and `positions` tokens (None: any number).

    `learned`: further positions have no weights, so a longer row cannot run. Rotary positions go on, untrained.
    `of_images`: an image has fewer positions than tokens (M-RoPE).
    """

    vocab_size: int
    positions: int | None = None
    learned: bool = False
    of_images: bool = False


def check_bounds(samples: Any, tokenizer: Any, flag: str, bounds: Bounds) -> list[str]:
    """Check samples in Arrow columns. Returns the warnings.

    The ids are only searched if the tokenizer has one beyond the embedding: there may be a billion rows. Samples with
    images have `image_ids`, which need no embedding. With M-RoPE, only their text surely needs as many positions.
    Raises: UserError that names the row for an id without embedding, and for a row longer than learned positions.
    """
    if max(tokenizer.get_vocab().values(), default=0) >= bounds.vocab_size:
        check_ids(samples, flag, bounds.vocab_size)
    only_text = bounds.of_images and hasattr(samples, "image_ids")
    longest, row = max((_longest(samples, name, only_text) for name in _id_columns(samples)), default=(0, 0))
    return check_length(longest, row, flag, bounds, "tokens of text" if only_text else "tokens")


def check_sample(sample: dict[str, Any], flag: str, bounds: Bounds) -> None:
    """`check_bounds` of one sample of a stream, without warnings."""
    check_ids_of_row(sample["input_ids"], sample["row"], flag, bounds.vocab_size)
    check_length(len(sample["input_ids"]), sample["row"], flag, bounds)


def check_ids_of_row(ids: Iterable[int], row: int, flag: str, vocab_size: int) -> None:
    """Raise UserError for the first id that is not in [0, vocab_size)."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise _beyond(flag, row, token, vocab_size)


def check_ids(samples: Any, flag: str, vocab_size: int) -> None:
    """Raise UserError that names the row and the id for the first id at or above `vocab_size`."""
    image_ids = getattr(samples, "image_ids", ())
    for name in _id_columns(samples):
        if all((pc.max(chunk.flatten()).as_py() or 0) < vocab_size for chunk in samples.data.column(name).chunks):
            continue
        for sample in samples.select_columns(["row", name]):
            ids = (token for token in sample[name] if token not in image_ids)
            check_ids_of_row(ids, sample["row"], flag, vocab_size)


def check_length(longest: int, row: int, flag: str, bounds: Bounds, noun: str = "tokens") -> list[str]:
    """The warning for the longest row, if rotary positions end before it. Raises UserError if learned ones do."""
    if bounds.positions is None or longest <= bounds.positions:
        return []
    found = f"{longest} {noun}, more than the model's {counted(bounds.positions, 'position')}"
    if bounds.learned:
        raise UserError(f"{flag} row {row + 1}", found, f"--max_len {bounds.positions}, or shorter rows")
    cure = f"--max_len {bounds.positions}, or a scaling of rope_parameters in config.json"
    return [f"WARNING: {flag} row {row + 1} has {found}, so the model has not learned the last ones; {cure}"]


def _beyond(flag: str, row: int, token: int, vocab_size: int) -> UserError:
    found = f"token {token} is beyond the {counted(vocab_size, 'row')} of the model's embedding"
    return UserError(f"{flag} row {row + 1}", found, "the tokenizer of the model, or a model with a larger embedding")


def _id_columns(samples: Any) -> Iterator[str]:
    return (name for name in ID_COLUMNS if name in samples.column_names)


def _longest(samples: Any, name: str, only_text: bool) -> tuple[int, int]:
    """(tokens, row) of the longest list of a column, among the samples that are kept. `only_text`: without those of images."""
    lengths = pc.list_value_length(samples.data.column(name))
    lengths = np.asarray(pa.chunked_array(lengths.chunks, lengths.type))
    if only_text:
        of_images = samples.data.column("num_image_tokens").to_numpy()  # of all columns together
        lengths = lengths - of_images // len(list(_id_columns(samples)))
    if samples._indices is not None:
        lengths = lengths[samples._indices.column(0).to_numpy()]
    place = int(lengths.argmax())
    return int(lengths[place]), samples.select_columns(["row"])[place]["row"]
