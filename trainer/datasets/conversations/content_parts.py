"""Messages whose content is a list of parts, for chat templates of models that see images."""

import re
from functools import lru_cache

from trainer.datasets.conversations.training_templates import RAISED, with_blocks
from trainer.datasets.images.image_marks import MARK


def with_parts(message: dict, template: str, images: bool = True) -> dict:
    """The message with a list of parts, which templates want for images. A text stays if the template shows texts.

    Without `images`, a MARK in a text is a character like others.
    """
    content = message.get("content")
    if not content or (not (images and MARK in content) and shows_texts(template)):
        return message
    pieces = [piece for piece in re.split(f"({MARK})", content) if piece] if images else [content]
    return {
        **message,
        "content": [{"type": "image"} if images and p == MARK else {"type": "text", "text": p} for p in pieces],
    }


@lru_cache
def shows_texts(template: str) -> bool:
    """Whether a template shows a message whose content is a text. SmolVLM's takes only lists of parts."""
    texts = []
    for content in ("probe", [{"type": "text", "text": "probe"}]):
        try:
            texts.append(with_blocks(template, [{"role": "user", "content": content}], None, {})[0])
        except RAISED:
            texts.append("")
    return "probe" in texts[0] or "probe" not in texts[1]
