"""Turn rows with images into token samples of any kind: for SFT, pairs, single answers, or prompts.

The processor of the model says which tokens stand for an image. All images of a row belong to its prompt, or to the
turns that both conversations of a pair share.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from datasets import Dataset, Features, Image, LargeList, List, Value

from trainer.datasets.files.image_files import (
    COLUMN,
    FOLDER,
    content_of,
    decode,
    digest_with_images,
    has_images,
    identity,
    sources_of,
)
from trainer.datasets.images.image_marks import with_marks
from trainer.datasets.images.image_processor import (
    AS_IN_FOLDER,
    PixelLimits,
    as_user_errors,
    image_token_ids,
    load_processor,
    process_images,
    processor_state,
)
from trainer.datasets.images.image_tokenizer import ImageTokenizer
from trainer.datasets.library import map_cached
from trainer.datasets.rows import within
from trainer.datasets.samples.answers import CUT_AWAY
from trainer.datasets.samples.ledger import Ledger
from trainer.datasets.samples.parts import WHOLE, Part
from trainer.datasets.samples.prompts import COLUMN as REWARD_COLUMN
from trainer.datasets.samples.prompts import with_columns
from trainer.datasets.samples.sets import Sets
from trainer.datasets.shapes.columns import ROW
from trainer.datasets.shapes.row_reader import SFT
from trainer.errors import UserError
from trainer.metrics import counted

IMAGE_VERSION = 2  # raise this if the same rows and images would give other samples
SENTENCE = (
    "; {num_images:image} in {num_samples_with_images:sample}, {num_image_tokens:image token}; "
    "{num_unfit:row} excluded whose images exceed --max_len"
)


class ImageSamples:
    """Token samples with their images. A sample's images are decoded by `decode` when the sample is read."""

    def __init__(self, samples: Dataset, rows: Dataset, processor, decode=decode):
        self.samples, self.rows, self.processor, self.decode = samples, rows, processor, decode
        self.column_names = [*samples.column_names, COLUMN]
        self.data, self._indices = samples.data, samples._indices  # the loader reads columns from here
        self.image_ids = frozenset(image_token_ids(processor)) if processor else frozenset()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, item: int | str):
        """A column without images, or a sample: its token columns, and `images`, a list of PIL images."""
        if isinstance(item, str):
            return self.samples[item]
        sample = self.samples[item]
        sources = sources_of(self.rows[sample["row"]])[: sample["num_images"]] if sample["num_images"] else []
        return {**sample, COLUMN: [self.decode(source) for source in sources]}

    def with_format(self, *args, **kwargs):
        """The columns without images, in another format of the datasets library."""
        return self.samples.with_format(*args, **kwargs)

    def select_columns(self, names: list[str]) -> Dataset:
        """These columns, all without images."""
        return self.samples.select_columns(names)

    def add_column(self, name: str, values: list) -> "ImageSamples":
        return ImageSamples(self.samples.add_column(name, values), self.rows, self.processor, self.decode)


class ImagePrompts(ImageSamples):
    """Prompts whose `images` are their sources, not decoded. A reward that takes the column gets the sources too."""

    def __getitem__(self, item: int | str):
        if isinstance(item, str):
            return self.samples[item]
        prompt = self.samples[item]
        sources = tuple(sources_of(self.rows[prompt["row"]]))
        for_rewards = {name: list(sources) for name in prompt if name == f"{REWARD_COLUMN}{COLUMN}"}
        return {**prompt, **for_rewards, COLUMN: sources}

    def images_of(self, row: int) -> list:
        """The PIL images of a prompt's row."""
        return [self.decode(source) for source in sources_of(self.rows[row])]


def prompts_with_images(prompts: ImageSamples, rows: Dataset, columns: list[str]) -> ImagePrompts:
    """Prompts of `tokenize_with_images` with the `columns` of their rows that rewards take."""
    return ImagePrompts(with_columns(prompts.samples, rows, columns), prompts.rows, prompts.processor)


def tokenize_with_images(
    rows: Dataset,
    tokenizer: Any,
    *,
    tokenize: Callable,
    folder: str,
    remote_code: bool,
    own_template: bool,
    pixels: PixelLimits = AS_IN_FOLDER,
    max_len: int,
    part: Part = WHOLE,
    **options,
) -> tuple[Any, Ledger]:
    """Return (ImageSamples, ledger) of rows with the column `images`. Without any image, the result of `tokenize`.

    `tokenize` is `tokenize_sft`, `tokenize_preference`, `tokenize_unpaired` or `tokenize_prompts`, and `options` are
    its other arguments. `folder` holds the model. The chat template is the tokenizer's if the user gave one
    (`own_template`), else the processor's. `pixels` are limits of an image in place of the folder's. A message has a list of parts ({"type": "image"} is the next image) or a
    text with <image> marks. A row whose images do not fit into max_len is left out.

    Raises: UserError with the row's number for a missing or broken image, and for marks that are not one per image.
    """
    if not rows_with_images(rows):
        return tokenize(rows, tokenizer, max_len=max_len, part=part, **options)
    several = isinstance(rows, Sets)
    sets = [_without_decoding(own) for own in rows.rows] if several else [_without_decoding(rows)]
    rows = dataclasses.replace(rows, rows=sets) if several else sets[0]
    mapping = _ImageMapping(_open_processor(tokenizer, folder, remote_code, own_template, pixels), max_len)
    samples, ledger = tokenize(rows, tokenizer, max_len=max_len, part=part, map_rows=mapping, **options)
    tokens = rows.join(mapping.found) if several else mapping.found[0]
    num_unfit = int(part.of(tokens).with_format("numpy")["unfit"][:].sum())
    images = rows.select_columns([name for name in (COLUMN, FOLDER) if name in rows.column_names])
    return ImageSamples(samples, images, mapping.processor), _with_image_counts(ledger, samples, num_unfit)


