"""Small pictures of prompts' images in the report: bounded, and without the files that are gone."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_gvpo.data.image_files import read
from megatron_gvpo.observe.report import packing as module
from megatron_gvpo.observe.report.packing import thumbnails


def picture(file: Path, width: int, height: int) -> str:
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)
    return str(file)


def test_images_are_small_and_missing_ones_are_none(tmp_path: Path) -> None:
    wide, small = picture(tmp_path / "wide.jpg", 1000, 500), picture(tmp_path / "small.png", 56, 40)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n")
    gone, broken, cut = (
        str(tmp_path / "gone.png"),
        str(tmp_path / "broken.png"),
        "data:image/png;base64,iVBO...",
    )
    made = thumbnails({3: [wide, small], 4: [gone], 5: [small, broken, cut]})
    sizes = [Image.open(io.BytesIO(read(url))).size for url in made[3] if url]
    assert sizes == [(192, 96), (56, 40)]
    assert made[4] == [None] and made[5] == [made[3][1], None, None]


def test_a_steps_pictures_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [picture(tmp_path / f"{i}.png", 100 + i, 100) for i in range(4)]
    size = len(thumbnails({0: names[:1]})[0][0] or "")
    monkeypatch.setattr(module, "MOST_BYTES", int(2.5 * size))
    made = thumbnails({i: [name] for i, name in enumerate(names)})
    assert [made[i] != [None] for i in range(4)] == [True, True, False, False]
