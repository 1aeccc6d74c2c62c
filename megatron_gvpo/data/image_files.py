"""The content of an image's file, from a path or a data: URL."""

from __future__ import annotations

import base64
import stat
from functools import cache
from pathlib import Path

_DATA = "data:"
MOST_BYTES = 2**30  # limit for one file


class ImageError(ValueError):
    """An image that cannot be read; the message names it and the reason."""


def read(source: str) -> bytes:
    """Returns the content of the file at a path or in a data: URL. Raises ImageError."""
    if not source.startswith(_DATA):
        return _content(source)
    header, comma, coded = source.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ImageError(f"image {shown(source)}: expected data:image/...;base64,...")
    try:
        return base64.b64decode(coded, validate=True)
    except ValueError as error:  # binascii.Error, or a character that is not ASCII
        raise ImageError(f"image {shown(source)}: not base64: {error}") from None


def _content(source: str) -> bytes:
    """The content of a regular file: a pipe or a device may never end. Raises ImageError."""
    file = Path(source)
    try:
        status = file.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= MOST_BYTES:
            return file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        problem = getattr(error, "strerror", None) or error
        raise ImageError(f"image {shown(source)}: {problem}") from None
    if stat.S_ISREG(status.st_mode):
        problem = f"{status.st_size} bytes, and {MOST_BYTES} are the limit"
    else:
        problem = "not a regular file"
    raise ImageError(f"image {shown(source)}: {problem}")


def data_url(content: bytes) -> str:
    """Returns a data: URL with the content of an image's file."""
    kind = "image/jpeg" if content[:2] == b"\xff\xd8" else "image/png"
    return f"{_DATA}{kind};base64,{base64.b64encode(content).decode()}"


def shown(source: str) -> str:
    """Returns a source for a message; a data: URL is cut off."""
    return source if not source.startswith(_DATA) else source[:40] + "..."


@cache
def formats() -> list[str]:
    """Pillow's formats except EPS, for which Pillow runs the program Ghostscript."""
    from PIL import Image

    Image.init()
    return sorted(Image.OPEN.keys() - {"EPS"})
