"""A warning about a teacher whose responses end elsewhere than the policy's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_gvpo.config.schema import Config
from megatron_gvpo.data.end_tokens import ids_in_files


def other_end(config: Config, end_token_ids: Sequence[int]) -> str | None:
    """A warning where no token that ends the teacher's responses ends the policy's, else None.

    The policy would learn to write that token, and what comes behind it. A base model and a chat model often
    differ so.
    """
    if config.teacher is None:
        return None
    theirs = ids_in_files(Path(config.teacher.path))
    if not theirs or set(theirs) & set(end_token_ids):
        return None
    return (
        f"teacher.path={config.teacher.path}: its responses end at token {theirs[0]}, and the policy's at "
        f"{', '.join(map(str, end_token_ids))}: it will learn to write {theirs[0]} and to go on. Name it in "
        "rollout.stop_token_ids"
    )
