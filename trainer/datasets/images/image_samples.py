"""Turn rows with images into token samples. The processor of the model says which tokens stand for each image."""

import bisect
import copy
import dataclasses
import re
from typing import TYPE_CHECKING, Any

from trainer.datasets.files.image_files import (
    COLUMN,
    FOLDER,
    SOURCES_OF_PARTS,
    content_of,
    decode,
    digest_with_images,
    identity,
    sources_of,
)
from trainer.datasets.images.image_processor import (
    as_user_errors,
    image_token_ids,
    load_processor,
    process_images,
    processor_state,
)
from trainer.datasets.rows import map_cached, tokenizer_state
from trainer.datasets.samples import sft_samples
from trainer.datasets.samples.ledger import Ledger
from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, Features

IMAGE_VERSION = 1  # raise this if the same rows and images would give other samples
MARK = "￼"  # stands for an image in the text of a message until the template is rendered
MARK_IN_ROWS = "<image>"


SENTENCE = (
    "; {num_images} images in {num_samples_with_images} samples, {num_image_tokens} image tokens; "
    "{num_unfit} rows excluded whose images exceed --max_len"
)


class ImageSamples:
    """Token samples with their images. A sample's images are decoded by `decode` when the sample is read."""

    def __init__(self, samples: "Dataset", rows: "Dataset", processor, decode=decode):
        self.samples, self.rows, self.processor, self.decode = samples, rows, processor, decode
        self.column_names = [*samples.column_names, COLUMN]
        self.data, self._indices = samples.data, samples._indices  # the loader reads columns from here

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

    def add_column(self, name: str, values: list) -> "ImageSamples":
        return ImageSamples(self.samples.add_column(name, values), self.rows, self.processor, self.decode)


class ImageTokenizer:
    """The tokenizer for one row: its chat template shows MARK as the tokens of the row's next image."""

    def __init__(self, tokenizer: Any, processor: Any, replacements: list[str]):
        self._tokenizer, self._processor, self._replacements = tokenizer, processor, replacements
        self.num_images = 0  # in the longest text so far
        self.num_image_tokens = 0

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def __call__(self, *args, **kwargs):
        return self._tokenizer(*args, **kwargs)

    def apply_chat_template(
        self, messages: list[dict], *, tokenize=True, return_dict=True, return_assistant_tokens_mask=False, **options
    ):
        """As the tokenizer's own. `assistant_masks` are those of the text with all image tokens."""
        from transformers.utils.chat_template_utils import render_jinja_template

        from trainer.datasets.conversations.training_templates import special_tokens

        template = self._tokenizer.get_chat_template(tools=options.get("tools"))
        num_marks = sum(message["content"].count(MARK) for message in messages if message.get("content"))
        texts, blocks = render_jinja_template(
            conversations=[[_with_parts(message, template) for message in messages]],
            chat_template=template,
            return_assistant_tokens_mask=return_assistant_tokens_mask,
            **special_tokens(self._tokenizer),
            **options,
        )
        shown = texts[0].count(self._processor.image_token)
        if shown != num_marks:
            found = f"shows {shown} marks {self._processor.image_token} for {num_marks} images"
            raise UserError("the chat template", found, "a template for images, and no such text in messages")
        changed, moves = self._processor.get_text_with_replacements([texts[0]], self._replacements[:shown])
        if not tokenize:
            return changed[0]
        encoded = self._tokenizer(changed[0], add_special_tokens=False, return_offsets_mapping=True)
        input_ids = list(encoded["input_ids"])
        if shown >= self.num_images:
            self.num_images, own = shown, set(image_token_ids(self._processor))
            self.num_image_tokens = sum(token in own for token in input_ids)
        out = {"input_ids": input_ids}
        if return_assistant_tokens_mask:
            spans = [tuple(_moved(place, moves[0] if moves else []) for place in span) for span in blocks[0]]
            offsets = encoded["offset_mapping"]
            out["assistant_masks"] = [int(any(a < end and b > start for start, end in spans)) for a, b in offsets]
        return out if return_dict else input_ids


def _moved(place: int, moves: list[dict]) -> int:
    """Where a character of the text is, once the marks before it are replaced."""
    ends = [move["span"][1] for move in moves]
    gained = [0, *(move["new_span"][1] - move["span"][1] for move in moves)]
    return place + gained[bisect.bisect_right(ends, place)]


def _with_parts(message: dict, template: str) -> dict:
    """The message with a list of parts, as templates want it for images. Other texts stay if the template shows them."""
    content = message.get("content")
    if not content or (MARK not in content and _shows_texts(template)):
        return message
    pieces = [({"type": "text", "text": text} if text != MARK else {"type": "image"}) for text in _pieces(content)]
    return {**message, "content": pieces}


