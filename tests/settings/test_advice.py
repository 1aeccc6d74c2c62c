"""Warnings about configurations that are legal and usually unintended."""

from __future__ import annotations

import pytest

from megatron_gvpo.settings.advice import advice
from megatron_gvpo.settings.config import load_config


@pytest.mark.parametrize(
    ("overrides", "is_advised"),
    [
        (["train.mini_batches=1"], True),
        (["train.mini_batches=1", "train.batch_epochs=2"], False),
        (["train.mini_batches=1", "algorithm.loss.reference=fixed"], False),
        (["train.mini_batches=1", "algorithm.loss.terms=[]"], False),
        (["train.mini_batches=1", "algorithm.loss.terms=[cov]"], False),
        (["train.mini_batches=1", "algorithm=grpo"], False),
        (["train.mini_batches=2"], False),
    ],
)
def test_a_user_is_told_where_gvpo_is_a_policy_gradient(good, overrides, is_advised):
    assert bool(advice(load_config([good], overrides))) == is_advised


@pytest.mark.parametrize(
    ("algorithm", "is_advised"),
    [("grpo", True), ("gpg", True), ("gvpo", False), ("{recipe: grpo, loss: {importance: truncate}}", False)],
)
def test_a_user_is_told_where_older_weights_pass_for_the_present_ones(good, algorithm, is_advised):
    overrides = ["rollout.engine=sglang", "rollout.async_steps=1", "train.mini_batches=2"]
    config = load_config([good], [*overrides, f"algorithm={algorithm}"])
    assert ("rollout.async_steps=1: " in (advice(config) or "")) == is_advised


def test_an_evaluation_that_counts_another_component_than_the_answers(good):
    held_out, both = "data.eval={path: e.jsonl}", "rewards.components=[{name: format}, {name: math}]"
    text = advice(load_config([good], [held_out, both, "train.mini_batches=2"]))
    assert text == (
        "rewards.components: evaluation counts the first, format, and math judges the answers: put math first"
    )
    alone = "rewards.components=[{name: format}]"
    for overrides in ([both], [held_out, alone], [held_out]):
        assert advice(load_config([good], [*overrides, "train.mini_batches=2"])) is None


@pytest.mark.parametrize(
    ("patience", "every", "is_told"), [(4, 2, False), (5, 2, True), (9, 1, True), (8, 1, False)]
)
def test_a_user_is_told_where_there_are_too_few_evaluations_to_stop_early(good, patience, every, is_told):
    """After the evaluation before the first of 9 steps there are those after steps 2, 4, 6 and 8."""
    keys = [f"eval.every={every}", f"checkpoint.every={every}", "data.eval={path: e.jsonl}", "train.steps=9"]
    best = "checkpoint.keep_best={metric: eval/pass@1}"
    stop = f"train.stop_early={{patience: {patience}}}"
    text = advice(load_config([good], [*keys, best, stop, "train.mini_batches=2"])) or ""
    assert (f"train.stop_early.patience={patience} ends nothing" in text) == is_told


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("data.chat_template_kwargs.enable_thinking=no", "data.chat_template_kwargs.enable_thinking=no"),
        (
            "rewards.components=[{name: r, function: 'r.py:f', options: {strict: Off}}]",
            "0.options.strict=Off",
        ),
        (
            "rewards.components=[{name: r, judge: {model: m, request: {chat_template_kwargs: {think: no}}, "
            "servers: {engine: openai, urls: ['http://h']}}}]",
            "judge.request.chat_template_kwargs.think=no",
        ),
    ],
)
def test_a_word_that_nobody_turns_into_false(good, override, word):
    """Qwen3's template tests `enable_thinking is false`, and the text `no` is not false."""
    text = advice(load_config([good], [override])) or ""
    assert f"{word}: a text here, which counts as true: write false" in text
    assert advice(load_config([good], [override.replace("no", "false").replace("Off", "false")])) is None
