"""The context of the policy's next turn: the environment's messages, as the chat template writes them.

By default that is the part which the template adds to made-up messages: sampled tokens are not rendered or
tokenised again. With `again`, the whole conversation is rendered for every turn, as in an application that
keeps messages; then a template may leave out the thinking of earlier turns. In both cases training uses
exactly the tokens that the engine used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.messages import check_role, check_roles
from megatron_gvpo.data.tool_calls import thoughts, with_values
from megatron_gvpo.huggingface.tokenizer import opened, rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_gvpo.groups import Prompt

_SAID, _HEARD = "\u2042said\u2042", "(heard)"  # the contents of a made-up turn and of the answer to it
_HISTORIES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "a"}],
    [
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ],
)


class Template:
    """Writes the tokens between two turns of the policy.

    `end_token_ids`: the tokens that end a turn of the policy. `chat`: prompts are rendered by the tokenizer's
    chat template; otherwise texts follow each other as they are. `again`: the conversation is rendered again
    for every turn. Raises DataError if the template does not write a conversation message after message, as
    far as that is needed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        chat: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        again: bool = False,
    ) -> None:
        self._tokenizer, self._ends, self._special = (
            tokenizer,
            tuple(end_token_ids),
            special_tokens(tokenizer),
        )
        self._tools = list(plain(tools, self._special)) or None
        self._chat, self.again = chat, again
        self._end_before = dict[str, int]()  # the token that ends a turn, by the role that speaks next
        self._checked = set[str]()  # roles whose messages were checked
        self._rendered: dict[int, tuple[str, str]] = {}  # histories, as `_renderings` returns them
        if tools and not chat:
            raise DataError("rollout.conversation.tools need a chat template, which tells the policy of them")
        if again and not chat:
            raise DataError("rollout.conversation.history=template needs a chat template")
        if chat:
            self._check("tool" if tools else "user")

    def text(self, token_ids: Sequence[int]) -> str:
        """A turn of the policy as text, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def length(self, last: int, messages: Sequence[Mapping[str, Any]]) -> int:
        """The number of tokens of an answer. Raises DataError."""
        if not self.again:
            return len(self.tokens_between(last, messages))
        return len(self._tokens("".join(message["content"] for message in self._plain(messages))))

    def followed(
        self,
        prompt: tuple[int, ...],
        ended: tuple[int, ...],
        before: Sequence[Mapping[str, Any]],
        answer: Sequence[Mapping[str, Any]],
    ) -> tuple[int, ...]:
        """Return the tokens of the context of the policy's next turn. Raises DataError.

        `ended`: the tokens of the last turn and its context; `before`: the messages after the prompt up to
        that turn.
        """
        if not self.again:
            return (*ended, *self.tokens_between(ended[-1], answer))
        for message in answer:
            self._check(message["role"])
        opening, text = self._written_again([*self._plain(before), *self._plain(answer)])
        begin = len(prompt) - len(opening)
        if prompt[begin:] != opening:
            raise DataError("the prompt does not end with the opening of the policy's turn")
        return (*prompt[:begin], *self._tokens(text))

    def _written_again(self, messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], str]:
        """(the tokens with which a prompt opens the policy's turn, the text after a prompt).

        Raises DataError.
        """
        (plain, opened), text = self._renderings(0, messages)
        if not (opened.startswith(plain) and text.startswith(plain)):
            raise DataError(
                "the chat template writes a prompt differently when messages follow it: use another "
                "template, or leave rollout.conversation.history=template out"
            )
        return self._tokens(opened[len(plain) :]), text[len(plain) :]

    def tokens_between(self, last: int, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The tokens from a turn's `last` token to the next turn's first. Raises DataError.

        A special token in a message's text is written as text (see `_plain`).
        """
        messages = self._plain(messages)
        if not self._chat:
            return self._tokens("".join(message["content"] for message in messages))
        for message in messages:
            self._check(message["role"])
        tokens = self._tokens(self._suffix(0, messages))
        return tokens[1:] if tokens[0] == last else tokens

    def end_before(self, role: str) -> int:
        """The token with which the chat template ends a turn before a message of this role.

        Raises DataError.
        """
        self._check(role)
        return self._end_before[role]

    def written(self, message: Mapping[str, Any]) -> str:
        """A message with thoughts or `tool_calls` as the policy writes it, by the template.

        Raises DataError if the template does not write them after the opening of the policy's turn.
        """
        reasoning = thoughts(message)
        try:
            (_, opening), text = self._renderings(0, [with_values(message)], generate=False)
        except DataError:  # this template takes the arguments as text
            (_, opening), text = self._renderings(0, [message], generate=False)
        reply = text[len(opening) :]
        if reasoning.strip() not in reply:
            raise DataError(
                "the chat template leaves out the message's thoughts (reasoning_content): put them into the "
                "content, as the policy writes them"
            )
        ends = [token for token in self._tokenizer.convert_ids_to_tokens(self._ends) if token]
        end = max(map(reply.rfind, ends))
        if not self._chat or not text.startswith(opening) or end < 0:
            raise DataError(
                "the chat template writes tool calls in another place than the policy's turn: give the text "
                "of the calls as the content"
            )
        return reply[:end]

    def opening(self, messages: Sequence[Mapping[str, Any]], prompt: Prompt) -> tuple[int, ...]:
        """The tokens of a chat up to the policy's next turn. Raises DataError.

        Without a chat template, a chat that begins with the prompt's text begins with the prompt's tokens.
        """
        if self._chat:
            check_roles(messages, self._tokenizer)
            try:
                return self._tokens(self._render(self._plain(messages), True))
            except Exception as error:  # a template is a program, and may fail in any way
                raise DataError(f"the chat template refuses a conversation: {error}") from None
        text = "".join(message["content"] for message in messages)
        if text.startswith(prompt.text):
            return prompt.token_ids + self._tokens(text[len(prompt.text) :])
        return tuple(opened(self._tokenizer, [text])[0])

    def _plain(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [plain(message, self._special) for message in messages]

    def _tokens(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # the library raises bare Exceptions, such as for half a surrogate pair
            raise DataError(f"the tokenizer cannot write {text[:60]!r}: {error}") from None

    def _suffix(self, history: int, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text after a turn of the policy: its end token, the messages, its next turn's opening.

        `history`: an index of _HISTORIES. Raises DataError.
        """
        reply = {"role": "assistant", "content": _SAID}
        before, text = self._renderings(history, [reply, *messages])
        start = text.rfind(_SAID)
        if start < 0 or not any(map(text.startswith, before)):
            raise DataError(
                "the chat template changes earlier messages when later ones come, so a conversation cannot "
                "be continued token by token: use another template, or data.chat_template=false"
            )
        return text[start + len(_SAID) :]

    def _renderings(
        self, history: int, messages: Sequence[Mapping[str, Any]], generate: bool = True
    ) -> tuple[tuple[str, str], str]:
        """(a history without and with the opening of the policy's turn, the same history and the messages).

        Raises DataError.
        """
        before = _HISTORIES[history]
        try:
            if history not in self._rendered:
                self._rendered[history] = self._render(before, False), self._render(before, True)
            return self._rendered[history], self._render([*before, *messages], generate)
        except Exception as error:  # a template is a program, and may fail in any way
            raise DataError(f"the chat template refuses a conversation: {error}") from None

    def _render(self, messages: Sequence[Mapping[str, Any]], generate: bool) -> str:
        return rendered(self._tokenizer, messages, tools=self._tools, add_generation_prompt=generate)

    def _check(self, role: str) -> None:
        """Check once how the template writes a message in this role after the policy's turn.

        Raises DataError if the template leaves the answer out, or if the suffix depends on earlier messages
        or lacks the end token.
        """
        if role in self._checked:
            return
        check_role(role, self._tokenizer, "a message of the conversation has")
        message = {"role": role, "name": "x", "tool_call_id": "000000000", "content": _HEARD}
        if self.again:
            _, text = self._written_again([{"role": "assistant", "content": _SAID}, message])
            if _SAID not in text or _HEARD not in text:
                raise DataError(f"the chat template leaves out a message before or of role {role}")
            self._checked.add(role)
            return
        suffixes = {self._suffix(history, [message]) for history in range(len(_HISTORIES))}
        if len(suffixes) > 1:
            raise DataError(
                f"the chat template writes a message of role {role} differently after different histories: "
                "use another template, or data.chat_template=false"
            )
        [suffix] = suffixes
        if _HEARD not in suffix:
            raise DataError(
                f"the chat template leaves out a message of role {role} after a turn of the policy, which is "
                "a text: use another template" + (", or data.chat_template=false" if role != "tool" else "")
            )
        self._end_before[role] = self._end_token(suffix.partition(_HEARD)[0])
        self._checked.add(role)

    def _end_token(self, close: str) -> int:
        """The token that ends a turn where the template writes `close` after it. Raises DataError."""
        if not close:
            raise DataError(
                "the chat template writes nothing between a turn of the policy and the next message, so that "
                "no token ends the turn: use a template that marks the end of messages"
            )
        tokens = self._tokens(close)
        if not tokens:
            raise DataError(
                f"the chat template ends a turn of the policy with {close[:20]!r}, for which the tokenizer "
                "has no token: it is another model's template"
            )
        end = tokens[0]
        if end not in self._ends:
            ends = self._tokenizer.convert_ids_to_tokens(self._ends)
            raise DataError(
                f"the chat template ends a turn with {close[:20]!r}, and the policy's turns end with "
                f"{' or '.join(map(repr, ends))}: name the former's token, {end}, in eos_token_id of "
                "generation_config.json or in rollout.stop_token_ids"
            )
        return end


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the special tokens that a text spells."""
    added = [str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, {*added, *tokenizer.all_special_tokens} - {""})) or "(?!)")


def plain(value: Any, special: re.Pattern[str]) -> Any:
    """JSON-like values with a space in every special token that their texts spell, names and keys included.

    Otherwise a web page that a tool fetched, the description of an MCP server's tool, or the name of a tool
    that the policy made up could end its message and begin another one in any role.
    """
    if isinstance(value, str):
        return special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", value)
    if isinstance(value, Mapping):
        return {plain(key, special): plain(inner, special) for key, inner in value.items()}
    return [plain(inner, special) for inner in value] if isinstance(value, list | tuple) else value
