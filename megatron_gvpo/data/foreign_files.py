"""Names the format of a file that is not data as this package reads it, and how it becomes so."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_gvpo.core.json_files import LFS_POINTER, LFS_REMEDY

_GUNZIP = "decompress it first, as with {} (a .parquet file is compressed already)"
# The first bytes of files in other formats, and what to do.
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
    """The format of a file in place of `suffix`, and what to do; None if it begins like no other format.

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
    """Why a path that is not on this machine names no file, for addresses and patterns; None for others."""
    if is_address(path):
        return "addresses are not read: download it, and name the file"
    if _PATTERN.search(path):
        return "patterns are not expanded: name a directory, whose files are read in the order of their names"
    return None


def is_address(path: str) -> bool:
    """True for an address such as https://... or s3://..., which is not a path."""
    return _SCHEME.match(path) is not None