def _pieces(content: str) -> list[str]:
    return [piece for piece in re.split(f"({MARK})", content) if piece]


_shown: dict[str, bool] = {}


def _shows_texts(template: str) -> bool:
    """Whether a template accepts a message whose content is a text. SmolVLM's takes only lists of parts."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    if template not in _shown:
        try:
            probe = [[{"role": "user", "content": "probe"}]]
            _shown[template] = "probe" in render_jinja_template(conversations=probe, chat_template=template)[0][0]
        except (TemplateError, TypeError, ValueError):
            _shown[template] = False
    return _shown[template]


def rows_with_images(rows: "Dataset") -> list[int]:
    """The numbers of the rows that have an image, from 1. The column may be empty throughout."""
    column = rows.select_columns([COLUMN]).with_format("arrow")
    values = (value for table in column.iter(1000) for value in table[COLUMN])
    empty = (None, "", "[]", "null", [])
    return [number for number, value in enumerate(values, 1) if value.as_py() not in empty]


def tokenize_images(
    rows: "Dataset", tokenizer: Any, *, flag: str, folder: str, remote_code: bool, own_template: bool, **options
):
    """As `tokenize_sft`, for rows with the column `images`. Returns (ImageSamples, ledger).

    `folder` is that of the model. The template is the tokenizer's if the user gave one (`own_template`), else the
    processor's. A message has a list of parts ({"type": "image"} is the next image) or a text with <image> marks.
    Samples without images are as in a set of texts. A row whose images do not fit into max_len is left out.
    Raises: UserError with the row's number for a missing or broken image, and marks that are not one per image.
    """
    if not rows_with_images(rows):
        return sft_samples.tokenize_sft(rows, tokenizer, flag=flag, **options)
    rows = without_decoding(rows)
    processor = open_processor(tokenizer, folder, remote_code, own_template)
    if not options["apply_chat_template"] and (options["input_key"] or options["pretrain_mode"]):
        raise UserError(flag, "rows have images, and their texts no template", "--apply_chat_template")
    num_proc = options.pop("num_proc")
    kind = sft_samples.options_of(rows.column_names, tokenizer, flag, **options)
    key = [*state_of(rows, processor), sft_samples.TOKENIZER_VERSION, tokenizer_state(tokenizer)]
    samples = map_cached(
        rows,
        _tokenize_row,
        folder="trainer_images",
        key=[*key, dataclasses.asdict(kind)],
        features=with_counts(sft_samples._features()),
        num_proc=num_proc,
        tokenizer=tokenizer,
        processor=processor,
        options=kind,
        flag=flag,
    )
    return _left(rows, samples, processor, flag, kind.max_len)


def open_processor(tokenizer: Any, folder: str, remote_code: bool, own_template: bool):
    """The processor of a model folder. Its chat template becomes the tokenizer's, unless the user gave one."""
    processor = load_processor(folder, copy.deepcopy(tokenizer), remote_code)
    if processor.chat_template and not own_template:
        tokenizer.chat_template = processor.chat_template
    return processor


def state_of(rows: "Dataset", processor: Any) -> list:
    """All that decides the tokens of the images, besides the tokenizer and the rows themselves, as JSON values."""
    seen = [identity(source) for row in rows.select_columns(_own_columns(rows)) for source in _readable(row)]
    return [IMAGE_VERSION, processor_state(processor), seen]


def with_image_counts(ledger: Ledger, samples: "Dataset", num_unfit: int) -> Ledger:
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
    return Ledger(ledger.counts | counts, ledger.sentence + SENTENCE)


def _left(rows: "Dataset", samples: "Dataset", processor, flag: str, max_len: int) -> tuple[ImageSamples, Ledger]:
    """The samples with a loss token, and the ledger."""
    unfit = samples.with_format("numpy")["unfit"][:]
    if unfit.all():
        found = f"the images of no row fit into {max_len} tokens"
        raise UserError("--max_len", found, "a larger number, or smaller images")
    left, ledger = sft_samples.with_loss(samples, flag, max_len)
    return ImageSamples(left, rows, processor), with_image_counts(ledger, left, int(unfit.sum()))


def _own_columns(rows: "Dataset") -> list[str]:
    return [name for name in (COLUMN, FOLDER) if name in rows.column_names]


def _readable(row: Any) -> list:
    try:
        return sources_of(row)
    except UserError:
        return []  # the row's tokenization says what is wrong with it


def without_decoding(rows: "Dataset") -> "Dataset":
    """The rows with images as bytes or paths, if the set keeps them as the datasets library's images."""
    from datasets import Image, List

    feature = rows.features[COLUMN]
    if isinstance(feature, Image):
        return rows.cast_column(COLUMN, Image(decode=False))
    if isinstance(getattr(feature, "feature", None), Image):
        return rows.cast_column(COLUMN, List(Image(decode=False)))
    return rows


