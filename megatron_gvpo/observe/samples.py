"""Chooses the few responses of a step that the terminal and the tracking services show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_gvpo.core.redaction import hide_secrets
from megatron_gvpo.observe.loggers.backend import Sample
from megatron_gvpo.observe.rollouts.conversation import transcript

if TYPE_CHECKING:
    from megatron_gvpo.observe.rollouts.table import Responses

EVERY = 10  # steps between two tables of samples; every evaluation also has a table
MOST = 4  # the most responses of a step
DEMONSTRATION = "demonstration"  # the kind of a solution in the data, whose reward has no meaning


def few_samples(responses: Responses) -> list[Sample]:
    """At most MOST responses without secrets, from the highest reward to the lowest."""
    rollouts = [(group.prompt, rollout) for group in responses.groups for rollout in group.rollouts]
    rollouts.sort(key=lambda pair: -math.inf if math.isnan(pair[1].reward) else pair[1].reward)
    count = min(MOST, len(rollouts))
    indices = [round(i * (len(rollouts) - 1) / max(count - 1, 1)) for i in reversed(range(count))]
    samples = []
    for prompt, rollout in (rollouts[index] for index in indices):
        kind = DEMONSTRATION if rollout.source == DEMONSTRATION else responses.kind
        texts = hide_secrets(prompt.text), hide_secrets(transcript(rollout))
        samples.append(Sample(kind, *texts, rollout.reward))
    return samples


def one_line(sample: Sample, width: int) -> str:
    """The sample in at most `width` characters, none of which moves a cursor: prompt, arrow, response.

    Of a text that is too long, the middle is left out: the end of a response has its answer.
    """
    start = (
        f"{sample.kind}: " if sample.kind == DEMONSTRATION else f"{sample.kind}, reward {sample.reward:.3g}: "
    )
    room = max(width - len(start) - 4, 8)
    response = _shortened(_visible(sample.response), max(room - 24, room // 2))
    prompt = _shortened(_visible(sample.prompt), room - len(response))
    return f"{start}{prompt} -> {response}"[:width]


def worth_showing(step: int, samples: Sequence[Sample]) -> bool:
    """True for a step whose samples are shown: every tenth, and those with an evaluation."""
    return bool(samples) and (step % EVERY == 0 or step == 1 or any(s.kind == "eval" for s in samples))


def _visible(text: str) -> str:
    spaced = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(spaced.split())


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    tail = (width - 5) * 2 // 3
    return f"{text[: width - 5 - tail]} ... {text[len(text) - tail :]}"
