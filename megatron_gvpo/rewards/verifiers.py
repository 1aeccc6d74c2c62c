r"""The built-in rewards: whether the answer is right, and whether it stands where it should.

Every reward, built in or a user's own, is a function `f(prompt, response, **options) -> float`. It runs
in a worker process that can be killed, so that none needs a time limit of its own.
"""

from __future__ import annotations

import logging
import re

from megatron_gvpo.groups import Prompt, Rollout

_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text


def verify_math(prompt: Prompt, response: Rollout) -> float:
    r"""1 if the last `\boxed{}` of the response equals the prompt's answer as mathematics, else 0.

    math-verify judges. Where the answer is an integer, the box must state a number: `12+34` equals 46,
    but it is the question. Raises ValueError for a prompt without an answer.
    """
    if prompt.answer is None:
        raise ValueError("the prompt has no answer to compare with")
    gold, given = boxed(prompt.answer) or prompt.answer.strip(), boxed(response.text)
    if not given:
        return 0.0
    if given == gold:
        return 1.0
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(given):
        return float(int(given) == int(gold))
    return float(_equal(gold, given))


def verify_format(prompt: Prompt, response: Rollout, pattern: str | None = None) -> float:
    r"""1 if the whole response matches the regular expression `pattern` (dots match newlines), else 0.

    Without a pattern: 1 if it has exactly one `\boxed{}`, which is not empty and ends it.
    """
    if pattern is not None:
        return float(re.fullmatch(pattern, response.text, re.DOTALL) is not None)
    content, after = _last_box(response.text)
    return float(bool(content) and not after.strip() and response.text.count(r"\boxed{") == 1)


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{}`, stripped; None where there is none or its braces do not close."""
    return _last_box(text)[0]


def _last_box(text: str) -> tuple[str | None, str]:
    """(content, what follows) of the last box."""
    _, found, rest = text.rpartition(r"\boxed{")
    depth = 1 if found else 0
    for brace in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and found:
            return rest[: brace.start()].strip(), rest[brace.end() :]
    return None, ""


def _equal(gold: str, given: str) -> bool:
    import sympy
    from math_verify import LatexExtractionConfig, parse, verify

    # Its own time limits need SIGALRM; without them it warns, once.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    latex = [LatexExtractionConfig()]
    golds, givens = (parse(rf"\boxed{{{text}}}", latex, parsing_timeout=None) for text in (gold, given))
    if _INTEGER.fullmatch(gold):
        arithmetic = (sympy.Add, sympy.Mul, sympy.Pow, sympy.Function)
        givens = [v for v in givens if isinstance(v, sympy.Basic) and not v.has(*arithmetic)]
    return bool(verify(golds, givens, timeout_seconds=None))


BUILT_IN = {"math": verify_math, "format": verify_format}
