"""The image processor of a model's directory: how many tokens an image takes, and its pixels."""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Picture
from PIL import ImageOps
from torch import Tensor

from megatron_gvpo.data.image_files import ImageError, formats, read, shown
from megatron_gvpo.groups import Image

CONFIG = "preprocessor_config.json"
_CACHE_BYTES = 1 << 30  # pixels that stay in memory
_SETTINGS = (
    "patch_size",
    "temporal_patch_size",
    "merge_size",
    "do_resize",
    "resample",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
)


class ImageProcessor:
    """transformers' image processor of a model's directory, in its form without torchvision.

    The pixels of the latest images, up to 1 GiB, stay in memory: the rows of a group share them.
    """

    def __init__(self, path: str) -> None:
        """Raises ImageError if the directory has no image processor that transformers can read."""
        from transformers import AutoImageProcessor

        if not (Path(path) / CONFIG).is_file():
            raise ImageError(f"model.path={path}: no {CONFIG} there, which says how images are resized")
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                path, local_files_only=True, backend="pil"
            )
        except Exception as error:  # damaged files raise errors of many types
            message = " ".join(str(error).split())[:300]
            raise ImageError(f"model.path={path}: {CONFIG} cannot be read: {message}") from None
        self._cache: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide an image's tokens and pixels."""
        size = self._processor.size
        limits = {key: size[key] for key in ("shortest_edge", "longest_edge")}
        return {key: getattr(self._processor, key) for key in _SETTINGS} | limits

    def image(self, source: str) -> Image:
        """Reads and decodes an image. Raises ImageError."""
        content = read(source)
        width, height = _decoded(source, content).size
        try:
            patches = int(self._processor.get_number_of_image_patches(height, width))
            grid = self._grid(height, width)
        except ValueError as error:  # such as an extreme ratio of the sides
            raise ImageError(f"image {shown(source)}: {error}") from None
        assert grid[1] * grid[2] == patches
        return Image(source, _digest(content), grid, patches // self._processor.merge_size**2)

    def pixels(self, image: Image) -> Tensor:
        """Returns the image's patches, fp32 [patches, channels * time * height * width of a patch].

        Raises ImageError if the file is missing, or has changed since the run began.
        """
        remembered = self._cache.get(image.digest)
        if remembered is not None:
            self._cache.move_to_end(image.digest)
            return remembered
        made = self._processor(images=[self._picture(image)], return_tensors="pt")
        grid = tuple(made["image_grid_thw"][0].tolist())
        if grid != image.grid:
            raise ImageError(f"image {shown(image.source)}: {grid} patches, and {image.grid} were expected")
        pixels: Tensor = made["pixel_values"].to(torch.float32)
        self._cache[image.digest] = pixels
        self._bytes += pixels.nbytes
        while self._bytes > _CACHE_BYTES and len(self._cache) > 1:
            self._bytes -= self._cache.popitem(last=False)[1].nbytes
        return pixels

    def png(self, image: Image) -> bytes:
        """Returns the image as a PNG file of the size that the processor gives it and keeps in a second pass.

        If the limits of pixels are so close that a second pass would change that size again, the image keeps
        its original size. Raises ImageError as `pixels` does.
        """
        picture, patch = self._picture(image), self._processor.patch_size
        _, high, wide = image.grid
        size = wide * patch, high * patch
        if picture.size != size and self._grid(size[1], size[0]) == image.grid:
            picture = picture.resize(size, self._processor.resample)
        file = io.BytesIO()
        picture.save(file, "png")
        return file.getvalue()

    def check(self, image: Image) -> None:
        """Raises ImageError as `pixels` would. It reads the file, unless the pixels are in memory."""
        if image.digest not in self._cache:
            _content(image)

    def _picture(self, image: Image) -> Picture.Image:
        return _decoded(image.source, _content(image))

    def _grid(self, height: int, width: int) -> tuple[int, int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor = self._processor
        high, wide = smart_resize(
            height,
            width,
            processor.patch_size * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
        return 1, high // processor.patch_size, wide // processor.patch_size


def _content(image: Image) -> bytes:
    content = read(image.source)
    if _digest(content) != image.digest:
        raise ImageError(f"image {shown(image.source)}: the file has changed since the run read its data")
    return content


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _decoded(source: str, content: bytes) -> Picture.Image:
    """The picture in RGB, turned as its EXIF data say, as transformers' load_image has it."""
    if not content:
        raise ImageError(f"image {shown(source)}: it is empty (0 bytes)")
    try:
        picture = Picture.open(io.BytesIO(content), formats=formats())
        picture.load()
        _check_kind(picture)
        return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # damaged files raise errors of many types
        is_unknown = isinstance(error, Picture.UnidentifiedImageError)
        problem = "not an image that Pillow knows" if is_unknown else str(error) or type(error).__name__
        raise ImageError(f"image {shown(source)}: {problem}") from None


def _check_kind(picture: Picture.Image) -> None:
    """Raises ValueError for a picture that the conversion to RGB would silently change."""
    # A camera's JPEG file may have further pictures (MPO); the first one is the photo.
    if getattr(picture, "is_animated", False) and picture.format != "MPO":
        raise ValueError(
            f"it has {getattr(picture, 'n_frames', 2)} frames, and videos and animations are not supported: "
            "save the frames as images of their own"
        )
    if picture.mode.startswith(("I", "F")):  # Pillow makes every sample above 255 white
        raise ValueError(
            f"more than 8 bits a sample (Pillow's mode {picture.mode}), and models see 8: convert it"
        )
