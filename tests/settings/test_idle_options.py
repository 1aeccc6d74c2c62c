"""A key that would have no effect is refused by name: a run that took it would not be what was configured."""

from __future__ import annotations

import pytest
from helpers.inputs.good_config import message

from megatron_gvpo.settings.config import load_config


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        ("{recipe: dapo, loss: {reference: {name: ema, decay: 0.9}}}", "goes with kl_coef above 0"),
        ("{recipe: dapo, loss: {shape: 0.2}}", "shape=0.2 has no effect: it goes with demonstrations=shaped"),
        ("{recipe: grpo, loss: {likelihood_coef: 1}}", "it goes with demonstrations=likelihood"),
        ("{recipe: grpo, loss: {demonstrations: unclipped}}", "has no effect without members"),
        (
            "{recipe: grpo, loss: {cross_context: true}}",
            "loss.cross_context=true has no effect without members",
        ),
        ("{recipe: reg_grpo, loss: {kl_coef: 0, reference: step_start}}", "goes with kl_coef above 0"),
        ("{recipe: reinforce_pp, estimator: {kl_coef: 0, reference: step_start}}", "goes with kl_coef above"),
        ("{recipe: reinforce_pp, estimator: {whiten: none, eps: 1e-3}}", "it goes with whiten=token"),
        ("{recipe: gvpo_minus_cov, loss: {reference: fixed}}", "it goes with cov among its terms"),
        ("{recipe: gvpo_minus_var, loss: {form: variance}}", "it goes with var among its terms"),
        (
            "{recipe: disco, loss: {max_tokens: 9}}",
            "max_tokens=9 has no effect: it goes with length_temperature",
        ),
        ("{recipe: disco, loss: {kl_coef: 0, kl_limit: 1}}", "it goes with kl_coef above 0"),
        ("{recipe: gpg, estimator: {ddof: 0}}", "ddof=0 has no effect: it goes with a scale or whiten"),
        ("{recipe: gpg, estimator: {eps: 0.1}}", "eps=0.1 has no effect: it goes with a scale or whiten"),
        ("{recipe: gpg, estimator: {whiten: token}}", "age=sample has no effect: it goes with whiten=none"),
        (
            "{recipe: grpo, estimator: {scale: batch_std, whiten: sequence}}",
            "scale=batch_std has no effect: it goes with whiten=none",
        ),
        ("{recipe: rejection_sampling, shapers: [keep, overlong]}", "and the loss nll reads no reward"),
        (
            "{recipe: opd_full, shapers: [overlong]}",
            "shapers.0: overlong has no effect: it changes the reward",
        ),
        (
            "{recipe: grpo, shapers: [overlong, {name: staged, stages: [[math, 1]]}]}",
            "shapers.0: overlong has no effect: staged after it computes the reward anew; give it later",
        ),
        (
            "{recipe: dapo, estimator: {name: components}}",
            "shapers.0: overlong has no effect: it changes the reward, and the estimator components reads",
        ),
        (
            "{recipe: gdpo, shapers: [overlong, mask_truncated, {name: drop, by: 0}]}",
            "shapers.0: overlong has no effect: it changes the reward, and the estimator components reads",
        ),
        (
            "{recipe: grpo, shapers: [overlong, mask_truncated, {name: staged, stages: [[math, 1]]}]}",
            "shapers.0: overlong has no effect: staged after it computes the reward anew; give it later",
        ),
        ("{recipe: gvpo, shapers: [{name: keep, which: best}]}", "leaves one response of each group, and"),
        (
            "{recipe: grpo, shapers: [overlong, {name: keep, which: best}]}",
            "leaves one response of each group",
        ),
        ("{members: [{name: demonstration, slot: longest}]}", "it goes with place=replace"),
        ("{members: [{name: demonstration, right: 0.7}]}", "it goes with when=all_wrong"),
        ("{members: [{name: teacher, function: 'math:sqrt', right: 0.7}]}", "when=all_wrong"),
        ("{members: [{name: hinted, fields: [h], keep_group: false}]}", "it goes with prompt=hinted"),
        (
            "{members: [{name: hinted, best_draft: true, prompt: hinted, source: demonstration}]}",
            "prompt=own",
        ),
        (
            "{members: [{name: learned_hint, options: {a: 1}}]}",
            "options={'a': 1} has no effect: it goes with f",
        ),
        ("{recipe: grpo, shapers: [{name: keep, which: best, right: 0.9}]}", "it goes with which=right"),
        ("{recipe: grpo, shapers: [{name: drop, right: 0.9}]}", "it goes with which=all_right or all_wrong"),
        ("{recipe: grpo, shapers: [{name: mask_truncated, right: 0.9}]}", "it goes with only_wrong=true"),
        ("{prompts: {name: success_rate, gamma: 1}}", "gamma=1.0 has no effect: it goes with favour=unsure"),
        ("{recipe: gvpo_offline, shapers: [unlikeliness]}", "reads the engine's log-probs, and sampler=file"),
        (
            "{recipe: gvpo_offline, shapers: [{name: information_consistency, across: t}]}",
            "information_consistency reads the engine's log-probs, and sampler=file has none",
        ),
        ("{recipe: gvpo_offline, shapers: [mask_truncated]}", "and those of sampler=file are whole"),
        (
            "{recipe: sft, prompts: success_rate}",
            "prompts=success_rate compares rewards, and sampler=dataset",
        ),
        (
            "{recipe: gpg_weighted, tracker: {expected: 0.9}}",
            "tracker.expected=0.9 has no effect: the success that the tracker expects is read by",
        ),
        ("{recipe: knapsack_rl, tracker: {weight: 9}}", "tracker.weight=9 has no effect"),
        (
            "{recipe: reinforce_pp, estimator: {kl_coef: 0.1, reference: step_start}}",
            "kl_coef=0.1 has no effect with reference=step_start",
        ),
        (
            "{recipe: grpo, loss: {aggregation: {name: token_mean, count_masked: true}}}",
            "loss.aggregation.count_masked=true has no effect: no block masks responses",
        ),
        (
            "{recipe: grpo, loss: {cross_context: true}, members: [{name: replay}]}",
            "loss.cross_context=true has no effect without members that train responses to another prompt",
        ),
        (
            "{recipe: grpo, loss: {demonstrations: shaped}, members: [{name: hinted, fields: [h]}]}",
            "loss.demonstrations=shaped has no effect without members that bring solutions",
        ),
        ("{members: [{name: hinted, fields: [h], when: always, right: 0.7}]}", "it goes with when=all_wrong"),
        (
            "{members: [{name: learned_hint, function: 'math:pow', penalty: -1}]}",
            "penalty=-1.0 has no effect: it goes with hints of the policy",
        ),
        (
            "{members: [{name: skills, gate: 0, sharpness: 9}]}",
            "sharpness=9.0 has no effect: it goes with gate",
        ),
        ("{members: [{name: exemplars, keep: 1}]}", "count=2 exceeds keep=1"),
        ("{tracker: {decay: 0.5}}", "algorithm: tracker has no effect: no block reads it"),
    ],
)
def test_an_option_of_a_block_that_its_others_switch_off(good, algorithm, problem):
    assert problem in message(good, f"algorithm={algorithm}")


