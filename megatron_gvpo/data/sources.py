"""Records from JSONL and Parquet files, directories of them, hub data sets, and generators of problems.

A file in another format is refused; the error names its format and a remedy.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.core.json_files import LFS_POINTER, LFS_REMEDY, unique_keys
from megatron_gvpo.core.user_functions import described, kept_directory, load_function, refusing_exit
from megatron_gvpo.data.generated import PREFIX, generated_problems
from megatron_gvpo.data.image_files import data_url

LONGEST_LINE = 2**24  # bytes of a record


class Record(NamedTuple):
    """One record. `id` is short and unique in its data set; `where` is its location, for error messages."""

    id: str
    where: str
    fields: Mapping[str, Any]


def read_records(
    path: str, split: str = "train", subset: str | None = None, limit: int | None = None
) -> Iterator[Record]:
    """The records of a file, of a directory's files in the order of their names, or of a hub data set.

    `split` is for hub data sets and generators, `subset` for hub data sets. Other sources have neither a
    split nor a subset. `limit`: read only the first records, this many. Raises DataError, also if a package
    is missing.
    """
    generated, of_hub = path.startswith(PREFIX), not (path.startswith(PREFIX) or is_local(path))
    if subset is not None and not of_hub:
        raise DataError(f"{path}: subset={subset} is for data sets of the hub: leave it out")
    if split != "train" and not (of_hub or generated):
        raise DataError(
            f"{path}: split={split} is for data sets of the hub and for generators, and this would be read "
            "whole: leave it out, and name the split's own file"
        )
    try:
        yield from islice(_read_records(path, split, subset, limit), limit)
    except OSError as error:
        raise DataError(f"{error.filename or path}: {error.strerror or error}") from None


def converted(record: Record, function: str) -> Record | None:
    """The record as the user's function returns it; None if it leaves the record out. Raises DataError."""
    try:
        # A function may change the directory, and relative paths are read later.
        with kept_directory(), refusing_exit():
            fields = load_function(function)(dict(record.fields))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user's code may raise anything, such as a panic in a Rust library
        raise DataError(f"{record.where}: convert={function}: {described(error)}") from None
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        kind = type(fields).__name__
        raise DataError(f"{record.where}: convert={function}: it returned {kind}, not a record")
    return record._replace(fields={key: _as_python(value) for key, value in fields.items()})


def _as_python(value: Any) -> Any:
    """The value; a number of numpy, as pandas has it, becomes one of Python."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def field_of(record: Record, key: str, named_by: str = "prompt_key") -> Any:
    """The value of a record's field. Raises DataError, which names the record and its fields, without one.

    `named_by`: the key beside the file's path that names the field.
    """
    value = record.fields.get(key)
    if value is None:
        problem = "is null" if key in record.fields else "is missing"
        none = ", or is null where no reward needs an answer" if named_by == "answer_key" else ""
        raise DataError(
            f"{record.where}: field {key!r} {problem}; fields there: {', '.join(record.fields)}. {named_by}, "
            f"beside the file's path, names another field{none}; `convert` names a function that makes it"
        )
    return value


def _read_records(path: str, split: str, subset: str | None, limit: int | None) -> Iterator[Record]:
    if path.startswith(PREFIX):
        yield from _generate(path, split)
        return
    local = Path(path)
    if not is_local(path):
        yield from _read_hub(path, split, subset, limit)
    elif local.is_dir():
        files = sorted(
            file
            for file in local.iterdir()  # files of editors and systems have names that begin with a dot
            if file.suffix in _READERS and not file.is_dir() and not file.name.startswith(".")
        )
        if not files:
            raise DataError(f"{path}: no .jsonl or .parquet file in this directory")
        for file in files:
            if file.exists() and not file.is_file():  # opening a FIFO would wait for its other end
                raise DataError(f"{file}: not a file")
            yield from _READERS[file.suffix](file)
    elif not local.is_file():
        is_there = os.path.lexists(local)  # true also for a FIFO, or a broken link
        problem = "not a file or directory" if is_there else remote_path(path) or "no such file or directory"
        raise DataError(f"{path}: {problem}")
    elif local.suffix not in _READERS:
        wanted = "expected a .jsonl or .parquet file, or a directory of them"
        what = remedy(local, local.suffix)
        raise DataError(f"{path}: {wanted}" + ("" if what is None else f"; {what}"))
    else:
        yield from _READERS[local.suffix](local)


def is_local(path: str) -> bool:
    """True for a file or directory, present or not; False for a hub data set's name and for a generator."""
    if path.startswith(PREFIX):
        return False
    local = Path(path)
    is_path = local.is_absolute() or path.startswith(".") or remote_path(path) is not None
    return is_path or local.suffix in _READERS or os.path.lexists(local)