def rows_with_images(rows: Dataset | Sets) -> list[int]:
    """The numbers of the rows that have an image, from 1. The column may be empty throughout."""
    column = rows.select_columns([COLUMN]).with_format("arrow")
    values = (value for table in column.iter(1000) for value in table[COLUMN])
    empty = (None, "", "[]", "null", [])
    return [number for number, value in enumerate(values, 1) if value.as_py() not in empty]


def _without_decoding(rows: Dataset) -> Dataset:
    """The rows with images as bytes or paths, if the set keeps them as the datasets library's images."""
    feature = rows.features.get(COLUMN)
    if isinstance(feature, Image):
        return rows.cast_column(COLUMN, Image(decode=False))
    if isinstance(feature, (List, LargeList)) and isinstance(feature.feature, Image):
        return rows.cast_column(COLUMN, List(Image(decode=False)))
    return rows


def _open_processor(tokenizer: Any, folder: str, remote_code: bool, own_template: bool, pixels: PixelLimits):
    """The processor of a model folder. Its chat template becomes the tokenizer's, unless the user gave one."""
    processor = load_processor(folder, copy.deepcopy(tokenizer), remote_code, pixels)
    if processor.chat_template and not own_template:
        tokenizer.chat_template = processor.chat_template
    return processor


def _with_image_counts(ledger: Ledger, samples: Dataset, num_unfit: int) -> Ledger:
    """The ledger with the images of the `samples` that are kept. `num_unfit`: rows whose images exceed max_len.

    An image counts once for a pair, and its tokens on both sides.
    """
    columns = samples.with_format("numpy").select_columns(["num_images", "num_image_tokens"])[:]
    counts = {
        "num_images": int(columns["num_images"].sum()),
        "num_image_tokens": int(columns["num_image_tokens"].sum()),
        "num_samples_with_images": int((columns["num_images"] > 0).sum()),
        "num_unfit": num_unfit,
    }
    return dataclasses.replace(ledger, counts=ledger.counts | counts, sentence=ledger.sentence + SENTENCE)


class _ImageMapping:
    """`map_cached` that reads each row's images first. `found` has the result of each call: one for each set."""

    def __init__(self, processor, max_len: int):
        self.processor, self.max_len, self.found = processor, max_len, []

    def __call__(self, rows: Dataset, tokenize_row: Callable, *, key: list, features, options, flag: str, **others):
        if (
            has_images(rows)
            and options.reader.chat is False
            and (options.reader.task == SFT or not _is_chat(options, rows))
        ):
            raise UserError(flag, "rows have images, and their texts no template", "--apply_chat_template")
        counts = {"num_images": Value("int64"), "num_image_tokens": Value("int64"), "unfit": Value("bool")}
        found = map_cached(
            rows,
            _tokenize_row,
            key=[*_state_of(rows, self.processor), *key],
            features=Features({**features, **counts}),
            tokenize=tokenize_row,
            processor=self.processor,
            options=options,
            flag=flag,
            **others,
        )
        if found.with_format("numpy")["unfit"][:].all():
            raised = f"the images of no row fit into {counted(self.max_len, 'token')}"
            raise UserError("--max_len", raised, "a larger number, or smaller images")
        self.found.append(found)
        return found


def _state_of(rows: Dataset, processor: Any) -> list:
    """All that decides the image tokens, except the tokenizer and the rows themselves, as JSON values."""
    columns = rows.select_columns([name for name in (COLUMN, FOLDER) if name in rows.column_names])
    return [IMAGE_VERSION, processor_state(processor), [identity(source) for row in columns for source in _known(row)]]


def _known(row: Any) -> list:
    try:
        return sources_of(row)
    except UserError:
        return []  # the row's tokenization says what is wrong with it


def _tokenize_row(
    row: Any, index: int, *, tokenize: Callable, tokenizer: Any, processor: Any, options: Any, flag: str, **others
) -> dict[str, Any]:
    with within(f"{flag} row {row.get(ROW, index) + 1}"):
        row = options.reader.read(row)
        sources = sources_of(row)
        row = with_marks(row, options.answers, len(sources))
        contents = [content_of(source) for source in sources]
        images = [decode(source, content) for source, content in zip(sources, contents, strict=True)]
        with as_user_errors(f"column {COLUMN}"):
            replacements = process_images(processor, [images])[1] if images else []
    of_row = ImageTokenizer(tokenizer, processor, replacements)
    found = tokenize(row, index, tokenizer=of_row, options=options, flag=flag, **others)
    ids = [found[name] for name in ("input_ids", "chosen_ids", "rejected_ids", "prompt_ids") if name in found]
    unfit = any(of_row.count(side) < of_row.num_image_tokens for side in ids)
    return {
        **found,
        "digest": digest_with_images(found["digest"], contents[: of_row.num_images]),
        "num_images": of_row.num_images,
        "num_image_tokens": of_row.num_image_tokens * len(ids),
        "unfit": unfit,
        **(_left_out(found) if unfit else {}),
    }


def _is_chat(options: Any, rows: Dataset) -> bool:
    """Whether the first row is a conversation. A later one that is not is refused by itself."""
    return options.reader.read(rows[0]).chat


def _left_out(found: dict[str, Any]) -> dict[str, Any]:
    """The values of a tokenized row that is not trained: the fate of an answer, or no loss token."""
    if "fate" in found:
        return {"fate": CUT_AWAY}
    return {"loss_mask": [0] * len(found["loss_mask"]), "num_loss_tokens": 0, "stop_trained": False}
