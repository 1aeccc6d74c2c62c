"""Writes and reads a checkpoint directory's tensors, through the storage interface of PyTorch.

A directory has one file a rank, which holds that rank's entries one after the other: tensors, and bytes of
small objects. Every entry has a checksum. Reading unpickles nothing that could run code.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from megatron.core.safe_globals import SafeUnpickler
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, StorageReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_gvpo.core.errors import CheckpointError, DamagedCheckpointError
from megatron_gvpo.huggingface import checksums

_LARGE = 1 << 20  # bytes from which a tensor is written and read without a copy of its entry
_ZIP_LENGTHS = 26  # offset in a record's header of the lengths of its name and extra field
# The words with which torch.load and megatron-core's unpickler refuse a name.
_NAMED = re.compile(r"(?:GLOBAL|class|function) '?([\w.]+\.[\w]+)")


@dataclass(frozen=True)
class _Written(WriteResult):
    """An entry that a rank has written, as the rank reports it to rank 0."""

    checksum: str


class FilesWriter(FileSystemWriter):
    """Writes one file a rank, and the checksums of all.

    PyTorch's own `write_data` (2.13) holds copies of all tensors of a file until the file is complete. This
    class holds one tensor at a time.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        written: list[WriteResult] = []
        if plan.items:
            with (Path(self.path) / name).open("wb") as file:
                for item in plan.items:
                    offset, data = file.tell(), planner.resolve_data(item)
                    checksum = _write(file, data)
                    length = file.tell() - offset
                    written.append(_Written(item.index, length, _StorageInfo(name, offset, length), checksum))
                file.flush()
                os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the list of all entries, and their checksums. PyTorch calls this on rank 0."""
        super().finish(metadata, results)
        directory = Path(self.path)
        sums: checksums.Checksums = defaultdict(dict)
        for entry in (entry for of_rank in results for entry in of_rank):
            assert isinstance(entry, _Written)
            sums[entry.storage_data.relative_path][str(entry.storage_data.offset)] = entry.checksum
        sums[METADATA]["0"] = checksums.checksum((directory / METADATA).read_bytes())
        checksums.write(directory, sums)


def _write(file: BinaryIO, data: Tensor | io.BytesIO) -> str:
    """Write one entry; returns its checksum."""
    if isinstance(data, Tensor):
        tensor = data.detach().cpu().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save would write all of a view's base tensor
        if tensor.nbytes > _LARGE:
            torch.save(tensor, file)
            return checksums.checksum(tensor)
        data = io.BytesIO()
        torch.save(tensor, data)
    file.write(data.getbuffer())
    return checksums.checksum(data.getbuffer())


class FilesReader(StorageReader):
    """Reads entries of a directory and compares them with their checksums.

    It reads the small files at once. Raises CheckpointError, DamagedCheckpointError, OSError.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checksums = checksums.read(directory)
        if self.checksums is not None and (directory / METADATA).exists():
            content = (directory / METADATA).read_bytes()
            checksums.compare(directory / METADATA, 0, content, self.checksums, "the list of tensors")
        self.metadata = read_metadata(directory)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[_StorageInfo, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            info = self._info(item.storage_index)
            by_file[info.relative_path].append((info, item))
        for name, items in by_file.items():
            path = self.directory / name
            with _opened(path) as file:
                for info, item in sorted(items, key=lambda each: each[0].offset):
                    self._read(path, file, info, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_bytes(self, name: str) -> bytes:
        """Read an entry that is not a tensor."""
        info = self._info(MetadataIndex(name))
        path = self.directory / info.relative_path
        with _opened(path) as file:
            _check_within(path, file, info, name)
            return self._bytes(path, file, info, name)

    def _info(self, index: MetadataIndex) -> _StorageInfo:
        info: _StorageInfo | None = self.metadata.storage_data.get(index)
        if info is None:
            raise DamagedCheckpointError(f"{self.directory / METADATA} is damaged: no file has {index.fqn}")
        return info

    def _read(
        self, path: Path, file: BinaryIO, info: _StorageInfo, item: ReadItem, planner: LoadPlanner
    ) -> None:
        name = item.storage_index.fqn
        _check_within(path, file, info, name)
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(self._bytes(path, file, info, name)))
            return
        dtype, shape = self._stored_as(item.storage_index)
        target = planner.resolve_tensor(item).detach()
        if checksums.of_elements(self.checksums, path, info.offset):
            same = (
                target.shape == shape and target.dtype == dtype and target.is_cpu and target.is_contiguous()
            )
            stored = target if same else torch.empty(shape, dtype=dtype)
            _read_elements(path, file, info, name, stored)
            checksums.compare(path, info.offset, stored, self.checksums, name)
        else:
            stored = self._tensor(path, file, info, name)
            if stored.shape != shape or stored.dtype != dtype:
                raise DamagedCheckpointError(
                    f"{path} is damaged: {name} is {stored.dtype} {list(stored.shape)} and not {dtype} "
                    f"{list(shape)}"
                )
        if stored is not target:
            box = [slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True)]
            target.copy_(stored[tuple(box)])
        planner.commit_tensor(item, target)

    def _stored_as(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and shape of an entry."""
        entry, number = self.metadata.state_dict_metadata[index.fqn], index.index
        assert isinstance(entry, TensorStorageMetadata) and number is not None
        return entry.properties.dtype, entry.chunks[number].sizes

    def _bytes(self, path: Path, file: BinaryIO, info: _StorageInfo, name: str) -> bytes:
        file.seek(info.offset)
        data = file.read(info.length)
        checksums.compare(path, info.offset, data, self.checksums, name)
        return data

    def _tensor(self, path: Path, file: BinaryIO, info: _StorageInfo, name: str) -> Tensor:
        """Read an entry whose checksum is that of all its bytes, or that has none."""
        large = self.checksums is None and info.length > _LARGE
        stream: Any = _Entry(file, info) if large else io.BytesIO(self._bytes(path, file, info, name))
        try:
            stored = torch.load(stream, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # the type of the error depends on the damage
            if (named := _named(error)) is not None:
                raise CheckpointError(f"{path}: {name} {_refused(named)}") from None
            raise _unreadable(path, name, error) from None
        if not isinstance(stored, Tensor):
            raise DamagedCheckpointError(f"{path} is damaged: {name} is not a tensor")
        return stored


def _read_elements(path: Path, file: BinaryIO, info: _StorageInfo, name: str, into: Tensor) -> None:
    """Read the elements of a large tensor into a contiguous tensor on the CPU, without a copy.

    torch.save writes a zip file, in which the elements are one record that is not compressed.
    """
    part = _Entry(file, info)
    try:
        with zipfile.ZipFile(part) as archive:
            [record] = [record for record in archive.infolist() if record.filename.endswith("/data/0")]
        part.seek(record.header_offset + _ZIP_LENGTHS)
        lengths = struct.unpack("<HH", part.read(4))
    except OSError:
        raise
    except Exception as error:  # the type of the error depends on the damage
        raise _unreadable(path, name, error) from None
    if record.file_size != into.nbytes or record.compress_type != zipfile.ZIP_STORED:
        raise DamagedCheckpointError(f"{path} is damaged: {name} has {record.file_size} bytes of elements")
    part.seek(record.header_offset + _ZIP_LENGTHS + 4 + sum(lengths))
    if part.readinto(into.view(-1).view(torch.uint8).numpy()) != into.nbytes:
        raise DamagedCheckpointError(f"{path} is damaged: {name} is cut off")


class SafeLoadPlanner(MCoreLoadPlanner):
    """Reads objects that are not tensors as plain values.

    megatron-core's planner runs code that they name.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = plain_values(value.getvalue(), name)


def plain_values(data: bytes, name: str) -> Any:
    """Read numbers, strings, containers and tensors that torch.save wrote. Raises CheckpointError.

    The states of Transformer Engine's layers are tensors that hold a pickle, which that library reads. So
    they are read here first, by megatron-core's restricted unpickler.
    """
    try:
        values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for state in values if "_extra_state" in name else ():
            if isinstance(state, Tensor) and state.numel():
                SafeUnpickler(io.BytesIO(state.numpy().tobytes())).load()
            elif state is not None and not isinstance(state, Tensor):
                raise CheckpointError(f"{name} {_refused(type(state).__name__)}")
    except ModuleNotFoundError:  # without Transformer Engine, no layer would read its state
        return [None]
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # the type of the error depends on the damage
        if (named := _named(error)) is not None:
            raise CheckpointError(f"{name} {_refused(named)}") from None
        first = str(error).partition("\n")[0]
        raise DamagedCheckpointError(f"{name} is damaged: {type(error).__name__}: {first}") from None
    return values


def _unreadable(path: Path, name: str, error: Exception) -> DamagedCheckpointError:
    first = str(error).partition("\n")[0]
    return DamagedCheckpointError(
        f"{path} is damaged: {name} cannot be read: {type(error).__name__}: {first}"
    )


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing") from None


def _check_within(path: Path, file: BinaryIO, info: _StorageInfo, name: str) -> None:
    size = os.fstat(file.fileno()).st_size
    if info.offset + info.length > size:
        raise DamagedCheckpointError(f"{path} is damaged: it ends at byte {size}, before the end of {name}")


def _named(error: Exception) -> str | None:
    """Return the function or class that a pickle names and its reader refuses; None for other errors."""
    match = _NAMED.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return None if match is None else match[1]


def _refused(named: str) -> str:
    return (
        f"is a pickle that names {named}, which no tensor, number or text needs: nothing of it was run; do "
        "not use this checkpoint"
    )


class _Entry(io.RawIOBase):
    """The bytes of one entry of an open file, as a file for torch.load."""

    def __init__(self, file: BinaryIO, info: _StorageInfo) -> None:
        self._file = file
        self._begin = info.offset
        self._length = info.length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self._at)
        view = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


