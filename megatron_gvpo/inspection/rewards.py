"""Gives the reward the record's own answer, a wrong one, an empty and a cut-off one, and compares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean

from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.inspection.verdict import RunVerdict, failure, not_tried, ok, warning
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.settings.config import Config

RECORDS = 8
SLOW = 1.0  # seconds for one response
# Ways in which tasks want an answer written; the best of them counts.
_FORMS: tuple[Callable[[str], str], ...] = (
    lambda answer: answer,
    lambda answer: f"The answer is {answer}.",
    lambda answer: f"The answer is \\boxed{{{answer}}}.",
    lambda answer: f"#### {answer}",
    lambda answer: f"<answer>{answer}</answer>",
    lambda answer: f"<think>I think.</think><answer>{answer}</answer>",
)

_TRIED = "the answer alone, in a sentence, boxed, after ####, in <answer> marks"


def inspect_rewards(config: Config, task: Task) -> list[RunVerdict]:
    """Score made-up responses to the first records that have an answer or a demonstration."""
    if not config.samples_responses or not config.rewards.components:
        return [not_tried("reward", "the run samples no responses, or asks no reward")]
    if config.rewards.is_served:
        return [not_tried("reward", "it is a model on a server, which is not started here")]
    if config.rollout.conversation is not None:
        return [not_tried("reward", "responses are conversations: their environment decides")]
    prompts = [p for p in task.prompts if _solution(p, task) is not None]
    others = {_solution(prompt, task) for prompt in prompts}
    if len(others) < 2:
        return [not_tried("reward", "the records have no answers (data.train.answer_key) that differ")]
    prompts = prompts[:RECORDS]
    with RewardPool(config.rewards) as pool:
        seconds, scores = _scores(pool, prompts, task)
    return [_own_is_best(scores, task), _time(seconds)]


def _solution(prompt: Prompt, task: Task) -> str | None:
    if prompt.answer is not None:
        return prompt.answer
    if prompt.demonstration is not None:
        return str(task.tokenizer.decode(prompt.demonstration, skip_special_tokens=True))
    return None


def _other(prompt: Prompt, task: Task) -> str:
    """The solution of a record whose solution differs."""
    own = _solution(prompt, task)
    return next(s for p in task.prompts if (s := _solution(p, task)) not in (None, own))


def _scores(
    pool: RewardPool, prompts: Sequence[Prompt], task: Task
) -> tuple[float, list[tuple[Prompt, dict[str, float], dict[str, str]]]]:
    """Seconds for a response; per record its scores by kind of response, and the errors of rewards."""
    groups, kinds = [], ("own", "wrong", "empty", "cut off")
    for prompt in prompts:
        own, other = _solution(prompt, task) or "", _other(prompt, task)
        texts = [form(own) for form in _FORMS] + [form(other) for form in _FORMS] + [""]
        texts += [form(own)[: len(form(own)) // 3] for form in _FORMS]
        groups.append(Group(prompt, [_response(text, task, i) for i, text in enumerate(texts)]))
    begin = time.perf_counter()
    pool.score(groups)
    seconds = (time.perf_counter() - begin) / sum(len(group.rollouts) for group in groups)
    count, scores = len(_FORMS), []
    for group in groups:
        rewards = group.rewards
        bounds = (slice(0, count), slice(count, 2 * count), slice(2 * count, 2 * count + 1))
        values = [max(rewards[part]) for part in (*bounds, slice(2 * count + 1, None))]
        errors = {name: text for rollout in group.rollouts for name, text in rollout.reward_errors.items()}
        scores.append((group.prompt, dict(zip(kinds, values, strict=True)), errors))
    return seconds, scores


def _response(text: str, task: Task, index: int) -> Rollout:
    """A response of this text. The last ones are the cut-off ones, which have no end token."""
    token_ids = task.tokenizer(text, add_special_tokens=False)["input_ids"]
    if index > 2 * len(_FORMS):
        return Rollout(list(token_ids), [], text, "length")
    return Rollout([*token_ids, task.end_token_ids[0]], [], text, "stop")


def _own_is_best(scores: Sequence[tuple[Prompt, dict[str, float], dict[str, str]]], task: Task) -> RunVerdict:
    for prompt, _, errors in scores:
        for name, text in errors.items():
            return failure("reward", f"{name} failed for a response to {prompt.id}: {text}")
    kinds = scores[0][1].keys()
    means = ", ".join(f"{kind} {fmean(values[kind] for _, values, _ in scores):.3g}" for kind in kinds)
    same = [prompt for prompt, values, _ in scores if len(set(values.values())) == 1]
    if len(same) == len(scores) and any(any(values.values()) for _, values, _ in scores):
        return failure(
            "reward",
            f"it is the same for the record's own answer, a wrong, an empty and a cut-off one ({means})",
            f"the reward ignores the answer, or wants it in a form that is not among those tried: {_TRIED}",
        )
    if same:
        answer = _short(_solution(same[0], task) or "")
        return failure(
            "reward",
            f"it cannot read the answer of {same[0].id} ({len(same)} of {len(scores)} records): {answer!r} "
            f"itself, a wrong, an empty and a cut-off response score the same ({means})",
            "see that data.train.answer_key names what the reward compares with, and that the reward parses "
            f"it and wants one of the forms tried: {_TRIED}",
        )
    beaten = [prompt.id for prompt, values, _ in scores if values["own"] <= values["wrong"]]
    if beaten:
        return failure(
            "reward",
            f"a wrong answer scores as much as the record's own ({beaten[0]}; {len(beaten)} of "
            f"{len(scores)} records): {means}",
            "look at the reward with this record",
        )
    high = [p.id for p, values, _ in scores if max(values["empty"], values["cut off"]) >= values["own"]]
    if high:
        return warning(
            "reward",
            f"an empty or a cut-off response scores as much as the record's own answer, or more ({high[0]}; "
            f"{len(high)} of {len(scores)} records): {means}",
            "the policy would learn to stop early",
        )
    return ok("reward", f"the record's own answer is best of {len(scores)} records' responses ({means})")


def _short(answer: str) -> str:
    """The answer as far as a line has room for it."""
    return answer if len(answer) <= 60 else f"{answer[:60]}..."


def _time(seconds: float) -> RunVerdict:
    if seconds > SLOW:
        return warning(
            "reward's time",
            f"{seconds:.1f} s a response",
            "raise rewards.workers, or make it faster: a step waits for it",
        )
    return ok("reward's time", f"{seconds * 1000:.1f} ms a response")
