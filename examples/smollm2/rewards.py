"""Grades a response to a sum in two ways, so that the curve tells arithmetic from the form of an answer."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"(?<![\d.,])-?\d+(?:,\d{3})*(?:\.\d+)?")


def strict(prompt: Any, rollout: Any) -> float:
    """1 if the response ended by itself and its last number is the answer, else 0.

    Training uses this reward.
    """
    values = numbers(rollout.text)
    return float(rollout.finish_reason == "stop" and bool(values) and values[-1] == float(prompt.answer))


def lenient(prompt: Any, rollout: Any) -> float:
    """1 if the answer is among the numbers of the response, cut off or not, else 0. It is only reported.

    Answers differ from the numbers of their questions, so that repeating a question does not count.
    """
    return float(float(prompt.answer) in numbers(rollout.text))


def numbers(text: str) -> list[float]:
    """All numbers that the text states, such as 7, -3, 1,200 and 2.50."""
    return [float(word.replace(",", "")) for word in NUMBER.findall(text)]


def names_first(prompt: Any, rollout: Any) -> float:
    """1 if the first person of the problem whom the response names is the right one, else 0."""
    sentences = prompt.record["prompt"].splitlines()[0].split(". ")
    people = {sentence.split()[0] for sentence in sentences if sentence.strip()}
    named = [word for word in re.findall(r"[\w-]+", rollout.text) if word in people]
    return float(named[:1] == [prompt.answer])


def is_the_name(prompt: Any, rollout: Any) -> float:
    """1 if the response ended by itself and is the right name alone, else 0. It is only reported."""
    return float(rollout.finish_reason == "stop" and rollout.text.strip().rstrip(".") == prompt.answer)
