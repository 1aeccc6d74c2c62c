"""The tokens between the policy's turns: what the environment said, as the chat template writes it.

They are the part that the template adds to made-up messages: nothing that was sampled is ever rendered or
tokenised again. So the tokens that the engine got are the tokens that are trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_gvpo.data.sources import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_gvpo.groups import Prompt

_SAID = "\u2042said\u2042"  # the made-up message of the policy
_HISTORIES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "a"}],
    [
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ],
)


class Template:
    """Writes what comes between two turns of the policy, as tokens.

    `chat`: prompts are rendered by the tokenizer's chat template; otherwise texts follow each other as they
    are. Raises DataError where the template does not write a conversation message after message.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_token_id: int,
        chat: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer, self._end, self._tools = tokenizer, end_token_id, list(tools) or None
        self._chat = chat
        added = [str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = re.compile(
            "|".join(map(re.escape, {*added, *tokenizer.all_special_tokens} - {""})) or "(?!)"
        )
        if tools and not chat:
            raise DataError("rollout.conversation.tools need a chat template, which tells the policy of them")
        if chat:
            self._check("tool" if tools else "user")

    def text(self, token_ids: Sequence[int]) -> str:
        """A turn of the policy as text, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def given(self, last: int, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The tokens from a turn's `last` token to the next turn's first. Raises DataError.

        A special token that a message spells is text there (see `_plain`).
        """
        messages = self._plain(messages)
        if not self._chat:
            return self._tokens("".join(message["content"] for message in messages))
        text = self._suffix(_HISTORIES[0], messages)
        end = str(self._tokenizer.convert_ids_to_tokens(self._end))
        if last == self._end:
            text = text.removeprefix(end)
        return self._tokens(text)

    def opening(self, messages: Sequence[Mapping[str, Any]], prompt: Prompt) -> tuple[int, ...]:
        """The tokens of a whole chat up to the policy's next turn. Raises DataError.

        Without a chat template, a chat that begins with the prompt's text begins with the prompt's tokens.
        """
        if self._chat:
            try:
                return self._tokens(self._render(self._plain(messages), True))
            except Exception as error:  # a template is a program, and may fail in any way
                raise DataError(f"the chat template refuses a conversation: {error}") from None
        text = "".join(message["content"] for message in messages)
        if text.startswith(prompt.text):
            return prompt.token_ids + self._tokens(text[len(prompt.text) :])
        return tuple(self._tokenizer(text)["input_ids"])

    def _plain(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with a space in every special token that they spell.

        Otherwise a web page that a tool fetched could end its message and begin another one in any role.
        """
        return [
            {**m, "content": self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", m["content"])}
            for m in messages
        ]

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _suffix(self, history: Sequence[Mapping[str, str]], messages: Sequence[Mapping[str, Any]]) -> str:
        """The text after a turn of the policy: its end token, the messages, its next turn's opening.

        Raises DataError.
        """
        said = [*history, {"role": "assistant", "content": _SAID}]
        try:
            before = self._render(said, False)
            text = self._render([*said, *messages], True)
        except Exception as error:  # a template is a program, and may fail in any way
            raise DataError(f"the chat template refuses a conversation: {error}") from None
        place = before.rfind(_SAID)
        if place < 0 or not text.startswith(before[: place + len(_SAID)]):
            raise DataError(
                "the chat template changes earlier messages when later ones come, so a conversation cannot "
                "be continued token by token: use another template, or data.chat_template=false"
            )
        return text[place + len(_SAID) :]

    def _render(self, messages: Sequence[Mapping[str, Any]], generate: bool) -> str:
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=self._tools,
            tokenize=False,
            add_generation_prompt=generate,
        )
        return str(rendered)

    def _check(self, role: str) -> None:
        """Raises DataError where the suffix depends on what was said before, or lacks the end token."""
        message = {"role": role, "name": "x", "content": "e"}
        suffixes = {self._suffix(history, [message]) for history in _HISTORIES}
        end = str(self._tokenizer.convert_ids_to_tokens(self._end))
        if len(suffixes) > 1:
            raise DataError(
                f"the chat template writes a message of role {role} differently after different histories: "
                "use another template, or data.chat_template=false"
            )
        [suffix] = suffixes
        if not suffix.startswith(end):
            raise DataError(
                f"the chat template ends a turn with {suffix[:20]!r}, and the policy ends its turns with "
                f"the tokenizer's end token {end!r}: name the former as eos_token in tokenizer_config.json"
            )
        if self._tokens(suffix)[:1] != (self._end,):
            raise DataError(f"the tokenizer does not write {end!r} as its end token, {self._end}")
