"""Prompts as an engine would get them that renders the run's chats by another template than the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.huggingface.tokenizer import load_tokenizer, rendered, set_template_variables
from megatron_gvpo.settings.config import Config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTENT = "\u2042content\u2042"


@dataclass(frozen=True)
class Around:
    """The text that a chat template writes before and after the content of a user's only message."""

    before: str
    after: str  # with the opening of the policy's turn
    unopened: str  # without it

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, system: str | None) -> Around | None:
        """None for a template that refuses such a chat, or does not write its content as it is."""
        chat = [{"role": "user", "content": _CONTENT}]
        if system is not None:
            chat = [{"role": "system", "content": system}, *chat]
        try:
            texts = [rendered(tokenizer, chat, add_generation_prompt=opens) for opens in (True, False)]
        except Exception:  # a template is a program, and may fail in any way
            return None
        if any(_CONTENT not in text for text in texts):
            return None
        (before, _, after), (_, _, unopened) = (text.rpartition(_CONTENT) for text in texts)
        return Around(before, after, unopened)


@dataclass(frozen=True)
class OtherTemplates:
    """The ways in which an engine may render the prompts of a run by another template.

    A rollout file has the tokens of a prompt, and not its messages. So only what the template writes around a
    user's message is taken away or added, with the system prompt of the configuration.
    """

    tokenizer: PreTrainedTokenizerBase
    own: Around | None  # around the run's own prompts; None: they are not rendered by a template
    plain: Around | None  # without the configuration's system prompt

    @staticmethod
    def of(config: Config) -> OtherTemplates:
        """Raises DataError for a tokenizer that cannot be read."""
        data, tokenizer = config.data, load_tokenizer(config.model.path, config.model.trust_remote_code)
        if not tokenizer.chat_template:
            return OtherTemplates(tokenizer, None, None)
        set_template_variables(tokenizer, data.chat_template_kwargs)
        own = Around.of(tokenizer, data.system_prompt) if data.chat_template else None
        return OtherTemplates(tokenizer, own, Around.of(tokenizer, None))

    def prompts(self, prompt_ids: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """(the difference, the prompt's tokens with it), where the prompt's text shows where it would be."""
        text = str(self.tokenizer.decode(list(prompt_ids)))
        if self._ids(text) != list(prompt_ids):
            return  # tokens that a text does not write, so that no other text tells the engine's
        for detail, other in self._texts(text):
            ids = self._ids(other)
            if ids and other != text:
                yield detail, ids

    def _texts(self, text: str) -> Iterator[tuple[str, str]]:
        own, plain = self.own, self.plain
        if own is None:
            if plain is not None:
                yield "through the tokenizer's chat template", f"{plain.before}{text}{plain.after}"
            return
        has_start, has_end = text.startswith(own.before), text.endswith(own.after)
        if has_start and plain is not None and plain != own:
            yield "without data.system_prompt", plain.before + text.removeprefix(own.before)
        if has_end:
            yield "without the generation prompt", text.removesuffix(own.after) + own.unopened
        if has_start and has_end and len(text) >= len(own.before) + len(own.after):
            yield "without the chat template", text.removeprefix(own.before).removesuffix(own.after)

    def _ids(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # tokenizers raises no narrower one
            raise DataError(f"the tokenizer cannot write {text[:60]!r}: {error}") from None
