"""Checks the weights of a Hugging Face directory as Megatron-Bridge reads them, and writes checksums.

A weight that is not finite, or is not the one that was saved, is an error that names tensor and file. The
files that this program writes have checksums in their headers (`SafetensorsWriter`); others have none.

A download that reserves the size of a file and breaks off leaves zeros. An embedding of zeros is an error. A
layer whose matrices are all zero is a warning, because some models add such layers to make pipeline stages
equal. A single matrix of zeros is accepted, because new blocks and heads begin with one.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_gvpo.core.collectives import all_gather_msgpack, first_problem, is_first_rank
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.checksums import checksum

HEADER = "xxh3_64"  # key of the checksums, {tensor: checksum} as JSON, in the header of a safetensors file
_LAYER = re.compile(r"(?:.*\.)?layers\.\d+(?=\.)")  # the part of a tensor's name that names its layer

log = logging.getLogger(__name__)


class CheckedWeights:
    """Checks every tensor that Megatron-Bridge's source of weights yields on this rank.

    A rank must not fail alone while all ranks load. So `finish` reports the first problem, on all ranks.
    """

    def __init__(self, source: Any, directory: Path, key: str) -> None:
        """`source`: Megatron-Bridge's StateSource; `key`: the user's key or option for the directory."""
        self._load, self._directory, self._key = source.load_tensors, directory, key
        self._files: dict[str, str] = source.key_to_filename_map
        self._problem: str | None = None
        self._layers: dict[str, bool] = {}  # true if a matrix of the layer has a value that is not zero
        self._checksums = cache(self._read_checksums)
        source.load_tensors = self._load_tensors

    def finish(self) -> None:
        """Raise ConfigError on every rank if any has found a problem. A collective."""
        if (problem := first_problem(self._problem)) is not None:
            raise ConfigError(f"{self._key}={self._directory}: {problem}")
        layers: dict[str, bool] = {}
        for of_rank in all_gather_msgpack(self._layers):
            layers |= {name: has_values or layers.get(name, False) for name, has_values in of_rank.items()}
        empty = [name for name, has_values in layers.items() if not has_values]
        if empty and is_first_rank():
            log.warning(
                "%s=%s: all matrices of %s (%d of %d layers) are zero, so training cannot change them: if "
                "that is not meant, fetch the files again",
                self._key,
                self._directory,
                ", ".join(empty[:3]) + ", ..." * (len(empty) > 3),
                len(empty),
                len(layers),
            )

    def _load_tensors(self, names: list[str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = self._load(names)
        for name, tensor in tensors.items():
            self._problem = self._problem or self._look(name, tensor)
        return tensors

    def _look(self, name: str, tensor: Tensor) -> str | None:
        file = self._files[name]
        saved = self._checksums(file).get(name)
        if saved is not None and saved != checksum(tensor):
            return f"{name} in {file} is not what was saved (another checksum): the file is damaged"
        if not tensor.numel():
            return None
        bounds = torch.stack(torch.aminmax(tensor))
        if not bounds.isfinite().all():
            return f"{name} in {file} has values that are NaN or infinite"
        has_values = bool(bounds.any())
        if not has_values and name.endswith("embed_tokens.weight"):
            return (
                f"{name} in {file} is zero throughout, so the model cannot tell tokens apart: the file is "
                "damaged, or its download has not ended; fetch it again"
            )
        if tensor.ndim > 1 and (layer := _LAYER.match(name)) is not None:
            self._layers[layer[0]] = has_values or self._layers.get(layer[0], False)
        return None

    def _read_checksums(self, file: str) -> dict[str, str]:
        with safe_open(self._directory / file, "pt") as opened:
            header = (opened.metadata() or {}).get(HEADER)
        try:
            values = json.loads(header or "{}")
        except ValueError:
            values = None
        if not isinstance(values, dict):
            self._problem = self._problem or f"{file}: the checksums in its header are damaged"
            return {}
        return values


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
