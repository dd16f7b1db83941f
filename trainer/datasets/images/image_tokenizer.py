"""The tokenizer for one row with images: its chat template shows each image as the processor's image tokens."""

import bisect
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from trainer.datasets.conversations.content_parts import with_parts
from trainer.datasets.conversations.control_tokens import encode, inside
from trainer.datasets.conversations.training_templates import special_tokens
from trainer.datasets.images.image_marks import MARK
from trainer.datasets.images.image_processor import image_token_ids
from trainer.errors import UserError
from trainer.metrics import counted


class ImageTokenizer:
    """A tokenizer whose chat template shows MARK as the tokens of the row's next image.

    `replacements` are the texts of the row's images, in order; see `process_images`.
    """

    def __init__(self, tokenizer: Any, processor: Any, replacements: list[str]):
        self.of_texts = self._tokenizer = tokenizer
        self._processor, self._replacements = processor, replacements
        self.num_images = 0  # in the longest text so far
        self.num_image_tokens = 0

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def __call__(self, *args, **kwargs):
        return self._tokenizer(*args, **kwargs)

    def apply_chat_template(self, messages: list[dict], *, tokenize=True, marks=False, **options):
        """The text, or (ids, offsets), and with `marks` a mask: 1 on the ids in {% generation %} blocks."""
        template = self._tokenizer.get_chat_template(tools=options.get("tools"))
        num_marks = sum(message["content"].count(MARK) for message in messages if message.get("content"))
        texts, blocks = render_jinja_template(
            conversations=[[with_parts(message, template) for message in messages]],
            chat_template=template,
            return_assistant_tokens_mask=marks,
            **special_tokens(self._tokenizer),
            **options,
        )
        shown = texts[0].count(self._processor.image_token)
        if shown != num_marks:
            found = f"shows {shown} marks {self._processor.image_token} for {counted(num_marks, 'image')}"
            raise UserError("the chat template", found, "a template for images, and no such text in messages")
        changed, moves = self._processor.get_text_with_replacements([texts[0]], self._replacements[:shown])
        if not tokenize:
            return changed[0]
        input_ids, offsets = encode(self._tokenizer, changed[0])
        if shown >= self.num_images:
            self.num_images, self.num_image_tokens = shown, self.count(input_ids)
        if not marks:
            return input_ids, offsets
        spans = [tuple(_moved(place, moves[0] if moves else []) for place in span) for span in blocks[0]]
        return input_ids, offsets, inside(spans, offsets)

    def count(self, input_ids: list[int]) -> int:
        """The number of image tokens."""
        own = set(image_token_ids(self._processor))
        return sum(token in own for token in input_ids)


def _moved(place: int, moves: list[dict]) -> int:
    """The new place of a character, after the marks before it are replaced.

    If a mark at [2, 3) became the text at [2, 6), place 5 becomes 8.
    """
    ends = [move["span"][1] for move in moves]
    gained = [0, *(move["new_span"][1] - move["span"][1] for move in moves)]
    return place + gained[bisect.bisect_right(ends, place)]
