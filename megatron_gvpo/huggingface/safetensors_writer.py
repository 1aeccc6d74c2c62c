"""Writes a model's tensors as safetensors files, with checksums in the headers, and an index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megatron_gvpo.huggingface.checked_weights import HEADER
from megatron_gvpo.huggingface.checksums import checksum


class SafetensorsWriter:
    """Writes tensors to model-*.safetensors and an index, in the format that transformers reads.

    At most `shard_bytes` and one more tensor are in memory.
    """

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self._directory, self._limit = directory, shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._names: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._shard and self._bytes + tensor.nbytes > self._limit:
            self._flush()
        self._shard[name] = tensor.clone().contiguous()
        self._bytes += tensor.nbytes

    def close(self) -> None:
        self._flush()
        count = len(self._names)
        if count == 1:
            self._path(0).rename(self._directory / "model.safetensors")
            return
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for i, file in enumerate(files):
            self._path(i).rename(self._directory / file)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {name: files[i] for i, names in enumerate(self._names) for name in names},
        }
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def _flush(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        sums = {name: checksum(tensor) for name, tensor in self._shard.items()}
        metadata = {"format": "pt", HEADER: json.dumps(sums)}
        save_file(self._shard, self._path(len(self._names)), metadata=metadata)
        sort_metadata(self._path(len(self._names)))
        self._names.append(list(self._shard))
        self._total += self._bytes
        self._shard, self._bytes = {}, 0

    def _path(self, shard: int) -> Path:
        return self._directory / f"shard-{shard}.safetensors"


def sort_metadata(file: Path) -> None:
    """Sort the header's metadata, which safetensors writes in random order: equal models are equal files."""
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(written) <= size, f"{file}: this form of header is unknown"
        opened.seek(8)
        opened.write(written.ljust(size))
