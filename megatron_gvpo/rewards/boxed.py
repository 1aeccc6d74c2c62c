r"""The answer in the last `\boxed{}` of a text, and the reward for putting it there."""

from __future__ import annotations

import re

from megatron_gvpo.groups import Prompt, Rollout

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{}`, stripped; None if there is none or its braces do not close."""
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


def verify_format(prompt: Prompt, rollout: Rollout, pattern: str | None = None) -> float:
    r"""1 if the whole response matches the regular expression `pattern` (dots match newlines), else 0.

    Without a pattern: 1 if it has exactly one `\boxed{}`, which is not empty and ends it.
    """
    if pattern is not None:
        return float(re.fullmatch(pattern, rollout.text, re.DOTALL) is not None)
    content, after = _last_box(rollout.text)
    return float(bool(content) and not after.strip() and rollout.text.count(r"\boxed{") == 1)
