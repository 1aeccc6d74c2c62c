"""An image of a prompt, by reference: prompts and batches have this instead of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Image(NamedTuple):
    """`ImageProcessor.pixels` reads the image from its source, on the ranks that need it."""

    source: str  # an absolute path, or a data: URL with the file's content
    digest: str  # BLAKE2b of the file's content, 128 bits in hexadecimal digits
    grid: tuple[int, int, int]  # the patches in time, height and width
    tokens: int  # prompt tokens that stand for the image


def image_of(values: Sequence[Any]) -> Image:
    """Returns an image from its values, after JSON or msgpack has turned tuples into lists."""
    source, digest, (time, height, width), tokens = values
    return Image(source, digest, (time, height, width), tokens)
