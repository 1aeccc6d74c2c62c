"""The reward for a right answer, judged by math-verify.

It runs in a worker that can be killed, so math-verify's own time limits, which need SIGALRM, are off.
"""

from __future__ import annotations

import logging
import re

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Add, Basic, Function, Mul, Pow

from megatron_gvpo.data.boxed import boxed
from megatron_gvpo.data.generated import entry_of
from megatron_gvpo.groups import Prompt, Rollout

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_LATEX = [LatexExtractionConfig()]


def verify_math(prompt: Prompt, rollout: Rollout, marker: str | None = None) -> float:
    r"""1 if the last `\boxed{}` of the response equals the prompt's answer as mathematics, else 0.

    `marker`: the answer is the rest of the line after the last of these, such as `####` or `Answer:` (in
    capitals or not), instead of in a box. math-verify judges. Where the answer is an integer, a number must
    be stated: `12+34` equals 46, but it only repeats the question. Raises ValueError for a prompt without an
    answer.
    """
    if prompt.answer is None:
        raise ValueError("the prompt has no answer to compare with")
    gold = boxed(prompt.answer) or prompt.answer.strip()
    given = boxed(rollout.text) if marker is None else _marked(rollout.text, marker)
    if not given:
        return 0.0
    if given == gold:
        return 1.0
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(given):
        return float(int(given) == int(gold))
    return float(_equal(gold, given))


def _marked(text: str, marker: str) -> str | None:
    """The rest of the line after the last `marker`, without `$` and a full stop around it, or its box."""
    found = re.findall(rf"{re.escape(marker)}[ \t]*([^\n]*)", text, re.IGNORECASE)
    if not found:
        return None
    line = found[-1].strip().removesuffix(".").strip("*$ ")
    return boxed(line) or line


def _equal(gold: str, given: str) -> bool:
    golds, givens = (parse(rf"\boxed{{{text}}}", _LATEX, parsing_timeout=None) for text in (gold, given))
    if _INTEGER.fullmatch(gold):
        givens = [v for v in givens if isinstance(v, Basic) and not v.has(Add, Mul, Pow, Function)]
    return bool(verify(golds, givens, timeout_seconds=None))


# The reward `reasoning_gym`: the score that a problem's own generator gives to an answer.


def score_generated(prompt: Prompt, rollout: Rollout, tag: str = "answer") -> float:
    """Between 0 and 1, for the text in the last `<tag>...</tag>`, or without one for the whole response."""
    from reasoning_gym.utils import extract_answer

    problems, entry = entry_of(prompt.record or {})
    answer = extract_answer(rollout.text, tag)
    return float(problems.score_answer(rollout.text.strip() if answer is None else answer, entry))
