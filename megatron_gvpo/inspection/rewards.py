"""Compares the rewards of a record's own answer, a wrong one, an empty one and a cut-off one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from statistics import fmean

from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.inspection.verdict import RunVerdict, failure, not_tried, ok, warning
from megatron_gvpo.observe.rollout_metrics import is_correct
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.settings.config import Config

RECORDS = 8
MEND_FIRST = "mend the reward first: a response for which it fails gets 0"
SLOW = 1.0  # seconds for one response above which a reward counts as slow
_PATIENCE = 20.0  # seconds after which no further record's responses are scored
Form = Callable[[str], str]
# Forms in which tasks expect an answer; the best of them counts.
_FORMS: tuple[Form, ...] = (
    lambda answer: answer,
    lambda answer: f"The answer is {answer}.",
    lambda answer: f"The answer is \\boxed{{{answer}}}.",
    lambda answer: f"#### {answer}",
    lambda answer: f"<answer>{answer}</answer>",
    lambda answer: f"<think>I think.</think><answer>{answer}</answer>",
)

_OTHERS = 3  # other records' answers that are tried: one alone may be right, too, in other words
_KINDS = ("own", "wrong", "empty", "cut off")
_TRIED = (
    "the answer alone, in a sentence, boxed, after ####, in <answer> marks, after the option marker of math"
)

_NO_ANSWER = "if it is to ignore the answer, set data.train.answer_key=null, and this is not tried"


def inspect_rewards(config: Config, task: Task) -> list[RunVerdict]:
    """Score made-up responses to the first records that have an answer or a demonstration."""
    if not config.samples_responses or not config.rewards.components:
        return [not_tried("reward", "the run samples no responses, or asks no reward")]
    if config.rewards.is_served:
        return [not_tried("reward", "it is a model on a server, which is not started here")]
    if config.rollout.conversation is not None:
        return [not_tried("reward", "responses are conversations: their environment decides")]
    if all(component.built_in and component.name == "format" for component in config.rewards.components):
        return [not_tried("reward", "format reads no answers, with which it could be tried")]
    prompts = [p for p in task.prompts if _solution(p, task) is not None]
    others = {_solution(prompt, task) for prompt in prompts}
    if not prompts:
        return [not_tried("reward", "the records have no answers (data.train.answer_key)")]
    if len(others) < 2:
        return [
            warning(
                "reward",
                f"all {len(prompts)} records have the same answer, {_short(others.pop() or '')!r}: the "
                "policy would learn to give it without reading the prompt",
                "see that data.train.answer_key names the field of the answers",
            )
        ]
    prompts, forms = prompts[:RECORDS], _forms(config)
    with RewardPool(config.rewards) as pool:
        seconds, groups = _scored(pool, prompts, task, forms)
    scores = _scores(groups, len(forms))
    return [_own_is_best(scores, task), *_own_is_right(groups, len(forms), config), _time(seconds)]


def _forms(config: Config) -> list[Form]:
    """The usual forms, and those of the options of built-in rewards."""
    built_in = [component for component in config.rewards.components if component.built_in]
    markers = [component.options["marker"] for component in built_in if "marker" in component.options]
    tags = [component.options["tag"] for component in built_in if "tag" in component.options]
    after = [partial("{} {}".format, marker) for marker in markers]
    return [*_FORMS, *after, *(partial("<{0}>{1}</{0}>".format, tag) for tag in tags)]


def _solution(prompt: Prompt, task: Task) -> str | None:
    if prompt.answer is not None:
        return prompt.answer
    if prompt.demonstration is not None:
        return str(task.tokenizer.decode(prompt.demonstration, skip_special_tokens=True))
    return None


def _others(prompt: Prompt, task: Task) -> list[str]:
    """Solutions of other records that differ from this record's."""
    own, solutions = _solution(prompt, task), (_solution(p, task) for p in task.prompts)
    differing = dict.fromkeys(s for s in solutions if s is not None and s != own)
    return list(islice(differing, _OTHERS))