def _read_jsonl(file: Path) -> Iterator[Record]:
    if (what := remedy(file, ".jsonl")) is not None:
        raise DataError(f"{file}: not JSON, one record a line: {what}")
    with file.open("rb") as lines:
        for number in count(1):
            line, where = lines.readline(LONGEST_LINE + 1), f"{file}, line {number}"
            if not line:
                return
            if len(line) > LONGEST_LINE:
                raise DataError(f"{where}: longer than {LONGEST_LINE >> 20} MiB, the limit for a record")
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig")
                fields = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_no_number)
            except json.JSONDecodeError as error:
                problem = f"not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
                if number == 1 and text.strip() in ("[", "{"):
                    problem = "a record over several lines, and each line must be one record, {...}"
                raise DataError(f"{where}: {problem}") from None
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
            except RecursionError:
                raise DataError(f"{where}: not valid JSON: nested too deeply") from None
            except ValueError as error:  # a key twice, NaN, or a number of too many digits
                problem = str(error)
                # The rest of Python's message is advice for programmers.
                if problem.startswith("Exceeds the limit"):
                    problem = "a number of more than 4,300 digits: write it as a text, in quotes"
                raise DataError(f"{where}: {problem}") from None
            if not isinstance(fields, dict):
                raise DataError(f"{where}: expected an object {{...}}, found {type(fields).__name__}")
            if b"\\ud" in line.lower() and _has_half_a_pair(fields):
                raise DataError(f"{where}: half of a surrogate pair is not a character")
            yield Record(f"{file.name}:{number}", where, fields)


def _no_number(name: str) -> float:
    raise ValueError(f"not valid JSON: {name} is not a number")


def _has_half_a_pair(fields: dict[str, Any]) -> bool:
    """True, for example, for text cut within an emoji: JSON allows half a pair, and no tokenizer does."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _read_parquet(file: Path) -> Iterator[Record]:
    import pyarrow.parquet  # imported here, because it takes long and most data are JSONL

    if (what := remedy(file, ".parquet")) is not None:
        raise DataError(f"{file}: not a Parquet file: {what}")
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise DataError(f"{file}: column {twice[0]!r} is there twice: rename or remove one of them")
            for batch in table.iter_batches(batch_size=256):  # a caller may need only the first row
                for fields in batch.to_pylist():
                    row += 1
                    yield Record(f"{file.name}:{row}", f"{file}, row {row}", _as_json(fields))
    except DataError:
        raise
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        OverflowError,
    ) as error:  # damaged files raise these errors
        message = " ".join(str(error).split())[:300]
        raise DataError(f"{file}: not a readable Parquet file after row {row}: {message}") from None


def _as_json(value: Any) -> Any:
    """A Parquet value as JSON has it: dates, decimals and bytes as text. Checkpoints keep records as JSON."""
    if isinstance(value, dict) and value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes):
        return data_url(value["bytes"])  # an image as the package datasets stores it
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_as_json(item) for item in value]
        return [_without_nulls(item) if _is_part_of_chat(item) else item for item in items]
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value if isinstance(value, str | int | float | None) else str(value)


# The fields of a message, in OpenAI's form and in ShareGPT's, and of the JSON schema of a tool.
_OF_CHATS = ({"role", "content"}, {"from", "value"}, {"function"}, {"name", "parameters"})


def _is_part_of_chat(value: Any) -> bool:
    return isinstance(value, dict) and any(fields <= value.keys() for fields in _OF_CHATS)


def _without_nulls(value: Any) -> Any:
    """The value without fields that are null.

    Arrow gives the arguments of a call the names of all other calls' arguments, with null, and the policy
    would learn to write them.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _generate(path: str, split: str) -> Iterator[Record]:
    try:
        for number, fields in enumerate(generated_problems(path, split), start=1):
            yield Record(f"{path}:{number}", f"{path}, problem {number}", fields)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def _read_hub(name: str, split: str, subset: str | None, limit: int | None) -> Iterator[Record]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(
            f"{name!r} is not a local file, and reading it as a hub data set needs the package `datasets`: "
            "pip install datasets"
        ) from None
    # logs two lines for each try without a network
    retries = logging.getLogger("huggingface_hub.utils._http")
    level = retries.level
    retries.setLevel(logging.ERROR)
    try:
        # With streaming, the library downloads only the needed files.
        rows = undecoded(load_dataset(name, subset, split=split, streaming=limit is not None))
        for row, fields in enumerate(rows, start=1):
            yield Record(f"{name}/{split}:{row}", f"{name} ({split}), row {row}", _as_json(fields))
    except Exception as error:  # offline, no such data set, no such split: each has its own type
        which = f"split {split!r}" if subset is None else f"subset {subset!r}, split {split!r}"
        message = " ".join(str(error).split())[:300]
        raise DataError(
            f"{name} is not a file or directory here, and as a hub data set, {which}: {message}"
        ) from error
    finally:
        retries.setLevel(level)


