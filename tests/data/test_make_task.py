"""The quickstart's model and data: transformers loads them, the reward accepts them, and they never
change.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gvpo.data.prompts import load_prompts
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.huggingface.tokenizer import end_token_id, load_tokenizer
from megatron_gvpo.rewards.math_answer import verify_math
from megatron_gvpo.rewards.math_format import verify_format
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart" / "make_task.py"


@pytest.fixture(scope="module")
def make_task() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_task", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def task(make_task: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task")
    make_task.make_model(path / "model", seed=0)
    make_task.make_data(path / "data", seed=0)
    return path


def load_split(task: Path, file: str) -> list[Prompt]:
    tokenizer = load_tokenizer(str(task / "model"))
    dataset = DatasetConfig(path=str(task / "data" / file), demonstration_key="solution")
    data = DataConfig(train=dataset)
    return load_prompts(dataset, data, tokenizer, longest=32, end_token_ids=(end_token_id(tokenizer),))


@pytest.fixture(scope="module")
def splits(task: Path) -> dict[str, list[Prompt]]:
    return {file: load_split(task, file) for file in ("train.jsonl", "validation.jsonl", "test.parquet")}


def test_the_checkpoint_is_one_of_transformers(task: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    assert 0.7e6 < model.num_parameters() < 0.9e6
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_tokens_are_characters(task: Path) -> None:
    tokenizer = load_tokenizer(str(task / "model"))
    text = "12+34=46\n46-50=-4\n\\boxed{-4}"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text) - len("boxed{")  # one token for the whole of it


def test_splits_share_no_prompt(splits: dict[str, list[Prompt]], make_task: ModuleType) -> None:
    texts = [prompt.text for prompts in splits.values() for prompt in prompts]
    assert len(texts) == len(set(texts)) == sum(make_task.SIZES.values())


def test_levels_have_their_shares(splits: dict[str, list[Prompt]], make_task: ModuleType) -> None:
    for prompts in splits.values():
        for number, level in make_task.LEVELS.items():
            those = [prompt.text for prompt in prompts if prompt.record["level"] == number]
            assert len(those) / len(prompts) == pytest.approx(level.share, abs=0.08)
            for text in those:
                changes = [int(term) for term in re.findall(r"[+-]?\d+", text)]
                assert len(changes) == level.operands
                assert all(0 <= value <= make_task.HIGHEST for value in itertools.accumulate(changes))


def test_demonstrations_are_right(splits: dict[str, list[Prompt]], task: Path) -> None:
    tokenizer = load_tokenizer(str(task / "model"))
    for prompt in [prompt for prompts in splits.values() for prompt in prompts[:500]]:
        assert prompt.demonstration is not None and prompt.answer is not None
        text = tokenizer.decode(prompt.demonstration, skip_special_tokens=True)
        assert text == prompt.record["solution"]
        assert int(prompt.answer) == eval(prompt.text.rstrip("="))
        *steps, final = text.split("\n")
        for step in steps:
            left, right = step.split("=")
            assert eval(left) == int(right)
        assert final == rf"\boxed{{{prompt.answer}}}"
        right, wrong = (
            Rollout([], [], text.replace(final, rf"\boxed{{{answer}}}"), "stop")
            for answer in (prompt.answer, int(prompt.answer) + 1)
        )
        assert (verify_math(prompt, right), verify_format(prompt, right)) == (1.0, 1.0)
        assert (verify_math(prompt, wrong), verify_format(prompt, wrong)) == (0.0, 1.0)


def test_a_seed_says_everything(task: Path, make_task: ModuleType, tmp_path: Path) -> None:
    make_task.make_model(tmp_path / "model", seed=0)
    make_task.make_data(tmp_path / "data", seed=0)
    files = ["model/config.json", "model/model.safetensors", "model/tokenizer.json", "data/train.jsonl"]
    for file in [*files, "data/validation.jsonl", "data/test.parquet"]:
        assert (tmp_path / file).read_bytes() == (task / file).read_bytes(), file
    make_task.make_data(tmp_path / "other", seed=1)
    first = (tmp_path / "other" / "validation.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["prompt"] != load_split(task, "validation.jsonl")[0].text
