"""Chat templates that open the model's turn with `<think>`, before texts that are trained after them.

The models of such templates (DeepSeek-R1-Distill, Qwen3 Thinking) never write `<think>` themselves, and data
sets of their responses often do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_gvpo.core.errors import DataError

_OPEN = re.compile(r"<think>\s*\Z")


def opens_thoughts(prompt: str) -> bool:
    """True for a prompt at whose end the chat template has opened the thoughts."""
    return bool(_OPEN.search(prompt))


class OpenedThoughts:
    """Looks at each prompt with the texts that are trained after it."""

    def __init__(self) -> None:
        self._unclosed: str | None = None

    def see(self, where: str, prompt: str, texts: Sequence[str]) -> None:
        """Raises DataError for a text that opens thoughts which its prompt has opened already."""
        if not opens_thoughts(prompt):
            return
        if any(text.lstrip().startswith("<think>") for text in texts):
            raise DataError(
                f"{where}: the chat template ends the prompt with <think>, and the text to be trained begins "
                "with it, too: leave it out of the text (`convert`, beside the file's path, names a function "
                "of yours that does)"
            )
        if self._unclosed is None and any("</think>" not in text for text in texts):
            self._unclosed = where

    def warning(self) -> str | None:
        """A warning about the first text without an end of its thoughts; None if all have one."""
        if self._unclosed is None:
            return None
        return (
            f"{self._unclosed}: the chat template ends the prompt with <think>, and the text to be trained "
            "has no </think>: the model would learn to answer within its thoughts. Begin the text with "
            "</think>, or set data.chat_template_kwargs so that the template opens none"
        )
