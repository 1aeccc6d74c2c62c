"""Texts of the data as turns of the assistant, with what the chat template writes between prompt and text.

Most templates write nothing there. That of gpt-oss writes the header of a channel, those of GLM 4.5 and Qwen3
empty thoughts, or the end of those that they have opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.opened_thoughts import opens_thoughts
from megatron_gvpo.huggingface.tokenizer import rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASKED = {"role": "user", "content": "a"}
_ANSWER = "\u2042answer\u2042"  # the content of a made-up turn


class _Frame(NamedTuple):
    """A prompt as the template writes it, and what it writes then before and after an answer."""

    prompt: str = ""
    header: str = ""
    end: str = ""


class TurnWriter:
    """Writes a text as the chat template writes a message of the assistant after a prompt.

    `chat`: the chat template renders prompts, and also gets the `tools`; otherwise texts stay as they are.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._tokenizer, self._chat, self._tools = tokenizer, chat, list(tools) or None

    def text(self, text: str) -> str:
        """The text with what the template writes before it, unless it has that itself. Raises DataError."""
        frame = self._frame
        has_end_of_thoughts = opens_thoughts(frame.prompt) and "</think>" in text
        if not frame.header or not text.strip() or has_end_of_thoughts or text.startswith(frame.header):
            return text
        try:
            written = self._rendered(text)
        except Exception:  # gpt-oss' refuses a text that has the header of a channel itself
            return text
        turn = written[len(frame.prompt) :].removesuffix(frame.end)
        if not written.startswith(frame.prompt) or "".join(text.split()) not in "".join(turn.split()):
            raise DataError(
                f"begins with {text[:30]!r}, which the chat template does not write after a prompt that ends "
                f"with {frame.prompt[-40:]!r}: leave its thoughts out, or set data.chat_template_kwargs so "
                "that prompts end before thoughts"
            )
        return turn

    def tokens(self, text: str) -> tuple[int, ...]:
        """The token ids of a text from `text`, after a prompt. Raises DataError."""
        prompt, header = self._frame.prompt, self._frame.header
        if header:  # a tokenizer may put a space before a text that stands alone
            before, ids = self._tokens(prompt), self._tokens(prompt + text)
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self._tokens(text)

    @cached_property
    def _frame(self) -> _Frame:
        """The texts that the template writes around an answer.

        It has no header if the template takes no such chat, or writes an answer after something else than the
        end of a prompt: sampled responses follow that end, too.
        """
        if not self._chat:
            return _Frame()
        try:
            prompt, written = self._rendered(), self._rendered(_ANSWER)
        except Exception:  # a template is a program, and may fail in any way: the prompts show the error
            return _Frame()
        before, answer, end = written.rpartition(_ANSWER)
        if answer and before.startswith(prompt):
            return _Frame(prompt, before.removeprefix(prompt), end)
        return _Frame(prompt)

    def _rendered(self, answer: str | None = None) -> str:
        """The made-up prompt, or the chat with an answer to it. Raises all errors of the template."""
        if answer is None:
            return rendered(self._tokenizer, [_ASKED], tools=self._tools, add_generation_prompt=True)
        chat = [_ASKED, {"role": "assistant", "content": answer}]
        return rendered(self._tokenizer, chat, tools=self._tools)

    def _tokens(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # the library raises bare Exceptions
            raise DataError(f"has text that the tokenizer cannot write: {error}") from None
