"""The section `teacher`: where it is needed, and which checkpoints cannot teach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.inputs.good_config import message

from megatron_gvpo.checks.teacher import check_teacher
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.settings.config import Config, load_config

LEARNS = "algorithm.loss.reference=teacher"


def test_a_loss_may_have_the_teacher_as_its_reference(good: Path):
    config = load_config([good], [LEARNS, "teacher={path: big, server: {engine: vllm, tp: 2}}"])
    assert config.algorithm.loss.reference_policies["ref"].name == "teacher"
    assert config.algorithm.needs_teacher and config.algorithm.kept_reference is None
    assert config.teacher.server.tp == 2


def test_a_teacher_is_needed_where_something_compares_with_it(good: Path):
    assert message(good, LEARNS).startswith("teacher is missing")
    assert message(good, "teacher={path: big, server: {}}").startswith("teacher has no effect")
    assert message(good, LEARNS, "teacher={server: {}}") == "teacher.path: missing, and it has no default"


def test_servers_do_not_say_everything(good: Path):
    served = (LEARNS, "teacher={path: big, server: {}}")
    assert "rollout.temperature=0.7" in message(good, *served, "rollout.temperature=0.7")
    assert "images" in message(good, *served, "data.train.images_key=pictures")


def checkpoint(directory: Path, vocabulary: Any, added: str = "<end>", **own: int) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(own))
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 9, "content": added}]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def taught(good: Path, policy: Path, teacher: Path, *more: str) -> Config:
    own = f"teacher={{path: {teacher}, server: {{}}}}"
    return load_config([good], [f"model.path={policy}", LEARNS, own, *more])


def accept(config: Config) -> None:
    check_teacher(config, ModelCards(config))


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as error:
        accept(config)
    return str(error.value)


def test_a_teacher_has_the_tokenizer_of_the_policy(good: Path, tmp_path: Path):
    policy = checkpoint(tmp_path / "policy", {"a": 0, "b": 1})
    accept(taught(good, policy, checkpoint(tmp_path / "same", {"b": 1, "a": 0})))
    accept(taught(good, policy, checkpoint(tmp_path / "unigram", [["a", -1.0], ["b", -2.0]])))
    for name, other, problem in (
        ("swapped", {"a": 1, "b": 0}, "'a', 0 in model.path, the id 1"),
        ("smaller", {"a": 0}, "'b', 1 in model.path, none"),
        ("larger", {"a": 0, "b": 1, "c": 2}, "the token 'c', which model.path has not"),
    ):
        text = refusal(taught(good, policy, checkpoint(tmp_path / name, other)))
        assert problem in text and "the tokenizer of model.path" in text
    other_end = checkpoint(tmp_path / "end", {"a": 0, "b": 1}, added="</s>")
    assert "'<end>', 9 in model.path, none" in refusal(taught(good, policy, other_end))


def test_a_teacher_that_reads_texts_has_no_supports(good: Path, tmp_path: Path):
    """Its log-probs are over its own vocabulary, and the policy's would be over what could be sampled."""
    policy, other = checkpoint(tmp_path / "policy", {"a": 0}), checkpoint(tmp_path / "other", {"b": 0})

    def run(teacher: Path, *more: str) -> Config:
        own = (f"model.path={policy}", f"teacher.path={teacher}", "algorithm=gvpo_plus_plus")
        return load_config([good], [*own, *more])

    accept(run(other))
    accept(run(other, "eval.sampling={top_p: 0.8}"))
    accept(run(checkpoint(tmp_path / "same", {"a": 0}), "rollout.top_p=0.8"))
    for own, keys in (
        (("rollout.top_p=0.8",), "rollout.top_p=0.8"),
        (("rollout.top_k=50", "rollout.min_p=0.1"), "rollout.top_k=50, rollout.min_p=0.1"),
    ):
        text = refusal(run(other, *own))
        assert text.startswith(f"{keys} is not possible with teacher.path={other}: its tokenizer gives")
        assert "all of its own vocabulary" in text and text.endswith(f"leave {keys} out")


def test_without_tokenizer_json_the_files_are_compared(good: Path, tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    for directory in (one, other):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "qwen.tiktoken").write_text("YQ== 0")
    accept(taught(good, one, other))
    (other / "qwen.tiktoken").write_text("Yg== 0")
    assert "its tokenizer's files are not those" in refusal(taught(good, one, other))
    (other / "qwen.tiktoken").unlink()
    assert "it has no tokenizer" in refusal(taught(good, one, other))


def test_a_response_fits_into_the_teacher(good: Path, tmp_path: Path):
    policy = checkpoint(tmp_path / "policy", {"a": 0})
    short = checkpoint(tmp_path / "short", {"a": 0}, max_position_embeddings=64)
    lengths = ("rollout.max_tokens=48", "data.max_prompt_tokens=16")
    assert "need 66 positions of the teacher" in refusal(taught(good, policy, short, *lengths))
    accept(taught(good, policy, short, lengths[0], "data.max_prompt_tokens=14"))
