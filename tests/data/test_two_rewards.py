"""Records of pairs that teach nothing, or silence, are counted aloud; data of nothing else are refused."""

import json
from pathlib import Path

import pytest
from helpers.tiny_run import configure

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.task import load_task
from megatron_gvpo.huggingface.card import ModelCard

SAME = {"prompt": "2+2=", "chosen": "4", "rejected": "4"}
SOUND = {"prompt": "2+3=", "chosen": "5", "rejected": "4"}


def load(task: Path, directory: Path, *records: object) -> None:
    file = directory / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    keys = (f"data.train.path={file}", "data.train.demonstration_key=null", "data.eval=null")
    config = configure(task, directory / "run", "algorithm=dpo", *keys)
    load_task(config, ModelCard.read(config.model.path))


def test_one_of_them_is_a_warning(task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    load(task, tmp_path, SOUND, SAME)
    assert "pairs.jsonl:2: the same response has two rewards (1 of 2 records)" in caplog.text
    caplog.clear()
    load(task, tmp_path, SOUND)
    assert "two rewards" not in caplog.text


def test_nothing_else_is_an_error(task: Path, tmp_path: Path):
    with pytest.raises(
        DataError, match=r"pairs\.jsonl:1: the same response has two rewards, as in every record"
    ):
        load(task, tmp_path, SAME, SAME)


@pytest.mark.parametrize("chosen", ["", " ", "\n"])
def test_an_empty_text_as_the_best_response_is_a_warning(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, chosen: str
):
    load(task, tmp_path, SOUND, {"prompt": "2+2=", "chosen": chosen, "rejected": "4"})
    assert "pairs.jsonl:2: the best response is empty (1 of 2 records)" in caplog.text
    caplog.clear()
    load(task, tmp_path, SOUND, {"prompt": "2+2=", "chosen": "4", "rejected": chosen})
    assert "empty" not in caplog.text, "to prefer any answer to none is a task like others"
