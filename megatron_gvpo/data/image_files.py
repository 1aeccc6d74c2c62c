"""The content of an image's file, from a path or a data: URL."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

_DATA = "data:"


class ImageError(ValueError):
    """An image that cannot be read; the message names it and says why."""


def read(source: str) -> bytes:
    """Returns the content of the file at a path or in a data: URL. Raises ImageError."""
    if not source.startswith(_DATA):
        try:
            return Path(source).read_bytes()
        except OSError as error:
            raise ImageError(f"image {shown(source)}: {error.strerror or error}") from None
    header, comma, coded = source.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ImageError(f"image {shown(source)}: expected data:image/...;base64,...")
    try:
        return base64.b64decode(coded, validate=True)
    except binascii.Error as error:
        raise ImageError(f"image {shown(source)}: not base64: {error}") from None


def data_url(content: bytes) -> str:
    """Returns a data: URL with the content of an image's file."""
    kind = "image/jpeg" if content[:2] == b"\xff\xd8" else "image/png"
    return f"{_DATA}{kind};base64,{base64.b64encode(content).decode()}"


def shown(source: str) -> str:
    """Returns a source for a message; a data: URL is cut off."""
    return source if not source.startswith(_DATA) else source[:40] + "..."
