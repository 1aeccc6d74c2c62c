"""A wrong key or a missing data file is refused by the first checks, before any library is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_gvpo.checks.files import check_data_files
from megatron_gvpo.cli import main
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.config import load_config

RECORD = {"question": "1+1=", "label": 2}
NAMED = ("data.train.prompt_key=question", "data.train.answer_key=label")


@pytest.fixture
def refusal(good: Path, tmp_path: Path):
    """The error for a data set; None if it is accepted."""

    def check(file: str, *overrides: str, command: str = "train") -> str | None:
        config = load_config([good], [f"data.train.path={tmp_path / file}", *overrides])
        try:
            check_data_files(config, command)
        except ConfigError as error:
            return str(error)
        return None

    return check


def test_a_field_that_is_missing_is_named_with_those_that_are_there(refusal, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD))
    assert "a.jsonl, line 1: field 'prompt' is missing; fields there: question, label" in refusal("a.jsonl")
    assert refusal("a.jsonl", *NAMED) is None
    problem = refusal("a.jsonl", NAMED[0], "data.train.answer_key=lable")
    assert (
        "field 'lable' is missing" in problem
        and "answer_key, beside the file's path, names another" in problem
    )
    assert "is null where no reward needs an answer" in problem
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([RECORD]), tmp_path / "a.parquet")
    assert "a.parquet, row 1: field 'prompt' is missing" in refusal("a.parquet")
    assert refusal("a.parquet", *NAMED) is None


def test_held_out_data_has_keys_of_its_own(refusal, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD))
    held_out = f"data.eval.path={tmp_path / 'a.jsonl'}"
    rewards = "rewards.components=[{name: math}]"
    assert "field 'prompt' is missing" in refusal("a.jsonl", *NAMED, held_out, rewards)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no records"),
        ('[{"prompt": "1+1="}]', "it is one JSON array: write one record a line"),
        (
            '{\n "prompt": "1+1="\n}\n',
            "line 1: a record over several lines, and each line must be one record",
        ),
        ("{'prompt': '1+1='}", "not valid JSON: Expecting property name"),
    ],
)
def test_files_in_another_format(text: str, problem: str, refusal, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(text)
    assert problem in refusal("a.jsonl")


def test_a_missing_file(refusal):
    assert refusal("none.jsonl").endswith("none.jsonl: no such file or directory")
    assert refusal("none.jsonl", command="slurm") is None, "the nodes of a job may have it"


def test_known_forms_need_no_key(refusal, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}')
    assert refusal("a.jsonl", "algorithm=sft") is None
    assert "no pair of responses is recognised" in refusal("a.jsonl", "algorithm=dpo")


def test_a_function_of_the_user_is_not_called(refusal, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD))
    assert refusal("a.jsonl", f"data.train.convert={tmp_path}/none.py:convert") is None


def test_train_says_so_and_loads_no_torch(task: Path, tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD))
    monkeypatch.setattr("megatron_gvpo.cli.train.run_with_model", lambda _: pytest.fail("it went on"))
    words = [f"data.train.path={tmp_path / 'a.jsonl'}", f"output_dir={tmp_path / 'run'}"]
    assert main(["train", f"{task}/run.yaml", *words]) == 2
    assert "field 'prompt' is missing" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
