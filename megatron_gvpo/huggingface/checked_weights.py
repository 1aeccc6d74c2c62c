"""Checks the values of a Hugging Face directory's weights as Megatron-Bridge reads them.

A weight that is not finite, or is not the one that was saved, is an error that names tensor and file. The
files that this program writes have checksums in their headers (`SafetensorsWriter`); others have none.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_gvpo.core.collectives import first_problem
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.checksums import checksum

HEADER = "xxh3_64"  # key of the checksums, {tensor: checksum} as JSON, in the header of a safetensors file


class CheckedWeights:
    """Checks every tensor that Megatron-Bridge's source of weights yields on this rank.

    A rank must not fail alone while all ranks load. So `finish` reports the first problem, on all ranks.
    """

    def __init__(self, source: Any, directory: Path, key: str) -> None:
        """`source`: Megatron-Bridge's StateSource; `key`: the user's key or option for the directory."""
        self._load, self._directory, self._key = source.load_tensors, directory, key
        self._files: dict[str, str] = source.key_to_filename_map
        self._problem: str | None = None
        self._checksums = cache(self._read_checksums)
        source.load_tensors = self._load_tensors

    def finish(self) -> None:
        """Raise ConfigError on every rank if any has found a problem. A collective."""
        if (problem := first_problem(self._problem)) is not None:
            raise ConfigError(f"{self._key}={self._directory}: {problem}")

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
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            return f"{name} in {file} has values that are NaN or infinite"
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
