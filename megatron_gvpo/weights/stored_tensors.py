"""Lists the tensors of a Hugging Face checkpoint, from the headers of its safetensors files."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file; `dtype` as the file names it: BF16, F32, F8_E4M3."""

    dtype: str
    shape: tuple[int, ...]


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """The tensors in `directory` by name; empty if it has no safetensors files."""
    tensors: dict[str, Stored] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors |= {name: Stored(t["dtype"], tuple(t["shape"])) for name, t in header.items()}
    return tensors