def with_counts(features: dict) -> "Features":
    """The features of a sample, and those that `image_facts` adds."""
    from datasets import Features, Value

    counts = {"num_images": Value("int64"), "num_image_tokens": Value("int64"), "unfit": Value("bool")}
    return Features({**features, **counts})


def _tokenize_row(row: Any, index: int, *, tokenizer: Any, processor: Any, options: Any, flag: str) -> dict[str, Any]:
    shown = [name for name in (options.input_key, options.output_key) if name is not None]
    answers = [options.output_key] if options.output_key else []
    row, of_row, contents = read_row(row, f"{flag} row {index + 1}", [shown], answers, tokenizer, processor)
    found = sft_samples.tokenize_row(row, index, tokenizer=of_row, options=options, flag=flag)
    found |= image_facts(found, [found["input_ids"]], of_row, contents)
    if found["unfit"]:
        found |= {"loss_mask": [0] * len(found["loss_mask"]), "num_loss_tokens": 0, "stop_trained": False}
    return found


def read_row(
    row: Any, where: str, sides: list[list[str]], answers: list[str], tokenizer: Any, processor: Any
) -> tuple[dict, ImageTokenizer, list[bytes]]:
    """The row with MARK for each image in its columns, the tokenizer for this row, and the bytes of its images.

    Each of `sides` are the columns of one conversation. It shows all images of the row. A text in one of the columns
    `answers` is the assistant's. Raises: UserError that begins with `where`.
    """
    try:
        sources = sources_of(row)
        row = {**row, **_with_marks(row, sides, answers, len(sources))}
        contents = [content_of(source) for source in sources]
        images = [decode(source, content) for source, content in zip(sources, contents, strict=True)]
        with as_user_errors(f"column {COLUMN}"):
            replacements = process_images(processor, [images])[1] if images else []
    except UserError as error:
        raise UserError(f"{where}: {error.where}", error.found, error.allowed) from None
    return row, ImageTokenizer(tokenizer, processor, replacements), contents


def image_facts(found: dict, sides: list[list[int]], of_row: ImageTokenizer, contents: list[bytes]) -> dict[str, Any]:
    """What a sample says of its images. `sides` are its token ids, `contents` the bytes of the row's images."""
    own, num = set(image_token_ids(of_row._processor)), of_row.num_image_tokens
    return {
        "digest": digest_with_images(found["digest"], contents[: of_row.num_images]),
        "num_images": of_row.num_images,
        "num_image_tokens": num * len(sides),
        "unfit": any(sum(token in own for token in ids) < num for ids in sides),
    }


def _with_marks(row: Any, sides: list[list[str]], answers: list[str], num_images: int) -> dict[str, Any]:
    """The columns of the conversations, with a text for each message in which MARK stands for an image."""
    marked = {name: _marked(row[name], name) for name in dict.fromkeys(name for side in sides for name in side)}
    for name in answers:
        if isinstance(marked[name], str) and MARK in marked[name]:
            raise _in_answer(name)
    for side in sides:
        num_marks = sum(_count(marked[name]) for name in side)
        if num_marks != num_images:
            found = f"{num_marks} marks for {num_images} images"
            raise UserError(f"column {COLUMN}", found, 'one <image>, or one part {"type": "image"}, for each image')
    return marked


def _in_answer(name: str) -> UserError:
    return UserError(f"column {name}", "an image in an answer", "images in the other messages")


def _count(value: Any) -> int:
    """The marks in a text, or in a list of messages."""
    texts = [value]
    if isinstance(value, list):
        texts = [message.get("content", message.get("value")) for message in value if isinstance(message, dict)]
    return sum(text.count(MARK) for text in texts if isinstance(text, str))


def _marked(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return value.replace(MARK_IN_ROWS, MARK)
    if not isinstance(value, list):
        return value
    return [_marked_message(message, name) for message in value]


def _marked_message(message: Any, name: str) -> Any:
    if not isinstance(message, dict):
        return message  # read later, with the error of all messages
    key = "value" if "from" in message and "role" not in message else "content"
    content = message.get(key)
    if isinstance(content, list):
        content = "".join(_part(part, name) for part in content)
    elif isinstance(content, str):
        content = content.replace(MARK_IN_ROWS, MARK)
    if message.get("role", message.get("from")) in ("assistant", "gpt") and MARK in (content or ""):
        raise _in_answer(name)
    return {**message, key: content}


def _part(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind not in ("image", "image_url"):
        raise UserError(f"column {name}", f"a part of type {kind!r} in a message", "text, image")
    if any(part.get(source) for source in SOURCES_OF_PARTS):
        raise UserError(f"column {name}", "an image inside a message", f"its path in the column {COLUMN}")
    return MARK
