"""Size and hash of files: a record of what a run has read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Files up to this many bytes are hashed completely; of longer ones, 256 pieces of 1 MiB are.
_LARGEST_COMPLETE = 256 << 20


def fingerprint(path: Path, patterns: Sequence[str] = ("*",)) -> dict[str, Any] | None:
    """Return {"bytes", "sha256"} of a file, or of the files in a directory whose names match `patterns`.

    None if a file cannot be read.
    """
    files = [path]
    if path.is_dir():
        matching = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
        files = sorted(matching)
    digest, size = hashlib.sha256(), 0
    try:
        for file in files:
            if path.is_dir():
                digest.update(file.name.encode())
            size += _hash(file, digest)
    except OSError:  # a hub data set, or a missing file: an error names it when the data are loaded
        return None
    return {"bytes": size, "sha256": digest.hexdigest()}


def _hash(file: Path, digest: Any) -> int:
    with file.open("rb") as content:
        size = os.fstat(content.fileno()).st_size
        if size <= _LARGEST_COMPLETE:
            while block := content.read(1 << 20):
                digest.update(block)
        else:
            for i in range(256):
                content.seek(i * (size - (1 << 20)) // 255)
                digest.update(content.read(1 << 20))
    return size