def _scored(
    pool: RewardPool, prompts: Sequence[Prompt], task: Task, forms: Sequence[Form]
) -> tuple[float, list[Group]]:
    """Seconds for a response; for each prompt a scored group of every kind of response in every form.

    It ends after the first prompt for whose responses the reward fails, and after some time: a reward that
    hangs would take `rewards.timeout` for each of them.
    """
    groups = list[Group]()
    begin, count = time.perf_counter(), 0
    for prompt in prompts:
        own = _solution(prompt, task) or ""
        complete = [form(own) for form in forms]
        rollouts = [_response(text, task) for text in complete]
        rollouts += [_response(text[: len(text) // 3], task, is_cut=True) for text in complete]
        wrong = [form(other) for other in _others(prompt, task) for form in forms]
        rollouts += [_response(text, task) for text in ("", *wrong)]
        for part in (rollouts[:1], rollouts[1:]):
            if not rollouts[0].reward_errors:
                pool.score([Group(prompt, part)])
                count += len(part)
        groups.append(Group(prompt, rollouts))
        has_failed = any(rollout.reward_errors for rollout in rollouts)
        if has_failed or time.perf_counter() - begin > _PATIENCE:
            break
    return (time.perf_counter() - begin) / count, groups


def _scores(groups: Sequence[Group], count: int) -> list[tuple[Prompt, dict[str, float], dict[str, str]]]:
    """Return each record's scores by kind of response, and the errors of rewards.

    `count`: the forms of each kind. The answer of another record that scores least counts as wrong.
    """
    scores = []
    for group in groups:
        own, cut_off, empty, *others = (max(part) for part in _parts(group.rewards, count))
        values = own, min(others), empty, cut_off
        errors = {name: text for rollout in group.rollouts for name, text in rollout.reward_errors.items()}
        scores.append((group.prompt, dict(zip(_KINDS, values, strict=True)), errors))
    return scores


def _parts(rewards: Sequence[float], count: int) -> Iterator[Sequence[float]]:
    """The rewards of one record's responses: its own answer, cut off, empty, and each of the others'."""
    empty = 2 * count
    yield from (rewards[:count], rewards[count:empty], rewards[empty : empty + 1])
    yield from (rewards[first : first + count] for first in range(empty + 1, len(rewards), count))


def _own_is_right(groups: Sequence[Group], count: int, config: Config) -> list[RunVerdict]:
    """A warning if evaluations would count no record's own answer as right; else nothing."""
    first, right_at = config.rewards.components[0].name, config.eval.right_at
    own = [rollout for group in groups for rollout in group.rollouts[:count]]
    highest = max(rollout.rewards.get(first, 0.0) for rollout in own)
    if config.data.eval is None or is_correct(highest, right_at) or highest <= 0:
        return []
    return [
        warning(
            "right",
            f"{first} gives the records' own answers at most {highest:.3g}, and evaluations count a response "
            f"as right from eval.right_at={right_at:g} on: pass@k may stay 0",
            "set eval.right_at to the score of a response that is good enough",
        )
    ]


def _response(text: str, task: Task, is_cut: bool = False) -> Rollout:
    """A response of this text, which has no end token where it is cut off."""
    token_ids = task.tokenizer(text, add_special_tokens=False)["input_ids"]
    if is_cut:
        return Rollout(list(token_ids), [], text, "length")
    return Rollout([*token_ids, task.end_token_ids[0]], [], text, "stop")


def _own_is_best(scores: Sequence[tuple[Prompt, dict[str, float], dict[str, str]]], task: Task) -> RunVerdict:
    for prompt, _, errors in scores:
        for name, text in errors.items():
            return failure("reward", f"{name} failed for a response to {prompt.id}: {text}", MEND_FIRST)
    kinds = scores[0][1].keys()
    means = ", ".join(f"{kind} {fmean(values[kind] for _, values, _ in scores):.3g}" for kind in kinds)
    same = [prompt for prompt, values, _ in scores if len(set(values.values())) == 1]
    if len(same) == len(scores) and any(any(values.values()) for _, values, _ in scores):
        return failure(
            "reward",
            f"it is the same for the record's own answer, a wrong, an empty and a cut-off one ({means})",
            f"the reward wants the answer in a form that is not among those tried: {_TRIED}; {_NO_ANSWER}",
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
        judged = failure if 2 * len(beaten) > len(scores) else warning
        return judged(
            "reward",
            f"other records' answers score as much as the record's own ({beaten[0]}; {len(beaten)} of "
            f"{len(scores)} records): {means}",
            f"look at the reward with this record, unless those answers are right for it, too; {_NO_ANSWER}",
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
    """Shorten an answer to fit into a line."""
    return answer if len(answer) <= 60 else f"{answer[:60]}..."


def _time(seconds: float) -> RunVerdict:
    if seconds > SLOW:
        return warning(
            "reward's time",
            f"{seconds:.1f} s a response",
            "raise rewards.workers, or make it faster: a step waits for it",
        )
    return ok("reward's time", f"{seconds * 1000:.1f} ms a response")