# A checkpoint's `.metadata` is a pickle. It is read here without running anything that the file names.
#
# torch.distributed.checkpoint lists a checkpoint's tensors in this file: their shapes, and the file and
# offset of every part. It reads the file with `pickle.load`, which calls any function that the file names.
# Here, names stand for empty classes that only keep values, and any name that such a list does not need is
# refused. The values are checked and become the metadata.

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

    Raises DamagedCheckpointError if the file is missing or is not such a list, CheckpointError if it names
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
    except Exception as error:  # the type of the error depends on the damage
        first = str(error).partition("\n")[0]
        raise DamagedCheckpointError(f"{file} is damaged: {type(error).__name__}: {first}") from None


def _checked(unpickled: Any) -> Metadata:
    """Return the metadata of these values. Raises ValueError, TypeError, KeyError for any other shape."""
    values = _of(unpickled, "Metadata")
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in values["state_dict_metadata"].items():
        if type(entry).__name__ == "BytesStorageMetadata":
            tensors[_text(name)] = BytesStorageMetadata()
        else:
            tensors[_text(name)] = _tensor(_of(entry, "TensorStorageMetadata"))
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for index_values, info_values in values["storage_data"].items():
        index, info = _of(index_values, "MetadataIndex"), _of(info_values, "_StorageInfo")
        offset = index.get("offset")
        if info.get("transform_descriptors"):
            raise ValueError(f"{info['relative_path']} is compressed or encrypted, which is not supported")
        key = MetadataIndex(
            _text(index["fqn"]), None if offset is None else _size(offset), index.get("index")
        )
        stored[key] = _StorageInfo(_file(info["relative_path"]), *_size((info["offset"], info["length"])))
    return Metadata(tensors, storage_data=stored)


