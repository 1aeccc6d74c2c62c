"""The reward for a right answer, judged by math-verify.

It runs in a worker that can be killed, so math-verify's own time limits, which need SIGALRM, are off.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Add, Basic, Eq, Expr, Float, Function, Mul, Pow
from sympy.core.function import AppliedUndef

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
# Words in LaTeX, which math-verify leaves out at the end of an answer, with all that is between two of them.
_TEXT = re.compile(r"\\(?:text|textbf|textrm|mbox|mathrm)\s*\{([^{}]*)\}")
# Marks that math-verify leaves out: of a number's base, and of a time before or after noon.
_BASE = re.compile(r"(?<=[0-9])_\{?([0-9]+)")
_HALF_OF_DAY = re.compile(r"(?:[0-9]\s|:[0-9]{2})\s*[ap]\.?m(?![a-z])", re.IGNORECASE)
_MIXED = re.compile(r"([+-]?[0-9]+) ([0-9]+)/([0-9]+)")  # math-verify reads 1 1/2 as 11/2
_EXPONENT = re.compile(r"\^(?:[0-9]|\{[0-9]\})")
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
    answer is an integer, the response must state a number, perhaps as `m + n = 46`: `12+34`, `92/2` and
    `\gcd(46, 92)` equal 46, but they only repeat the question. Raises ValueError for a prompt without an
    answer.
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
    if not set(_BASE.findall(answer)) <= (set(_BASE.findall(gold)) or {"10"}):
        return 0.0
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return float(int(answer) == int(gold))
    if _has_counting_words(gold) or _has_counting_words(answer):
        return float(_without_marks(gold) == _without_marks(answer))
    if _is_equal(gold, answer):
        return 1.0
    without_sign = answer.removesuffix("%").removesuffix("\\").rstrip()
    return float(answer.endswith("%") and _is_equal(gold, without_sign))


def _plain(text: str) -> str:
    """The text without a full stop at its end and spaces between groups of digits; 1 1/2 as LaTeX."""
    text = _THOUSANDS.sub("", text.removesuffix(".").rstrip())
    mixed = _MIXED.fullmatch(text)
    return text if mixed is None else rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"


def _without_unit(text: str, other: str) -> str:
    """The number of a text such as `12 dollars`, where the other text is a number alone."""
    quantity = _QUANTITY.fullmatch(text)
    if quantity is None or not _NUMBER.fullmatch(other):
        return text
    return text if any(map(_NO_UNITS.fullmatch, quantity[2].lower().split())) else quantity[1]


def _has_counting_words(text: str) -> bool:
    r"""True for words in LaTeX that are more than a unit at the end, and for a time such as 10:00 am.

    Such words are in `2\text{ thousand}` and `2\text{ hours }30\text{ minutes}`. `and` and `or` are not such
    words: math-verify reads them as commas.
    """
    if _HALF_OF_DAY.search(text):
        return True
    parts = [part for part in _TEXT.finditer(text) if part[1].strip() not in ("and", "or")]
    if not parts:
        return False
    words = " ".join(part[1] for part in parts).lower().replace(".", "").split()
    if any(word in ("am", "pm") or _NO_UNITS.fullmatch(word) for word in words):
        return True
    before, after = text[: parts[0].start()], _TEXT.sub("", text[parts[0].end() :])
    return bool(re.search("[0-9]", before) and re.search("[0-9]", _EXPONENT.sub("", after)))


def _without_marks(text: str) -> str:
    """The text in small letters, without LaTeX's marks of words and without white space."""
    return "".join(_TEXT.sub(r"\1", text).lower().split())


def _is_equal(gold: str, answer: str) -> bool:
    if _INTEGER.fullmatch(gold) and _OPERATION.search(answer):
        return False
    golds, answers = (parse(rf"\boxed{{{text}}}", _LATEX, parsing_timeout=None) for text in (gold, answer))
    if _INTEGER.fullmatch(gold):
        answers = [v for v in answers if isinstance(v, Basic) and _states_a_number(v)]
    answers = [v for v in answers if not any(_differ(g, v) for g in golds)]
    return bool(verify(golds, answers, timeout_seconds=None))


def _states_a_number(answer: Basic) -> bool:
    """True for a number without operations, and for an equation of an unknown with one: m + n = 41."""
    is_equation = isinstance(answer, Eq) and (answer.lhs.free_symbols or answer.lhs.atoms(AppliedUndef))
    return not (answer.rhs if is_equation else answer).has(Add, Mul, Pow, Function)


def _differ(gold: Any, answer: Any) -> bool:
    """True for different numbers that math-verify takes for equal, because their difference is small.

    It rounds decimals to six places, and takes other differences below 2^-53 for 0.
    """
    if not all(isinstance(value, Expr) and value.is_comparable for value in (gold, answer)):
        return False
    difference = abs((gold - answer).evalf(15, maxn=500))
    if gold.has(Float) or answer.has(Float):
        return bool(difference > 1e-3 * max(abs(gold.evalf()), abs(answer.evalf())))
    return bool(difference > Float("1e-400"))


def score_generated(prompt: Prompt, rollout: Rollout, tag: str = "answer") -> float:
    """The score from 0 to 1 that the generator of a `reasoning_gym` problem gives to an answer.

    The answer is the text in the last `<tag>...</tag>`; in a response without the tag, all of it.
    """
    from reasoning_gym.utils import extract_answer

    problems, entry = entry_of(prompt.record or {})
    answer = extract_answer(rollout.text, tag)
    return float(problems.score_answer(rollout.text.strip() if answer is None else answer, entry))
