"""Checksums of a checkpoint's entries, in `checksums.json` beside them.

Every tensor that a rank writes gets a checksum of its bytes while they are in memory, and the rank that reads
it compares the checksum with the bytes that it has read. So no file is read a second time, and the work is
divided over the ranks as the reading is. xxh3 detects accidental damage, not manipulation.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megatron_gvpo.core.errors import ConfigError, DamagedCheckpointError
from megatron_gvpo.core.json_files import read_json_object

FILE = "checksums.json"
_ALGORITHM = "xxh3_64"

# Begins the checksum of a large tensor's elements. Other checksums are of an entry's bytes in the file.
_ELEMENTS = "elements:"

# {file: {first byte of an entry in the file: checksum}}
Checksums = dict[str, dict[str, str]]


def checksum(data: Tensor | bytes | memoryview) -> str:
    """Return the checksum of bytes, or of the elements of a contiguous tensor on the CPU."""
    if isinstance(data, Tensor):
        elements = data.detach().reshape(-1).view(torch.uint8).numpy()
        return _ELEMENTS + xxhash.xxh3_64_hexdigest(elements.data)
    return xxhash.xxh3_64_hexdigest(data)


def of_elements(known: Checksums | None, file: Path, offset: int) -> bool:
    """Return True if an entry has a checksum of its elements, not of its bytes."""
    return known is not None and str(_expected(known, file, offset)).startswith(_ELEMENTS)


def read(directory: Path) -> Checksums | None:
    """Read the checksums of a directory; None if an earlier version wrote the directory without checksums.

    Raises DamagedCheckpointError, OSError.
    """
    file = directory / FILE
    if not file.exists():
        return None
    try:
        values = read_json_object(file)
    except ConfigError as error:
        raise DamagedCheckpointError(str(error)) from None
    pairs = values.get("entries")
    if (
        values.get("algorithm") != _ALGORITHM
        or not isinstance(pairs, dict)
        or not all(isinstance(entries, dict) for entries in pairs.values())
    ):
        raise DamagedCheckpointError(f"{file} is damaged: it has no checksums of the kind {_ALGORITHM}")
    return pairs


def write(directory: Path, checksums: Checksums) -> None:
    """Write the checksums of a directory."""
    (directory / FILE).write_text(json.dumps({"algorithm": _ALGORITHM, "entries": checksums}))


def compare(
    file: Path, offset: int, data: Tensor | bytes | memoryview, known: Checksums | None, what: str
) -> None:
    """Compare the bytes at `offset` of a file with their checksum. Raises DamagedCheckpointError."""
    if known is not None and _expected(known, file, offset) != checksum(data):
        raise DamagedCheckpointError(f"{file} is damaged: {what} is not what was saved (another checksum)")


def _expected(known: Checksums, file: Path, offset: int) -> str | None:
    return known.get(file.name, {}).get(str(offset))
