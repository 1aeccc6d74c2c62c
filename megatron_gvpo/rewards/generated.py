"""The reward `reasoning_gym`: the score that a problem's own generator gives to an answer."""

from __future__ import annotations

from megatron_gvpo.data.generated import entry_of
from megatron_gvpo.groups import Prompt, Rollout


def score_generated(prompt: Prompt, rollout: Rollout, tag: str = "answer") -> float:
    """Between 0 and 1, for the text in the last `<tag>...</tag>`, or without one for the whole response."""
    from reasoning_gym.utils import extract_answer

    problems, entry = entry_of(prompt.record or {})
    answer = extract_answer(rollout.text, tag)
    return float(problems.score_answer(rollout.text.strip() if answer is None else answer, entry))
