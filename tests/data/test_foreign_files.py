"""Files in other formats, and records in other forms, are refused with what they are and what to do."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.core.user_functions import call_function
from megatron_gvpo.data.messages import not_a_prompt
from megatron_gvpo.data.sources import Record, converted, is_local, read_records

LINE = json.dumps({"prompt": "1+1=", "answer": 2}) + "\n"
OTHER_FORMATS = {
    "utf16.jsonl": (LINE.encode("utf-16"), "it is UTF-16, as Windows writes it: save it as UTF-8"),
    "packed.jsonl": (gzip.compress(LINE.encode()), "it is compressed with gzip: decompress it first"),
    "packed.jsonl.gz": (gzip.compress(LINE.encode()), "it is compressed with gzip: decompress it first"),
    "pointer.jsonl": (b"version https://git-lfs.github.com/spec/v1\noid", "`git lfs pull`"),
    "page.jsonl": (b"<!DOCTYPE html><html>404", "it is a web page"),
    "merge.jsonl": (b"<<<<<<< HEAD\n" + LINE.encode(), "resolve the conflict"),
    "array.jsonl": (json.dumps([{"prompt": "1+1="}], indent=1).encode(), "it is one JSON array"),
    "parquet.jsonl": (b"PAR1\x15\x04", "give it a name that ends with .parquet"),
    "lines.parquet": (LINE.encode(), "give it a name that ends with .jsonl"),
    "array.json": (b"[]", "give it a name that ends with .jsonl"),
    "table.csv": (b"prompt,answer\n", "to_parquet"),
}


def refused(path: object) -> str:
    with pytest.raises(DataError) as error:
        list(read_records(str(path)))
    return str(error.value)


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_a_file_of_another_format_says_which(tmp_path: Path, name: str) -> None:
    content, expected = OTHER_FORMATS[name]
    (tmp_path / name).write_bytes(content)
    problem = refused(tmp_path / name)
    assert problem.startswith(str(tmp_path / name)) and expected in problem


def test_json_lines_are_read_in_every_usual_writing(tmp_path: Path) -> None:
    """A byte order mark, Windows' line ends, blank lines, and a first line that looks like no object."""
    for content in (LINE.encode("utf-8-sig"), LINE.replace("\n", "\r\n").encode(), b"\n \n" + LINE.encode()):
        (tmp_path / "a.jsonl").write_bytes(content)
        assert [record.fields["answer"] for record in read_records(str(tmp_path / "a.jsonl"))] == [2]
    (tmp_path / "a.jsonl").write_text("[1, 2]\n")
    assert "line 1: expected an object" in refused(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("data/*.jsonl", "patterns are not expanded"),
        ("s3://bucket/a.jsonl", "addresses are not read"),
        ("https://example.org/a", "addresses are not read"),
    ],
)
def test_addresses_and_patterns_are_not_names_of_the_hub(path: str, expected: str) -> None:
    assert is_local(path) and expected in refused(path)


def test_hidden_files_of_a_directory_are_not_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINE)
    (tmp_path / "._a.jsonl").write_bytes(b"\0\5\x16\7Mac OS X")
    assert len(list(read_records(str(tmp_path)))) == 1


def test_a_column_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """Otherwise the second one counted, without a word."""
    columns = [pyarrow.array([text]) for text in ("1+1=", "2+2=", "4")]
    table = pyarrow.Table.from_arrays(columns, names=["prompt", "prompt", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert refused(tmp_path / "a.parquet").endswith(
        "column 'prompt' is there twice: rename or remove one of them"
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["1+1="], "message 0 of the prompt is str '1+1='"),
        ([{"content": "?"}], "message 0 of the prompt has no role as text; fields there: content"),
        (
            [{"role": "user", "content": "?"}, {"role": "user", "content": 4}],
            "message 1 of the prompt has no text",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "?"}]}], "join the texts of its parts"),
        ([], "neither a string nor a list of chat messages"),
    ],
)
def test_a_chat_names_the_message_that_is_none(prompt: Any, expected: str) -> None:
    assert expected in (not_a_prompt(prompt, takes_images=False) or "")
    assert (
        not_a_prompt([{"role": "user", "content": [{"type": "text", "text": "?"}]}], takes_images=True)
        is None
    )
    assert not_a_prompt("?", takes_images=False) is None


def test_a_users_file_imports_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run starts in another directory."""
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "beside_the_file.py").write_text("KEY = 'answer'\n")
    (tmp_path / "mine.py").write_text(
        "from beside_the_file import KEY\ndef record(fields):\n    return {**fields, KEY: 2}\n"
    )
    changed = converted(Record("a:1", "a, line 1", {"prompt": "1+1="}), f"{tmp_path / 'mine.py'}:record")
    assert changed is not None and changed.fields["answer"] == 2


def test_user_code_may_change_the_directory_and_return_numpys_numbers(tmp_path: Path) -> None:
    """Paths of the configuration are relative: after `os.chdir` a model's directory looked like the hub's."""
    (tmp_path / "mine.py").write_text(
        "import os\nimport numpy\nos.chdir('/')\n"
        "def record(fields):\n    os.chdir('/')\n    return {**fields, 'answer': numpy.int64(2)}\n"
        "def loss(value):\n    os.chdir('/')\n    return value\n"
    )
    before = os.getcwd()
    changed = converted(Record("a:1", "a, line 1", {"prompt": "1+1="}), f"{tmp_path / 'mine.py'}:record")
    assert changed is not None and type(changed.fields["answer"]) is int
    assert call_function("algorithm.loss.function", f"{tmp_path / 'mine.py'}:loss", 3) == 3
    assert os.getcwd() == before
