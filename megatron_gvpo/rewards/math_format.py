"""The reward for the form of a response. It does not import math-verify, which takes long."""

from __future__ import annotations

import re

from megatron_gvpo.data.converters import _last_box
from megatron_gvpo.groups import Prompt, Rollout


def verify_format(prompt: Prompt, rollout: Rollout, pattern: str | None = None) -> float:
    r"""1 if the whole response matches the regular expression `pattern` (dots match newlines), else 0.

    Without a pattern: 1 if it has exactly one `\boxed{}`, which is not empty and ends it.
    """
    if pattern is not None:
        return float(re.fullmatch(pattern, rollout.text, re.DOTALL) is not None)
    content, after = _last_box(rollout.text)
    return float(bool(content) and not after.strip() and rollout.text.count(r"\boxed{") == 1)
