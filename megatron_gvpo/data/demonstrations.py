"""Worked solutions of records: a text, or a chat in which the assistant's messages are the solution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.data.messages import check_names, check_tools, unequal_weight
from megatron_gvpo.data.tool_calls import thoughts
from megatron_gvpo.data.turn_writer import TurnWriter
from megatron_gvpo.groups import Chat
from megatron_gvpo.huggingface.end_tokens import ended
from megatron_gvpo.turns import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EXAMPLE = '[{"role": "assistant", "content": "..."}, {"role": "tool", "content": "..."}, ...]'


class SolutionTokens(NamedTuple):
    """The token ids of a solution, with the end token; its chat, if it is one; and its texts.

    `turns`: the texts of the assistant as the policy writes them, without what the template writes before.
    """

    token_ids: tuple[int, ...]
    chat: Chat | None
    texts: list[str]
    turns: list[str]


class DemonstrationReader:
    """Reads the worked solution of a record. Raises DataError, which does not name the record."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        chat: bool,
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        """`chat`: prompts are rendered by the chat template, which also gets the `tools`."""
        self._tokenizer = tokenizer
        self._ends = end_token_ids
        self._chat = chat
        self._tools = tools
        self._writer = TurnWriter(tokenizer, chat, tools)
        # It is made for the first chat alone, because that checks the chat template, and can refuse it.
        self._template: Template | None = None

    def __call__(self, solution: Any) -> SolutionTokens:
        if isinstance(solution, str):
            text = self._writer.text(solution)
            ids = self._writer.tokens(text)
            if not ids or not solution.strip():
                raise DataError("is empty: it has no tokens, or white space alone; nothing would be learned")
            return SolutionTokens(ended(ids, self._ends), None, [solution], [text])
        self._check(solution)
        with _named_messages():
            if self._template is None:
                self._template = Template(self._tokenizer, self._ends, self._chat, self._tools)
            return self._chat_tokens(solution, self._template)

    def _chat_tokens(self, solution: Sequence[Mapping[str, Any]], template: Template) -> SolutionTokens:
        own: list[int] = []
        written: list[str] = []
        turns: list[Turn] = []
        between: list[Mapping[str, Any]] = []
        for i, message in enumerate(solution):
            if message["role"] != "assistant":
                between.append(message)
                continue
            has_parts = message.get("tool_calls") or thoughts(message)
            written.append(template.written(message) if has_parts else self._writer.text(message["content"]))
            # Without a chat template texts follow each other as they are, and the last one ends the chat.
            ids = self._writer.tokens(written[-1])
            if i + 1 == len(solution):
                ids = ended(ids, self._ends)
            elif self._chat:
                ids = ended(ids, (template.end_before(solution[i + 1]["role"]), *self._ends))
            if not ids:
                raise DataError(f"message {i} is empty")
            context = template.tokens_between(own[-1], between) if turns else ()
            turns.append(Turn(len(own), len(turns) - 1, None, context))
            own += ids
            between = []
        texts = [message["content"] for message in solution]
        return SolutionTokens(tuple(own), Chat(tuple(turns), tuple(map(dict, solution))), texts, written)

    def _check(self, solution: Any) -> None:
        if not isinstance(solution, list) or not all(map(_is_message, solution)):
            shown = f"{type(solution).__name__} {repr(solution)[:60]}"
            raise DataError(f"is neither a string nor a list of chat messages like {_EXAMPLE}, but {shown}")
        with _named_messages():
            check_names(solution, self._tokenizer if self._chat else None)
        roles = [message["role"] for message in solution]
        if roles[:1] != ["assistant"] or roles[-1] != "assistant":
            raise DataError("must begin and end with a message of the assistant, after the prompt")
        with _named_messages():
            check_tools(solution)
        if (problem := unequal_weight(solution)) is not None:
            raise DataError(f"is a chat, and {problem} (data.train.convert)")
        for i, (one, other) in enumerate(pairwise(roles)):
            if one == other == "assistant":
                raise DataError(f"has messages {i} and {i + 1} of the assistant with nothing in between")


@contextmanager
def _named_messages() -> Iterator[None]:
    """Begin an error about a message with the name of the demonstration."""
    try:
        yield
    except DataError as error:
        raise DataError(f"is not a chat that can be written: {error}") from None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
