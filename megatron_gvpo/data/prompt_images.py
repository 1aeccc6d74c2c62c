"""The images of a prompt: reads those that a record names, and writes their placeholders into the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.image_files import ImageError, shown
from megatron_gvpo.data.sources import Record, is_address
from megatron_gvpo.groups import Image
from megatron_gvpo.huggingface.image_families import takes_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "<image>"  # the placeholder for an image in a plain-string prompt
_PART: dict[str, Any] = {"type": "image"}


class PromptImages:
    """Reads the images of records, and writes them into prompts for one model."""

    def __init__(self, path: str, model: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
        """`model`: the config.json of the directory `path`. Raises DataError."""
        from megatron_gvpo.data.image_processor import ImageProcessor  # loads torch

        try:
            self._processor = ImageProcessor(path)
        except ImageError as error:
            raise DataError(str(error)) from None
        self.placeholder: int = model["image_token_id"]
        start, end = model["vision_start_token_id"], model.get("vision_end_token_id")
        around = [start, self.placeholder, *([] if end is None else [end])]
        tokens: list[str] = tokenizer.convert_ids_to_tokens(around)
        self._written, self._marks = "".join(tokens), (MARK, *tokens)

    def of(self, record: Record, key: str, directory: Path) -> tuple[Image, ...]:
        """The images in the field `key`: one, or a list of them; relative paths begin in `directory`.

        Raises DataError, which names the record, for an image that cannot be read.
        """
        value = record.fields.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        images = []
        for number, source in enumerate(values, start=1):
            where = f"{record.where}: field {key!r}, image {number}"
            if isinstance(source, Mapping) and isinstance(source.get("path"), str):
                source = source["path"]  # a column of images whose content is in files
            if not isinstance(source, str):
                raise DataError(f"{where}: expected a path or a data: URL, found {type(source).__name__}")
            if is_address(source):
                raise DataError(
                    f"{where}: {source[:80]}: addresses are not read: download it, and name the file"
                )
            if not source.startswith("data:"):
                source = str((directory / source).absolute())
            try:
                images.append(self._processor.image(source))
            except ImageError as error:
                raise DataError(f"{where}: {error}") from None
        return tuple(images)

    def is_in(self, text: str) -> bool:
        """True for a text with a mark that would stand for an image in a prompt."""
        return any(mark in text for mark in self._marks)

    def in_text(self, text: str, count: int) -> str:
        """A plain prompt with the tokens of its images at the marks `<image>`, or at its beginning."""
        return self._written.join(_pieces(text, count))

    def expanded(self, ids: Sequence[int], images: Sequence[Image], where: str) -> list[int]:
        """Token ids with as many placeholders for every image as it has tokens. Raises DataError."""
        if (count := list(ids).count(self.placeholder)) != len(images):
            raise DataError(
                f"{where}: the prompt has {count} placeholders of images as tokens, and {len(images)} images"
            )
        remaining, expanded = iter(images), list[int]()
        for token in ids:
            expanded += [token] * (next(remaining).tokens if token == self.placeholder else 1)
        return expanded


def prompt_images(
    path: str, model: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> PromptImages | None:
    """The `PromptImages` of a model, None for one that takes no images. Raises DataError."""
    return PromptImages(path, model, tokenizer) if takes_images(model) else None


def as_parts(text: str, count: int) -> str | list[dict[str, Any]]:
    """A user message's content with `count` images, at the marks `<image>` of its text or before it."""
    if not count:
        return text
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(_pieces(text, count)):
        parts += [_PART] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def images_in(messages: Sequence[Mapping[str, Any]]) -> int:
    """The number of parts of chat messages that are images."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return sum(part["type"] == "image" for content in contents for part in content)


def is_part(part: Any) -> bool:
    """True for a part of a message's content: text, or an image."""
    if not isinstance(part, dict):
        return False
    return part.get("type") == "image" or (part.get("type") == "text" and isinstance(part.get("text"), str))


def short_names(record: Mapping[str, Any], key: str, images: Sequence[Image]) -> dict[str, Any]:
    """A record with names of its images in place of their content."""
    return {**record, key: [shown(image.source) for image in images]}


def _pieces(text: str, count: int) -> list[str]:
    """The text between images. Raises ValueError if its marks are not as many as its images."""
    pieces = text.split(MARK)
    if count and len(pieces) == 1:
        return [""] * count + pieces
    if len(pieces) != count + 1:
        raise ValueError(f"the prompt has {len(pieces) - 1} marks {MARK}, and {count} images")
    return pieces
