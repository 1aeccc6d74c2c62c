"""Small pictures of prompts' images: the page holds them, because it loads nothing from elsewhere."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from PIL import Image as Picture

from megatron_gvpo.images.source import ImageError, data_url, read

SIDE = 192  # pixels at most
MOST_BYTES = 1 << 20  # of a step's pictures together


def thumbnails(images: Mapping[int, Sequence[str]]) -> dict[int, list[str | None]]:
    """data: URLs for the images of each group, by their names.

    None for an image whose file is gone or none, and for all that come after a step's first MiB.
    """
    made: dict[str, str | None] = {}
    room = MOST_BYTES
    for names in images.values():
        for name in names:
            if name not in made:
                url = _thumbnail(name)
                room -= len(url or "")
                made[name] = url if room >= 0 else None
    return {group: [made[name] for name in names] for group, names in images.items()}


def _thumbnail(name: str) -> str | None:
    try:
        stored = Picture.open(io.BytesIO(read(name)))
        stored.draft("RGB", (SIDE, SIDE))  # a large JPEG is decoded at a fraction of its size
        picture = stored.convert("RGB")
    except (ImageError, OSError, ValueError, SyntaxError, Picture.DecompressionBombError):
        return None
    picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "jpeg", quality=80)
    return data_url(file.getvalue())