def _tensor(values: dict[str, Any]) -> TensorStorageMetadata:
    dtype = values["properties"].values[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is not a dtype")
    size, chunks = _size(values["size"]), list[ChunkStorageMetadata]()
    for described in values["chunks"]:
        chunk = _of(described, "ChunkStorageMetadata")
        begin, extent = _size(chunk["offsets"]), _size(chunk["sizes"])
        if any(first + count > total for first, count, total in zip(begin, extent, size, strict=True)):
            raise ValueError("a part of a tensor lies outside of it")
        chunks.append(ChunkStorageMetadata(begin, extent))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _of(described: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of an object that the file describes. Raises TypeError for another `kind`."""
    is_kind = isinstance(described, _Values) and type(described).__name__ == kind
    if not is_kind or not isinstance(described.values, dict):
        raise TypeError(f"{kind} expected")
    values: dict[str, Any] = described.values
    return values


def _size(values: Any) -> torch.Size:
    if not isinstance(values, tuple) or any(type(n) is not int or n < 0 for n in values):
        raise TypeError("sizes and offsets must be numbers, and not negative")
    return torch.Size(values)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("names must be text")
    return value


def _file(value: Any) -> str:
    """Return the name of a file in the checkpoint's own directory."""
    if Path(_text(value)).name != value or not value.endswith(".distcp"):
        raise ValueError(f"{value!r} is not the name of a file of tensors in this directory")
    return value
