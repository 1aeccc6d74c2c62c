"""The reward for a right answer, judged by math-verify.

It runs in a worker that can be killed, so math-verify's own time limits, which need SIGALRM, are off.
"""

from __future__ import annotations

import logging
import re

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Add, Basic, Function, Mul, Pow

from megatron_gvpo.data.converters import boxed
from megatron_gvpo.data.generated import entry_of
from megatron_gvpo.groups import Prompt, Rollout

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its time limits are off

_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_LATEX = [LatexExtractionConfig()]


def verify_math(prompt: Prompt, rollout: Rollout, marker: str | None = None) -> float:
    r"""1 if the last `\boxed{}` of the response equals the prompt's answer as mathematics, else 0.

    With `marker`, such as `####` or `Answer:`, the answer is the rest of the line after the last marker (in
    capitals or not) instead of a box. math-verify compares. If the prompt's answer is an integer, the
    response must state a number: `12+34` equals 46, but it only repeats the question. Raises ValueError for a
    prompt without an answer.
    """
    if prompt.answer is None:
        raise ValueError("the prompt has no answer to compare with")
    gold = boxed(prompt.answer) or prompt.answer.strip()
    answer = boxed(rollout.text) if marker is None else _marked(rollout.text, marker)
    if not answer:
        return 0.0
    if answer == gold:
        return 1.0
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return float(int(answer) == int(gold))
    return float(_is_equal(gold, answer))


def _marked(text: str, marker: str) -> str | None:
    """The rest of the line after the last `marker`, without `$` and a full stop around it, or its box."""
    lines = re.findall(rf"{re.escape(marker)}[ \t]*([^\n]*)", text, re.IGNORECASE)
    if not lines:
        return None
    line = lines[-1].strip().removesuffix(".").strip("*$ ")
    return boxed(line) or line


def _is_equal(gold: str, answer: str) -> bool:
    golds, answers = (parse(rf"\boxed{{{text}}}", _LATEX, parsing_timeout=None) for text in (gold, answer))
    if _INTEGER.fullmatch(gold):
        answers = [v for v in answers if isinstance(v, Basic) and not v.has(Add, Mul, Pow, Function)]
    return bool(verify(golds, answers, timeout_seconds=None))


def score_generated(prompt: Prompt, rollout: Rollout, tag: str = "answer") -> float:
    """The score from 0 to 1 that the generator of a `reasoning_gym` problem gives to an answer.

    The answer is the text in the last `<tag>...</tag>`; in a response without the tag, all of it.
    """
    from reasoning_gym.utils import extract_answer

    problems, entry = entry_of(prompt.record or {})
    answer = extract_answer(rollout.text, tag)
    return float(problems.score_answer(rollout.text.strip() if answer is None else answer, entry))
