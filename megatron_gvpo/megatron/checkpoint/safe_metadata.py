"""Reads a checkpoint's `.metadata`, which is a pickle, without running anything that the file names.

torch.distributed.checkpoint lists a checkpoint's tensors in this file: their shapes, and the file and place
of every part. It reads the file with `pickle.load`, which calls any function that the file names. Here, names
stand for empty classes that only keep values, and any name that such a list does not need is refused. The
values are checked and become the metadata.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # where an entry is; it has no public name
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_gvpo.megatron.checkpoint.all_ranks import CheckpointError, DamagedCheckpointError

METADATA = ".metadata"
_TORCH = "torch.distributed.checkpoint."
# The names that PyTorch writes into the file (2.13), besides those of dtypes.
_NAMES = {
    *(
        (_TORCH + "metadata", kind.__name__)
        for kind in (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )
    ),
    (_TORCH + "metadata", "StorageMeta"),
    (_TORCH + "metadata", "_MEM_FORMAT_ENCODING"),
    (_TORCH + "filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}


class _Values:
    """Stands for an object that the file describes: keeps its values and does nothing with them."""

    def __init__(self, *arguments: Any) -> None:
        self.values: Any = arguments

    def __setstate__(self, values: Any) -> None:
        self.values = values


class _Unpickler(pickle.Unpickler):
    """Builds a new, empty subclass of `_Values` for each allowed name; the file cannot reach any other."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self._known: dict[tuple[str, str], Any] = {("torch", "Size"): tuple}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        if (module, name) in _NAMES:
            self._known.setdefault((module, name), type(name, (_Values,), {}))
        if (module, name) not in self._known:
            raise CheckpointError(
                f"it is a pickle that names {module}.{name}, which no list of tensors needs: nothing of it "
                "was run; do not use this checkpoint"
            )
        return self._known[module, name]


def read_metadata(directory: Path) -> Metadata:
    """Read the list of a checkpoint's tensors.

    Raises DamagedCheckpointError if the file is missing or is no such list, CheckpointError if it names
    anything that could run code, OSError.
    """
    file = directory / METADATA
    try:
        with file.open("rb") as stream:
            return _checked(_Unpickler(stream).load())
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{file} is missing") from None
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except OSError:
        raise
    except Exception as error:  # of many types, as the bytes may be any
        first = str(error).partition("\n")[0]
        raise DamagedCheckpointError(f"{file} is damaged: {type(error).__name__}: {first}") from None


def _checked(found: Any) -> Metadata:
    """Return the metadata of these values. Raises ValueError, TypeError, KeyError for any other shape."""
    values = _of(found, "Metadata")
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in values["state_dict_metadata"].items():
        if type(entry).__name__ == "BytesStorageMetadata":
            tensors[_text(name)] = BytesStorageMetadata()
        else:
            tensors[_text(name)] = _tensor(_of(entry, "TensorStorageMetadata"))
    places: dict[MetadataIndex, _StorageInfo] = {}
    for index, place in values["storage_data"].items():
        where, at = _of(index, "MetadataIndex"), _of(place, "_StorageInfo")
        offset = where.get("offset")
        if at.get("transform_descriptors"):
            raise ValueError(f"{at['relative_path']} is compressed or encrypted, which is not supported")
        key = MetadataIndex(
            _text(where["fqn"]), None if offset is None else _size(offset), where.get("index")
        )
        places[key] = _StorageInfo(_file(at["relative_path"]), *_size((at["offset"], at["length"])))
    return Metadata(tensors, storage_data=places)


def _tensor(values: dict[str, Any]) -> TensorStorageMetadata:
    dtype = values["properties"].values[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    size, chunks = _size(values["size"]), list[ChunkStorageMetadata]()
    for described in values["chunks"]:
        chunk = _of(described, "ChunkStorageMetadata")
        begin, extent = _size(chunk["offsets"]), _size(chunk["sizes"])
        if any(first + count > whole for first, count, whole in zip(begin, extent, size, strict=True)):
            raise ValueError("a part of a tensor lies outside of it")
        chunks.append(ChunkStorageMetadata(begin, extent))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _of(found: Any, kind: str) -> dict[str, Any]:
    if not isinstance(found, _Values) or type(found).__name__ != kind or not isinstance(found.values, dict):
        raise TypeError(f"{kind} expected")
    return found.values


def _size(values: Any) -> torch.Size:
    if not isinstance(values, tuple) or any(type(n) is not int or n < 0 for n in values):
        raise TypeError("sizes and places must be numbers, and none negative")
    return torch.Size(values)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("names must be text")
    return value


def _file(value: Any) -> str:
    """Return the name of a file in the checkpoint's own directory."""
    if Path(_text(value)).name != value or not value.endswith(".distcp"):
        raise ValueError(f"{value!r} is no file of tensors in this directory")
    return value
