"""Samples a few responses of the start model, and checks that they end, get rewards and differ."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Group
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.inspection.rewards import MEND_FIRST
from megatron_gvpo.inspection.verdict import RunVerdict, failure, not_tried, ok, warning
from megatron_gvpo.observe.rollout_metrics import summarise
from megatron_gvpo.runs.one_machine import laptop_config
from megatron_gvpo.settings.config import Config

PROMPTS, RESPONSES = 8, 4
LONGEST = 256  # the most tokens of a response
LARGEST_MODEL = 2 * 2**30  # the most bytes of weights on disk of a model that is sampled here


def weight_bytes(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def inspect_responses(config: Config, cards: ModelCards, task: Task) -> tuple[list[RunVerdict], list[Group]]:
    """Verdicts on the start model's responses to the first prompts, and the responses. Loads the model."""
    if not config.algorithm.samples_from_policy:
        return [not_tried("start model", "the method samples no responses from the policy")], []
    if config.rollout.conversation is not None or config.rewards.is_served or task.images is not None:
        return [not_tried("start model", "its responses need servers, an environment or images")], []
    if (size := weight_bytes(config.model.path)) > LARGEST_MODEL:
        reason = f"{size / 2**30:.1f} GiB of weights are too many to sample from here"
        return [not_tried("start model", reason)], []
    if not size:
        remedy = "fetch them, unless the run is on another machine, which has them"
        return [warning("start model", f"no weights (*.safetensors) in {config.model.path}", remedy)], []
    begin = time.perf_counter()
    groups = _sample(config, cards, task)
    seconds = time.perf_counter() - begin
    return [*_judged(config, groups, seconds)], groups


def _sample(config: Config, cards: ModelCards, task: Task) -> list[Group]:
    """Groups of the first prompts, sampled as the run would and scored by its rewards."""
    from megatron_gvpo.megatron.scorer import Scorer, temperature_of
    from megatron_gvpo.observe import PhaseTimer
    from megatron_gvpo.sampling.rollouts import Rollouts
    from megatron_gvpo.training.environment import prepare

    most = min(config.rollout.max_tokens, LONGEST)
    local = laptop_config(config, rollout={"max_tokens": most})
    prepare(local.parallel, local.rollout)
    temperature = temperature_of(local.algorithm, local.rollout)
    scorer = Scorer(local.model, local.parallel, local.train, temperature=temperature)
    with Rollouts(local, cards, task, scorer, PhaseTimer()) as rollouts:
        rollouts.sync(0)
        sampler = rollouts.sampler(min(config.rollout.n, RESPONSES))
        return sampler.finish(sampler.begin(task.prompts[:PROMPTS], config.train.seed))


def _judged(config: Config, groups: Sequence[Group], seconds: float) -> list[RunVerdict]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    verdicts = [
        _ends(config, [rollout.finish_reason for rollout in rollouts]),
        _signal(config, groups),
        ok(
            "sampling", f"{len(rollouts)} responses with {tokens} tokens in {seconds:.0f} s, loading included"
        ),
    ]
    if errors := [text for rollout in rollouts for text in rollout.reward_errors.values()]:
        share = f"{len(errors)} of {len(rollouts)} responses"
        verdicts.insert(0, failure("reward", f"it failed for {share}: {errors[0]}", MEND_FIRST))
    return verdicts


def _ends(config: Config, reasons: Sequence[str]) -> RunVerdict:
    ended = sum(reason == "stop" for reason in reasons)
    most = min(config.rollout.max_tokens, LONGEST)
    summary = f"{ended} of {len(reasons)} responses end within {most} tokens"
    if ended == 0 and most == config.rollout.max_tokens:
        return warning(
            "ends",
            f"{summary}: the end token never comes",
            "raise rollout.max_tokens, or see that the template, rollout.stop_token_ids and rollout.stop are "
            "the model's",
        )
    if ended == 0:
        return not_tried("ends", f"{summary}, fewer than rollout.max_tokens={config.rollout.max_tokens}")
    if 2 * ended < len(reasons):
        return warning("ends", f"{summary}", "raise rollout.max_tokens unless the policy is to learn to stop")
    return ok("ends", summary)


def _signal(config: Config, groups: Sequence[Group]) -> RunVerdict:
    """The share of groups whose rewards differ; most methods learn nothing from the others."""
    rewards = [reward for group in groups for reward in group.rewards]
    differ = sum(len(set(group.rewards)) > 1 for group in groups)
    summary = (
        f"{differ} of {len(groups)} groups of {len(groups[0].rollouts)} have rewards that differ; "
        f"their mean is {fmean(rewards):.3g}{_passed(groups, config.eval.right_at)}"
    )
    if not config.algorithm.compares_rewards or differ > len(groups) // 4:
        return ok("signal", summary)
    if not any(rewards) and not differ:
        return warning(
            "signal",
            f"{summary}: no response scores anything",
            "read the start model's responses, below: either answers do not parse, or the task is too hard "
            "for this model",
        )
    remedy = "take harder prompts" if fmean(rewards) > 0.5 else "take easier prompts or a stronger model"
    return warning("signal", f"{summary}: most groups teach nothing", f"{remedy}, or raise rollout.n")


def _passed(groups: Sequence[Group], right_at: float) -> str:
    """The start model's pass@1, and pass@k of all responses to a prompt, as an evaluation counts them."""
    most = min(len(group.rollouts) for group in groups)
    metrics = summarise(groups, [most], right_at)
    return "".join(f", pass@{k} {metrics[f'eval/pass@{k}']:.0%}" for k in sorted({1, most}))
