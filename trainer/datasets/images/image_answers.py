"""Rows with images become pairs of answers, single answers, or prompts. Every answer sees all images of its prompt."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.datasets.files.image_files import COLUMN, sources_of
from trainer.datasets.images.image_samples import (
    ImageSamples,
    image_facts,
    open_processor,
    read_row,
    rows_with_images,
    state_of,
    with_counts,
    with_image_counts,
    without_decoding,
)
from trainer.datasets.rows import map_cached
from trainer.datasets.samples.answers import CUT_AWAY
from trainer.datasets.samples.prompts import COLUMN as KEPT
from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset


class ImagePrompts(ImageSamples):
    """Prompts with `images`: where each of them is, not decoded. A column of images for rewards has the same."""

    def __getitem__(self, item: int | str):
        if isinstance(item, str):
            return self.samples[item]
        prompt = self.samples[item]
        sources = tuple(sources_of(self.rows[prompt["row"]]))
        seen = {name: list(sources) for name in prompt if name == f"{KEPT}{COLUMN}"}
        return {**prompt, **seen, COLUMN: sources}

    def images_of(self, row: int) -> list:
        """The images of a prompt's row, decoded."""
        return [self.decode(source) for source in sources_of(self.rows[row])]


def tokenize_image_answers(
    rows: "Dataset",
    tokenizer: Any,
    *,
    tokenize: Callable,
    answers: list[str],
    folder: str,
    remote_code: bool,
    own_template: bool,
    **options,
):
    """As `tokenize`, for rows with the column `images`.

    It is `tokenize_preference`, `tokenize_unpaired` or, without `answers`, `tokenize_prompts`.

    Returns (ImageSamples, ledger). The images of a row belong to its prompt, or to the turns that both conversations of
    a pair share. `answers` are the columns of the answers. The rest is as in `tokenize_images`. A row whose images do
    not fit into max_len is cut away.
    """
    if not rows_with_images(rows):
        return tokenize(rows, tokenizer, **options)
    rows = without_decoding(rows)
    mapping = _Mapping(open_processor(tokenizer, folder, remote_code, own_template), answers)
    samples, ledger = tokenize(rows, tokenizer, map_rows=mapping, **options)
    return ImageSamples(samples, rows, mapping.processor), with_image_counts(ledger, samples, mapping.num_unfit)


class _Mapping:
    """`map_cached` that reads each row's images first. Afterwards `num_unfit` is known."""

    def __init__(self, processor, answers: list[str]):
        self.processor, self.answers, self.num_unfit = processor, answers, 0

    def __call__(self, rows: "Dataset", tokenize_row: Callable, *, key: list, features, options, flag: str, **others):
        if not options.chat:
            raise UserError(flag, "rows have images, and their texts no template", "--apply_chat_template")
        prompt_key = options.prompt_key if self.answers else options.input_key
        prompt = [] if prompt_key is None else [prompt_key]
        found = map_cached(
            rows,
            _tokenize_row,
            key=[*state_of(rows, self.processor), *key],
            features=with_counts(features),
            tokenize=tokenize_row,
            processor=self.processor,
            sides=[[*prompt, answer] for answer in self.answers] or [prompt],
            answers=self.answers,
            options=options,
            flag=flag,
            **others,
        )
        self.num_unfit = int(found.with_format("numpy")["unfit"][:].sum())
        return found


def _tokenize_row(
    row: Any, index: int, *, tokenize: Callable, tokenizer: Any, processor: Any, sides, answers, flag: str, **options
) -> dict[str, Any]:
    row, of_row, contents = read_row(row, f"{flag} row {index + 1}", sides, answers, tokenizer, processor)
    found = tokenize(row, index, tokenizer=of_row, flag=flag, **options)
    ids = [found[name] for name in ("input_ids", "chosen_ids", "rejected_ids", "prompt_ids") if name in found]
    found |= image_facts(found, ids, of_row, contents)
    return found | {"fate": CUT_AWAY} if found["unfit"] else found
