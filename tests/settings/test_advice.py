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
    ("algorithm", "option"),
    [
        ("{recipe: grpo, loss: {clip_high: 0.3}}", "loss.clip_high=0.3"),
        ("{recipe: grpo, loss: {ratio: sequence, dual_clip: 3}}", "loss.dual_clip=3.0, algorithm.loss.ratio"),
        ("{recipe: grpo, loss: {reference: step_start, kl_coef: 0.5}}", "loss.kl_coef=0.5"),
        ("{recipe: cispo, loss: {clip_high: 2}}", "loss.clip_high=2.0"),
        ("{recipe: ppo, critic: {clip: 0.5}}", "critic.clip=0.5"),
        ("{recipe: disco, loss: {kl_limit: 0.5}}", "loss.kl_limit=0.5"),
        ("{recipe: reg_grpo, loss: {ddof: 0}}", "loss.ddof=0"),
        ("{recipe: dapo, loss: {clip_high: 0.28}}", None),  # the recipe's own
        ("{recipe: grpo, loss: {kl_coef: 0.5}}", None),
    ],
)
def test_options_that_act_from_the_second_update_on(good, algorithm, option):
    words = "no effect with train.mini_batches=1"
    one = advice(load_config([good], ["train.mini_batches=1", f"algorithm={algorithm}"])) or ""
    assert (words in one) == (option is not None) and f"algorithm.{option or ''}" in f"{one}algorithm."
    assert words not in (advice(load_config([good], [f"algorithm={algorithm}"])) or "")


@pytest.mark.parametrize(
    ("algorithm", "size", "enough", "text"),
    [
        ("knapsack_rl", "rollout.n=2", "rollout.n=3", "allocation: low=2: all prompts have rollout.n=2"),
        ("v05", "rollout.n=16", "rollout.n=15", "members.0: high=16: a prompt has rollout.n=16 responses"),
        ("arise", "train.steps=500", "train.steps=501", "members.0: after_step=500: in train.steps=500"),
        (
            "{members: [{name: hinted, fields: [h], after_step: 9}]}",
            "train.steps=9",
            "train.steps=10",
            "members.0: after_step=9: no step of train.steps=9 gets hints",
        ),
        (
            "{recipe: grpo, shapers: [length_curriculum]}",
            "train.steps=150",
            "train.steps=151",
            "shapers.0: every=150: in train.steps=150 the budget stays",
        ),
        (
            "grpo_lambda",
            "train.prompts_per_step=2",
            "train.prompts_per_step=4",
            "shapers.0: top=0.2 of train",
        ),
        (
            "{recipe: grpo, shapers: [{name: mask_truncated, repeat: 9}]}",
            "rollout.max_tokens=17",
            "rollout.max_tokens=18",
            "shapers.0: repeat=9: no response of rollout.max_tokens=17 has twice as many",
        ),
    ],
)
def test_options_that_a_runs_sizes_leave_without_effect(good, algorithm, size, enough, text):
    algorithm = f"algorithm={algorithm}"
    assert f"algorithm.{text}" in (advice(load_config([good], [algorithm, size])) or "")
    assert ": no effect" not in (advice(load_config([good], [algorithm, enough])) or "")


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
    ("member", "weights", "problem"),
    [
        ("name: demonstration, when: all_wrong", (1, 0.1), None),
        (
            "name: demonstration, when: all_wrong, right: 0",
            (1, 0.1),
            "wrong answer may have 0.1: set it to 0.55",
        ),
        ("name: demonstration", (1, 0.7), None),  # always joins
        ("name: hinted, fields: [hint]", (1, 0.7), "wrong answer may have 0.7: set it to 0.85"),
        ("name: foresight", (0.5, 0.2), "right answer may have 0.5: set it to 0.35"),
        ("name: exemplars", (0.5, 0.6), "wrong answer may have 0.6: lower the other components' weights"),
        ("name: skills, after_step: 1", (1, -0.2), None),
    ],
)
def test_a_user_is_told_where_a_member_takes_format_for_a_right_answer(good, member, weights, problem):
    """With GCPO's former `right: 0`, a wrong answer in the right format kept the solution out for ever."""
    rewards = (
        f"rewards.components=[{{name: math, weight: {weights[0]}}}, {{name: format, weight: {weights[1]}}}]"
    )
    keys = ["data.train.demonstration_key=solution", "train.mini_batches=2", rewards]
    text = advice(load_config([good], [*keys, f"algorithm={{recipe: gvpo, members: [{{{member}}}]}}"])) or ""
    if problem is None:
        assert text == ""
    else:
        assert text.startswith("algorithm.members.0.right=") and text.endswith(problem)


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
