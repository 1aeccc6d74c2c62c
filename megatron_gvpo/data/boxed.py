"""Finds the last \\boxed{...} of a text."""

from __future__ import annotations

import re

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{}`, stripped; None if there is none or its braces do not close."""
    return _last_box(text)[0]


def _last_box(text: str) -> tuple[str | None, str]:
    """(content, what follows) of the last box."""
    _, opening, rest = text.rpartition(r"\boxed{")
    depth = 1 if opening else 0
    for brace in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and opening:
            return rest[: brace.start()].strip(), rest[brace.end() :]
    return None, ""
