"""Tools that records have for their own prompts: the chat template shows them, or a warning names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from helpers.inputs.chat_tokenizer import END, tokenizer

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.prompts import PromptWriter, load_prompts
from megatron_gvpo.groups import Prompt
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hell"}]
RECORDS: list[dict[str, Any]] = [
    {"messages": CHAT, "tools": [WEATHER, ADD]},
    {"messages": CHAT, "tools": [ADD]},
    {"messages": CHAT, "tools": None},
]
SHOWN = f"{json.dumps(WEATHER)}\n{json.dumps(ADD)}\n"


def load(file: Path, sampler: str = "dataset", chat_template: bool = True, **keys: Any) -> list[Prompt]:
    dataset = DatasetConfig(path=str(file), **keys)
    data = DataConfig(train=dataset, chat_template=chat_template)
    return load_prompts(dataset, data, tokenizer(), longest=900, end_token_ids=(END,), sampler=sampler)


def jsonl(folder: Path, records: list[dict[str, Any]]) -> Path:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_every_prompt_shows_its_own_tools(tmp_path: Path) -> None:
    rows = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), rows)
    spelled = [record | {"tools": json.dumps(record["tools"] or [])} for record in RECORDS]
    for file in (jsonl(tmp_path, RECORDS), rows, jsonl(tmp_path, spelled)):
        both, one, none = load(file, tools_key="tools")
        assert both.text.startswith(f"<|im_start|>system\n{SHOWN}<|im_end|>\n<|im_start|>user\nhello")
        assert json.dumps(ADD) in one.text and "weather" not in one.text
        assert none.text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert both.demonstration == none.demonstration


def test_a_prompt_with_a_hint_keeps_its_tools(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"prompt": "hello", "answer": "4", "tools": [ADD]}])
    dataset = DatasetConfig(path=str(file), tools_key="tools")
    [prompt] = load(file, "engine", tools_key="tools")
    writer = PromptWriter(dataset, DataConfig(train=dataset), tokenizer(), 900)
    assert writer.text(prompt) == prompt.text
    longer = writer.extended(prompt, " you")
    assert longer is not None and longer.text == prompt.text.replace("hello", "hello you")


def test_tools_that_no_key_names_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(jsonl(tmp_path, [{"messages": CHAT}, *RECORDS]))
    [warning] = [record.message for record in caplog.records if "tools" in record.message]
    assert "line 2: the record has tools" in warning and "set tools_key=tools" in warning
    caplog.clear()
    load(jsonl(tmp_path, RECORDS), tools_key="tools")
    load(jsonl(tmp_path, [{"messages": CHAT, "tools": ["a hammer"]}]))
    assert not caplog.records


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ("{", r"line 1: field 'tools' \(tools_key\) is str '\{': expected a list of JSON schemas"),
        (["add"], r"line 1: field 'tools' \(tools_key\) is list \['add'\]: expected"),
        ([], r"no record has tools in the field 'tools' \(tools_key\)"),
        (None, r"no record has tools in the field 'tools' \(tools_key\)"),
    ],
)
def test_other_values_are_refused(tmp_path: Path, tools: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        load(jsonl(tmp_path, [{"messages": CHAT, "tools": tools}]), tools_key="tools")


def test_without_a_chat_template_nothing_could_show_them(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"prompt": "hello", "completion": "he", "tools": [ADD]}])
    with pytest.raises(DataError, match="tools_key=tools needs a chat template"):
        load(file, chat_template=False, tools_key="tools")
