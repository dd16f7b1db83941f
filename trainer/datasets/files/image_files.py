"""The images of a row: paths, members of tar files, data URIs or bytes.

Errors are found when a set is tokenized. They name the row.
"""

import base64
import binascii
import functools
import hashlib
import io
import os
import tarfile
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from trainer.errors import UserError
from trainer.limits import MB, limit, opened, too_large

COLUMN, SINGLE, FOLDER = "images", "image", "images_folder"
ALLOWED = "a path, a data URI or bytes"
IN_TAR = ".tar::"  # shards/0.tar::7.png is the member 7.png of the file shards/0.tar
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "HEIF")
# keys of a message part that may hold the source of its image
SOURCES_OF_PARTS = ("image", "path", "url", "image_url", "base64")


def has_images(rows) -> bool:
    """Whether rows or samples have a column of images, which may be empty throughout. None is a set without images."""
    return rows is not None and COLUMN in rows.column_names


def sources_of(row: Any) -> list:
    """The images in a row's column, in order. Each is an absolute path, a data URI or bytes."""
    value = row.get(COLUMN)
    items = [] if value is None else value if isinstance(value, list) else [value]
    return [_source(item, row.get(FOLDER)) for item in items]


def _source(item: Any, folder: str | None) -> str | bytes:
    if isinstance(item, dict):  # as the datasets library keeps an image
        item = item["bytes"] if item.get("bytes") else item.get("path")
    if isinstance(item, bytes) or (isinstance(item, str) and item.startswith("data:")):
        return item
    if not isinstance(item, str) or not item:
        found = "an image without a value" if not item else f"an image that is a {type(item).__name__}"
        raise UserError(f"column {COLUMN}", found, ALLOWED)
    if item.startswith(("http://", "https://")):
        raise UserError(f"column {COLUMN}", f"{item} is on the network", f"{ALLOWED}: download it first")
    return os.path.join(folder or "", os.path.expanduser(item))


def content_of(source: str | bytes) -> bytes:
    """The bytes of the image's file."""
    if isinstance(source, bytes):
        return source
    if source.startswith("data:"):
        head, comma, body = source.partition(",")
        try:
            if not comma or not head.endswith(";base64"):
                raise ValueError("not base64")
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            found = f"a data URI that cannot be read ({error})"
            raise UserError(f"column {COLUMN}", found, "data:image/png;base64,...") from None
    path, member = _file_of(source)
    try:
        facts = os.stat(path)
        start, size = _members(path, facts.st_mtime_ns, facts.st_size)[member] if member else (0, -1)
        with opened(path, source) as file:
            size = size if member else os.fstat(file.fileno()).st_size
            if size > limit("image_mb") * MB:
                raise too_large(source, f"an image file of {size // MB} MB", "image_mb")
            file.seek(start)
            return file.read(size)
    except OSError as error:
        raise UserError(source, error.strerror or str(error), "an image file") from None
    except tarfile.TarError as error:
        raise UserError(source, f"no tar that can be read ({error})", "a tar without compression") from None
    except KeyError:
        raise UserError(source, f"the tar has no file {member}", "the name of a file in it") from None


def _file_of(source: str) -> tuple[str, str]:
    """(path of the file, name of the member if the file is a tar)."""
    if IN_TAR not in source:
        return source, ""
    path, _, member = source.partition(IN_TAR)
    return f"{path}{IN_TAR[:-2]}", member


@functools.lru_cache(maxsize=64)
def _members(path: str, *version: int) -> dict[str, tuple[int, int]]:
    """Start and size, in bytes, of each file in a tar without compression. A new `version` of the tar is read again."""
    with tarfile.open(path, "r:") as tar:
        return {member.name.removeprefix("./"): (member.offset_data, member.size) for member in tar if member.isfile()}


@functools.cache
def known_formats() -> list[str]:
    """The formats that are read. PIL knows others, some of which start programs (EPS) or rarely had a careful reader."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def decode(source: str | bytes, content: bytes | None = None):
    """The PIL image, upright and in RGB. `content`: its bytes, if they were read before."""
    content = content_of(source) if content is None else content
    try:
        with Image.open(io.BytesIO(content), formats=known_formats()) as image:
            if (pixels := image.width * image.height) > limit("pixels"):
                raise too_large("", f"an image of {pixels} pixels", "pixels")
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # of many types: each format has its own
        where = source if isinstance(source, str) and not source.startswith("data:") else f"column {COLUMN}"
        if isinstance(error, UserError):
            raise UserError(where, error.found, error.allowed) from None
        unknown = isinstance(error, UnidentifiedImageError)  # its text names the object in memory
        why = "of no known format" if unknown else " ".join(str(error).split())[:200]
        raise UserError(where, f"no image that can be read ({why})") from None


def identity(source: str | bytes) -> list:
    """The time and size of an image's file. They differ if the image has changed since it was read."""
    if isinstance(source, bytes) or source.startswith("data:"):
        return []  # its bytes are in the row
    try:
        facts = os.stat(_file_of(source)[0])
    except OSError:
        return [source, None]
    return [source, facts.st_mtime_ns, facts.st_size]


def digest_with_images(digest: str, contents: list[bytes]) -> str:
    """The digest of a sample's tokens and of its images. In a set, all digests have one length: those of pairs are longer."""
    whole = hashlib.blake2b(digest.encode(), digest_size=8)
    for content in contents:
        whole.update(hashlib.blake2b(content, digest_size=16).digest())
    return whole.hexdigest() if contents or len(digest) > 16 else digest