@pytest.mark.parametrize(
    "algorithm",
    [
        "{recipe: gpg_weighted, prompts: {favour: unsure}, tracker: {expected: 0.9}}",
        "{recipe: spo, tracker: {weight: 9}}",
        "{recipe: grpo, shapers: [mask_truncated], loss: {aggregation: {count_masked: true}}}",
        "{recipe: mc_grpo, loss: {aggregation: {count_masked: true}}}",
        "{recipe: grpo, loss: {cross_context: true}, members: [exemplars]}",
        "{recipe: grpo, loss: {demonstrations: shaped}, members: [{name: teacher, function: 'math:pow'}]}",
        "{recipe: grpo, members: [{name: hinted, fields: [h, i], when: always, right: 0.7}]}",
    ],
)
def test_an_option_that_another_block_reads(good, algorithm):
    load_config([good], ["rollout.n=4", f"algorithm={algorithm}"])


def test_a_recipes_own_value_of_such_an_option_may_stay(good):
    """GRPO states its reference; kl_coef=0, which many recipes set, drops it."""
    assert load_config([good], ["algorithm={recipe: grpo, loss: {kl_coef: 0}}"]).algorithm.loss.kl_coef == 0


@pytest.mark.parametrize("shaper", ["overlong", "format_length"])
def test_a_shaper_of_responses_without_tokens_is_refused(good, shaper):
    """It would divide by this length in the first step."""
    text = message(good, f"algorithm={{recipe: grpo, shapers: [{{name: {shaper}, max_tokens: 0}}]}}")
    assert "max_tokens" in text and "0" in text
