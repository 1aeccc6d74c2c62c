"""The reward for a right answer, judged by math-verify.

It runs in a worker that can be killed, so math-verify's own time limits, which need SIGALRM, are off.
"""

from __future__ import annotations

import logging
import re

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Add, Basic, Function, Mul, Pow

from megatron_gvpo.data.converters import boxed
from megatron_gvpo.data.final_answer import marked
from megatron_gvpo.data.generated import entry_of
from megatron_gvpo.groups import Prompt, Rollout

logging.getLogger("math_verify").setLevel(logging.ERROR)  # hides its warning about missing time limits

_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_NUMBER = re.compile(r"[+-]?[0-9][0-9,]{0,100}(?:\.[0-9]{1,100})?")
# LaTeX and typesetters put these between groups of three digits; math-verify knows the comma alone.
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|~|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
_QUANTITY = re.compile(rf"(?:\\?\$ ?)?({_NUMBER.pattern})((?: [A-Za-z]{{2,}}){{1,6}})")
# Words after a number that change its value, or make it more than one answer.
_NO_UNITS = re.compile(
    r"or|and|to|not|no|plus|minus|times|over|squared|cubed|mod|pi|dozen|hundred|thousand|[mbtr]+illion|half|"
    r"halves|quarters?|thirds?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?"
)
# Operations that are gone when math-verify has read them: it computes fractions, and functions of numbers.
_OPERATION = re.compile(
    r"[0-9)}]\s*[/:]\s*[0-9({\\]"
    r"|\\(?:[dtc]?frac|div|[dt]?binom|choose|sum|prod|int|lim|max|min|gcd|lcm|det|operatorname)(?![a-z])"
)
_LATEX = [LatexExtractionConfig()]


def verify_math(prompt: Prompt, rollout: Rollout, marker: str | None = None) -> float:
    r"""1 if the last `\boxed{}` of the response equals the prompt's answer as mathematics, else 0.

    With `marker`, such as `####` or `Answer:`, the answer is the rest of the line after the last marker (in
    capitals or not), or the next line that has any text, instead of a box. math-verify compares. Beside a
    plain number, the unit after another one makes no difference (`50\%`, `12 dollars`). If the prompt's
    answer is an integer, the response must state a number: `12+34`, `92/2` and `\gcd(46, 92)` equal 46, but
    they only repeat the question. Raises ValueError for a prompt without an answer.
    """
    if prompt.answer is None:
        raise ValueError("the prompt has no answer to compare with")
    gold = boxed(prompt.answer) or prompt.answer.strip()
    answer = boxed(rollout.text) if marker is None else marked(rollout.text, marker)
    if not answer:
        return 0.0
    if answer == gold:
        return 1.0
    gold, answer = _plain(gold), _plain(answer)
    gold, answer = _without_unit(gold, answer), _without_unit(answer, gold)
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return float(int(answer) == int(gold))
    if _is_equal(gold, answer):
        return 1.0
    without_sign = answer.removesuffix("%").removesuffix("\\").rstrip()
    return float(answer.endswith("%") and _is_equal(gold, without_sign))


def _plain(text: str) -> str:
    """The text without a full stop at its end, and without spaces between groups of digits."""
    return _THOUSANDS.sub("", text.removesuffix(".").rstrip())


def _without_unit(text: str, other: str) -> str:
    """The number of a text such as `12 dollars`, where the other text is a number alone."""
    quantity = _QUANTITY.fullmatch(text)
    if quantity is None or not _NUMBER.fullmatch(other):
        return text
    return text if any(map(_NO_UNITS.fullmatch, quantity[2].lower().split())) else quantity[1]


def _is_equal(gold: str, answer: str) -> bool:
    if _INTEGER.fullmatch(gold) and _OPERATION.search(answer):
        return False
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
