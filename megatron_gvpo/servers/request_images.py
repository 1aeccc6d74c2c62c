"""Resizes images before servers get them, so that trainer and engine see the same pixels."""

from __future__ import annotations

import hashlib
import io
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image as Picture

from megatron_gvpo.data.image_files import data_url
from megatron_gvpo.data.image_processor import ImageProcessor
from megatron_gvpo.groups import Image

_KEPT_BYTES = 1 << 28  # limit for the URLs in memory


@dataclass(frozen=True)
class RequestImage:
    """An image in a request to a server."""

    url: str  # data:image/png;base64,...
    digest: str  # hash of the image's file
    tokens: int  # number of prompt tokens that stand for the image
    placeholder: int  # the id of these tokens


class ImageSender:
    """Writes images of requests for one model. The latest are kept, up to 256 MiB."""

    def __init__(self, path: str, model: dict[str, Any]) -> None:
        """`model`: the config.json of the directory `path`. Raises ImageError without an image processor."""
        self._processor = ImageProcessor(path)
        self.placeholder: int = model["image_token_id"]
        self._urls: OrderedDict[str, str] = OrderedDict()
        self._bytes = 0
        self._turns = threading.Lock()  # requests are written in several threads

    def picture(self) -> Image:
        """A small picture, to try a server with."""
        file = io.BytesIO()
        Picture.linear_gradient("L").resize((90, 60)).convert("RGB").save(file, "png")
        return self._processor.image(data_url(file.getvalue()))

    def sent(self, images: Sequence[Image]) -> tuple[RequestImage, ...]:
        """The images of one request. Raises ImageError if a file is missing or has changed."""
        return tuple(RequestImage(self._url(i), i.digest, i.tokens, self.placeholder) for i in images)

    def _url(self, image: Image) -> str:
        with self._turns:
            if (url := self._urls.get(image.digest)) is not None:
                self._urls.move_to_end(image.digest)
                return url
        url = data_url(self._processor.png(image))
        with self._turns:
            if image.digest not in self._urls:  # another thread may have written it meanwhile
                self._urls[image.digest] = url
                self._bytes += len(url)
            while self._bytes > _KEPT_BYTES and len(self._urls) > 1:
                self._bytes -= len(self._urls.popitem(last=False)[1])
        return url


class CacheNames:
    """Names for images in a server's caches, which also hold the images' features.

    The vision tower may be trained, so an image gets another name after each push.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Use new names: the server has new weights."""
        self._weights = secrets.token_hex(8)

    def of(self, image: RequestImage) -> str:
        """128 bits in hexadecimal digits."""
        return hashlib.blake2b(f"{self._weights}/{image.digest}".encode(), digest_size=16).hexdigest()


def with_one_placeholder(token_ids: Sequence[int], images: Sequence[RequestImage]) -> list[int]:
    """A prompt as engines take it, with one placeholder for each image in place of all its tokens."""
    short, rest, index = list[int](), iter(images), 0
    while index < len(token_ids):
        token, following = token_ids[index], 1
        if images and token == images[0].placeholder and (image := next(rest, None)) is not None:
            following = image.tokens
        short.append(token)
        index += following
    return short


def difference(sent: Sequence[int], used: Any, placeholder: int) -> str | None:
    """The difference between a server's prompt and the trainer's; None if they are equal."""
    if not isinstance(used, list):
        return "its answer does not say which prompt it used"
    if used == list(sent):
        return None
    sent_count, used_count = list(sent).count(placeholder), used.count(placeholder)
    if sent_count != used_count:
        return f"its prompt has {used_count} tokens of images, and the trainer's {sent_count}"
    return f"its prompt has other tokens than the trainer's ({len(used)} and {len(sent)})"
