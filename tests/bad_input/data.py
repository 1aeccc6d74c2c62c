# mypy: disable-error-code="func-returns-value"
"""Data files with lines that cannot be meant."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet

from bad_input.case import TRAIN, Case, Expected, with_line, with_text


def line(
    name: str, text: str | bytes, *says: str, expected: Expected = "refused", arguments: tuple[str, ...] = ()
) -> Case:
    """One bad line, the seventh; the error names file and line."""
    return Case(
        "data",
        name,
        (*TRAIN, *arguments),
        with_line(text),
        expected,
        says or (("line 7",) if expected == "refused" else ()),
    )


def file_case(
    name: str,
    spoil: Callable[[Path], object],
    *says: str,
    expected: Expected = "refused",
    arguments: tuple[str, ...] = (),
) -> Case:
    return Case("data", name, (*TRAIN, *arguments), spoil, expected, says)


def record(**fields: object) -> str:
    return json.dumps({"prompt": "1+1=", "answer": "2", "solution": "2", "demonstration": "2"} | fields)


def parquet(**columns: list[object]) -> Callable[[Path], object]:
    def spoil(task: Path) -> None:
        pyarrow.parquet.write_table(pyarrow.table(columns), task / "data" / "t.parquet")

    return spoil


def converted(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def spoil(task: Path) -> None:
        file = task / "data" / "train.jsonl"
        file.write_bytes(change(file.read_bytes()))

    return spoil


def fifo(task: Path) -> None:
    (task / "data" / "train.jsonl").unlink()
    os.mkfifo(task / "data" / "train.jsonl")


MATH = ("rewards.components=[{name: math}]",)
SFT = ("algorithm=sft", "data.train.demonstration_key=demonstration")
PARQUET = ("data.train.path=data/t.parquet",)
NO_TOKEN = "line 7: the tokenizer has no token for"  # a warning

DATA = [
    line("prompt a number", record(prompt=7)),
    line("prompt null", record(prompt=None)),
    line("prompt missing", json.dumps({"answer": "2"})),
    line("prompt empty", record(prompt="")),
    line("prompt an empty list", record(prompt=[])),
    line("prompt of spaces the tokenizer drops", record(prompt="\t\t")),
    line("prompt an object", record(prompt={"role": "user"})),
    line("a message without a role", record(prompt=[{"content": "1+1="}])),
    line("a message of an unknown role", record(prompt=[{"role": "wizard", "content": "1+1="}])),
    line("a message without content", record(prompt=[{"role": "user"}])),
    line("a message whose content is a number", record(prompt=[{"role": "user", "content": 3}])),
    line("prompt of emoji", record(prompt="\U0001f600\U0001f600")),
    line("prompt with unknown letters", record(prompt="what is 1+1="), NO_TOKEN, expected="runs"),
    line("prompt with a lone surrogate", '{"prompt": "1+\\ud8001=", "answer": "2"}'),
    line("prompt with NUL", record(prompt="1+\x001="), NO_TOKEN, expected="runs"),
    line("prompt of ten megabytes", record(prompt="1+" * 5_000_000 + "1=")),
    line("prompt nested 5,000 deep", '{"prompt": ' + "[" * 5000 + "]" * 5000 + "}"),
    line("answer a list", record(answer=["2"]), arguments=MATH),
    line("answer missing", json.dumps({"prompt": "1+1="}), arguments=MATH),
    line("answer null", record(answer=None), arguments=MATH),
    line("answer empty", record(answer=""), "train.jsonl:7", arguments=MATH),
    line("answer an object", record(answer={"a": 1}), arguments=MATH),
    line("answer true", record(answer=True), arguments=MATH),
    line("answer a number", record(answer=2), arguments=MATH, expected="either"),
    line("answer NaN", '{"prompt": "1+1=", "answer": NaN}', arguments=MATH),
    line("answer of 10,000 digits", '{"prompt": "1+1=", "answer": ' + "9" * 10000 + "}", arguments=MATH),
    line("demonstration empty", record(demonstration=""), arguments=SFT),
    line("demonstration null", record(demonstration=None), arguments=SFT),
    line("demonstration a list", record(demonstration=[1]), arguments=SFT),
    line("demonstration missing", json.dumps({"prompt": "1+1=", "answer": "2"}), arguments=SFT),
    line("a duplicate key", '{"prompt": "1+1=", "prompt": "1+2=", "answer": "2"}'),
    line("an array", "[1, 2]"),
    line("a number", "17"),
    line("a string", '"1+1="'),
    line("null", "null"),
    line("cut off", '{"prompt": "1+1=", "ans'),
    line("two objects", record() + record()),
    line("trailing text", record() + " x"),
    line("single quotes", "{'prompt': '1+1='}"),
    line("not UTF-8", b'{"prompt": "1+1=\xff\xfe"}'),
    line("a comment", "# the seventh"),
    line("a blank line", "", expected="either"),
    file_case("an empty file", with_text("data/train.jsonl", ""), "train.jsonl"),
    file_case("only blank lines", with_text("data/train.jsonl", "\n\n\n"), "train.jsonl"),
    file_case(
        "an empty directory",
        lambda t: (t / "data/none").mkdir(),
        "none",
        arguments=("data.train.path=data/none",),
    ),
    file_case(
        "a directory of JSON lines and parquet",
        lambda t: None,
        expected="runs",
        arguments=("data.train.path=data",),
    ),
    file_case("a FIFO", fifo, "train.jsonl"),
    file_case(
        "a link to itself",
        lambda t: ((t / "data/train.jsonl").unlink(), (t / "data/train.jsonl").symlink_to("train.jsonl")),
        "train.jsonl",
    ),
    file_case(
        "a home that nobody has", lambda t: None, "~nosuch", arguments=("data.train.path=~nosuch/t.jsonl",)
    ),
    file_case(
        "JSON lines called parquet",
        lambda t: (t / "data/train.jsonl").rename(t / "data/t.parquet"),
        "t.parquet",
        arguments=PARQUET,
    ),
    file_case(
        "parquet called JSON lines",
        lambda t: (t / "data/test.parquet").rename(t / "data/train.jsonl"),
        "train.jsonl",
    ),
    file_case("parquet without the column", parquet(question=["1+1="]), "prompt", arguments=PARQUET),
    file_case(
        "parquet with numbers as prompts",
        parquet(prompt=[1, 2, 3], answer=["1", "2", "3"]),
        "prompt",
        arguments=PARQUET,
    ),
    file_case(
        "parquet with a null prompt",
        parquet(prompt=["1+1=", None], answer=["2", "2"]),
        "t.parquet",
        arguments=PARQUET,
    ),
    file_case("parquet without rows", parquet(prompt=[]), "t.parquet", arguments=PARQUET),
    file_case(
        "parquet cut off",
        lambda t: (
            parquet(prompt=["1+1="])(t),
            (t / "data/t.parquet").write_bytes((t / "data/t.parquet").read_bytes()[:60]),
        ),
        "t.parquet",
        arguments=PARQUET,
    ),
    file_case(
        "parquet with binary prompts",
        parquet(prompt=[b"1+1=\xff"], answer=["2"]),
        "prompt",
        arguments=PARQUET,
    ),
    file_case("a byte order mark", converted(lambda d: b"\xef\xbb\xbf" + d), expected="either"),
    file_case("CRLF", converted(lambda d: d.replace(b"\n", b"\r\n")), expected="runs"),
    file_case("UTF-16", converted(lambda d: d.decode().encode("utf-16")), "train.jsonl"),
    file_case("no newline at the end", converted(lambda d: d.rstrip(b"\n")), expected="runs"),
    file_case(
        "one JSON array", converted(lambda d: b"[" + d.strip().replace(b"\n", b",") + b"]"), "train.jsonl"
    ),
    file_case(
        "fewer prompts than a step", converted(lambda d: d.splitlines(keepends=True)[0]), expected="either"
    ),
    file_case(
        "every prompt too long, dropped",
        lambda t: None,
        "max_prompt_tokens",
        arguments=("data.max_prompt_tokens=2", "data.prompt_too_long=drop"),
    ),
    file_case(
        "a prompt key that is not there",
        lambda t: None,
        "question",
        arguments=("data.train.prompt_key=question",),
    ),
    file_case(
        "an extension nobody knows",
        lambda t: (t / "data/train.jsonl").rename(t / "data/train.csv"),
        "train.csv",
        arguments=("data.train.path=data/train.csv",),
    ),
    file_case(
        "a compressed file",
        lambda t: (t / "data/train.jsonl").rename(t / "data/train.jsonl.gz"),
        "train.jsonl.gz",
        arguments=("data.train.path=data/train.jsonl.gz",),
    ),
    file_case(
        "a hub data set without a network",
        lambda t: None,
        "nosuch/dataset",
        arguments=("data.train.path=nosuch/dataset",),
    ),
    file_case(
        "held-out data missing",
        lambda t: None,
        "nothere.parquet",
        arguments=("data.eval={path: data/nothere.parquet}",),
    ),
    file_case("DPO without pairs", lambda t: None, "pair", "responses", arguments=("algorithm=dpo",)),
]