def undecoded(rows: Any) -> Any:
    """A hub data set that yields the files of its images as data: URLs, and not the images."""
    from datasets import Image, List

    kinds = (Image(), List(Image()))
    if not (named := [name for name, kind in (rows.features or {}).items() if kind in kinds]):
        return rows
    for name in named:
        plain = Image(decode=False)
        rows = rows.cast_column(name, plain if rows.features[name] == Image() else List(plain))
    return ({**fields, **{name: _as_json(fields[name]) for name in named}} for fields in rows)


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


_GUNZIP = "decompress it first, as with {} (a .parquet file is compressed already)"
# The first bytes of files in other formats, and remedies.
_BEGINNINGS = {
    b"\x1f\x8b": f"it is compressed with gzip: {_GUNZIP.format('gunzip')}",
    b"\x28\xb5\x2f\xfd": f"it is compressed with zstd: {_GUNZIP.format('unzstd')}",
    b"BZh": f"it is compressed with bzip2: {_GUNZIP.format('bunzip2')}",
    b"\xfd7zXZ": f"it is compressed with xz: {_GUNZIP.format('unxz')}",
    b"PK\x03\x04": "it is a zip archive: unpack it first",
    b"PAR1": "it is Parquet: give it a name that ends with .parquet",
    b"ARROW1": "it is an Arrow file: write it as Parquet, as with datasets' `to_parquet`",
    b"\xff\xff\xff\xff": "it is an Arrow stream of `save_to_disk`: write it as Parquet, as with `to_parquet`",
    b"\xff\xfe": "it is UTF-16, as Windows writes it: save it as UTF-8",
    b"\xfe\xff": "it is UTF-16: save it as UTF-8",
    LFS_POINTER.encode(): LFS_REMEDY,
    b"<!doctype": "it is a web page, such as the error of a download: fetch the file again",
    b"<html": "it is a web page, such as the error of a download: fetch the file again",
    b"<<<<<<< ": "it has the marks of a merge in git: resolve the conflict first",
}
_LINES = "write one record a line"
_BY_SUFFIX = {
    ".json": f"{_LINES}, as with jq -c '.[]', and give it a name that ends with .jsonl",
    ".ndjson": "if each line is a record, give it a name that ends with .jsonl",
    ".csv": "write it as Parquet, as with pandas: read_csv(...).to_parquet(...)",
    ".tsv": "write it as Parquet, as with pandas: read_csv(..., sep='\\t').to_parquet(...)",
}
_PATTERN = re.compile(r"[*?\[\]]")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def remedy(file: Path, suffix: str) -> str | None:
    """Return the real format of a file that is named like `suffix`, and a remedy; None if it is unknown.

    Raises OSError for a file that cannot be read.
    """
    with file.open("rb") as content:
        beginning = content.read(64)
    for mark, text in _BEGINNINGS.items():
        if beginning.lower().startswith(mark.lower()) and not (suffix == ".parquet" and mark == b"PAR1"):
            return text
    first = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()
    if suffix == ".jsonl" and (first == b"[" or first.startswith((b"[{", b"[\n", b"[\r", b"[ "))):
        return f"it is one JSON array: {_LINES}, as with jq -c '.[]'"
    if suffix == ".parquet" and first.startswith((b"{", b"[")):
        return "it is JSON: if each line is a record, give it a name that ends with .jsonl"
    return _BY_SUFFIX.get(suffix)


def remote_path(path: str) -> str | None:
    """Return why a path that is not on this machine cannot be a file: an address, a pattern; else None."""
    if is_address(path):
        return "addresses are not read: download it, and name the file"
    if _PATTERN.search(path):
        return "patterns are not expanded: name a directory, whose files are read in the order of their names"
    return None


def is_address(path: str) -> bool:
    """True for an address such as https://... or s3://..., which is not a path."""
    return _SCHEME.match(path) is not None
