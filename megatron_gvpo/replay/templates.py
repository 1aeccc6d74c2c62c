"""The prompts that an engine would see if it rendered the run's chats by another chat template."""

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
    after: str  # the text after the content, with the generation prompt, which opens the policy's turn
    unopened: str  # the text after the content without the generation prompt

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, system: str | None) -> Around | None:
        """Render a chat; returns None if the template refuses it or does not write its content unchanged."""
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

    A rollout file has the tokens of a prompt, but not its messages. So only the text that the template writes
    around a user's message, and the configuration's system prompt, are removed or added.
    """

    tokenizer: PreTrainedTokenizerBase
    own: Around | None  # the text around the run's own prompts; None if no template renders them
    plain: Around | None  # without the configuration's system prompt

    @staticmethod
    def of(config: Config) -> OtherTemplates:
        """Return the templates of a run. Raises DataError if its tokenizer cannot be read."""
        data, tokenizer = config.data, load_tokenizer(config.model.path, config.model.trust_remote_code)
        if not tokenizer.chat_template:
            return OtherTemplates(tokenizer, None, None)
        set_template_variables(tokenizer, data.chat_template_kwargs)
        own = Around.of(tokenizer, data.system_prompt) if data.chat_template else None
        return OtherTemplates(tokenizer, own, Around.of(tokenizer, None))

    def prompts(self, prompt_ids: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """Yield each fault and the tokens that the prompt would have with it, where the text allows it."""
        text = str(self.tokenizer.decode(list(prompt_ids)))
        if self._ids(text) != list(prompt_ids):
            return  # the text does not determine these tokens, so another text would not either
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
        except Exception as error:  # the tokenizers library raises plain Exception
            raise DataError(f"the tokenizer cannot write {text[:60]!r}: {error}") from None
