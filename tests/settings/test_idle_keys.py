"""Keys that nothing in the run would read: refused by name, or told where files are for several methods."""

from __future__ import annotations

import pytest
from helpers.inputs.good_config import message

from megatron_gvpo.settings.advice import advice
from megatron_gvpo.settings.config import load_config

SFT = ("algorithm=sft", "data.train.demonstration_key=solution")
DPO = ("algorithm=dpo", "data.train.responses_key=responses")
WEIGHED = "rewards.components=[{name: math}, {name: format, weight: 0.5}]"
HELD_OUT = "data.eval={path: e.jsonl}"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("eval.every=5",), "eval.every has no effect: data.eval names the held-out prompts, and is missing"),
        (
            ("algorithm=spo", "rollout.n=1", "data.shuffle=false"),
            "data.shuffle has no effect: algorithm.prom",
        ),
        (("rewards.max_lost=0.1",), "rewards.max_lost has no effect: no component asks a model on servers"),
        (("rollout.conversation={environment: 'm:E', parser: xml}",), "conversation.parser has no effect"),
        (("rollout.conversation={program: 'm:f', observation_tokens: 9}",), "observation_tokens has no effe"),
        (
            ("rollout.conversation={tools: ['m:f'], sandbox: {memory_mb: 64}}",),
            "sandbox has no effect: it is",
        ),
        (
            ("algorithm=gdpo", WEIGHED),
            "rewards.components.1.weight=0.5 (format) has no effect: algorithm.",
        ),
        (
            ("algorithm={recipe: bnpo, estimator: {components: true}}", WEIGHED),
            "algorithm.estimator=bnpo normalises and counts every component alike: leave it out",
        ),
        (
            ("algorithm={recipe: gdpo, shapers: [{name: drop}, {name: overlong}]}",),
            "shapers.1: overlong has no effect: it changes the reward, and the estimator components reads "
            "components of the reward: leave it out",
        ),
        (
            ("algorithm={recipe: opd, shapers: [{name: overlong}]}", "teacher={path: t}"),
            "shapers.0: overlong has no effect: it changes the reward, and the estimator distillation reads "
            "no reward",
        ),
        (
            ("algorithm={recipe: dpo, prompts: {name: success_rate}}", DPO[1]),
            "prompts=success_rate counts the successes of the policy's own responses, and sampler=file has",
        ),
        (
            (
                "algorithm={recipe: grpo, sampler: file, prior: tracker, estimator: {baseline: prior, scale: "
                "none}}",
                DPO[1],
            ),
            "prior=tracker counts the successes of the policy's own responses, and sampler=file has none",
        ),
    ],
)
def test_a_key_without_effect(good, overrides, problem):
    assert problem in message(good, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        (HELD_OUT, "eval.every=5", "data.eval=null"),  # how a run is tried without evaluations
        ("eval={every: 0, n: 8}",),
        ("rollout.conversation={tools: [python], sandbox: {memory_mb: 64}, parser: xml}",),
        ("rollout.conversation={program: 'm:f', parser: xml}",),
        ("algorithm={recipe: gdpo, estimator: {weights: {math: 1, format: 0.5}}}", WEIGHED),
        ("algorithm={recipe: gdpo, shapers: [{name: overlong}, {name: drop}]}",),
        ("algorithm={recipe: gdpo, shapers: [overlong, {name: mask_truncated, only_wrong: true}]}",),
        ("algorithm={recipe: gdpo, shapers: [{name: overlong}], batch_policy: {name: accumulate}}",),
        ("algorithm={recipe: bnpo, shapers: [{name: overlong}, {name: affine, scale: 0.4}]}", WEIGHED),
        ("algorithm={recipe: dpo, prompts: {name: success_rate, field: rate}}", DPO[1]),
    ],
)
def test_a_key_with_an_effect(good, overrides):
    load_config([good], overrides)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ((*SFT, "rollout.n=16"), "rollout.n: no effect with algorithm.sampler=dataset, where the data have"),
        (
            (*DPO, "rollout.temperature=0.5", "rewards.components=[{name: format}]"),
            "rollout.temperature, rewards.components: no effect with algorithm.sampler=file, where the data "
            "have the responses and their rewards",
        ),
    ],
)
def test_keys_of_sampling_are_told_where_nothing_is_sampled(good, overrides, problem):
    assert str(advice(load_config([good], overrides))).startswith(problem)


@pytest.mark.parametrize(
    "overrides",
    [
        (*SFT, "rollout.max_tokens=64"),
        (*SFT, HELD_OUT, "rollout.temperature=0.5", "rewards.components=[{name: format}]"),
        ("rollout.n=16", "rewards.components=[{name: format}]", "train.mini_batches=2"),
    ],
)
def test_keys_of_sampling_with_an_effect_are_not_told(good, overrides):
    assert advice(load_config([good], overrides)) is None
