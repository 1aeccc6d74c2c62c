"""A data set's records as prompts: chat template applied, tokenised, checked before anything is trained."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megatron_gvpo.config import DataConfig, DatasetConfig
from megatron_gvpo.data.sources import DataError, Record, read_records
from megatron_gvpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataError", "load_prompts"]

log = logging.getLogger(__name__)


def load_prompts(
    dataset: DatasetConfig,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_token_id: int,
    positions: int | None = None,
) -> list[Prompt]:
    """All prompts of a data set, in the order of its records.

    With `data.chat_template` and a tokenizer that has one, a plain string becomes a user message, and
    `data.system_prompt` comes first unless the record has a system message of its own. Demonstrations
    end with `end_token_id`, and with their prompt they must fit into `positions` tokens, the model's. Raises
    DataError.
    """
    render = _Renderer(data, tokenizer)
    records = list(islice(read_records(dataset.path, dataset.split), dataset.limit))
    if not records:
        raise DataError(f"{dataset.path}: no records")
    texts = [render(record, _field(record, dataset.prompt_key)) for record in records]
    # A chat template writes the special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=not render.chat)["input_ids"]

    prompts = []
    for record, text, ids in zip(records, texts, encoded, strict=True):
        if not ids:
            raise DataError(f"{record.where}: the prompt is empty: it has no tokens")
        if len(ids) > data.max_prompt_tokens:
            if data.prompt_too_long == "drop":
                continue
            raise DataError(
                f"{record.where}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens="
                f"{data.max_prompt_tokens}; raise it, or drop such prompts with data.prompt_too_long=drop"
            )
        answer = None if dataset.answer_key is None else _answer(record, dataset.answer_key)
        demonstration = None
        if dataset.demonstration_key is not None:
            solution = _string(record, dataset.demonstration_key)
            tokens = tokenizer(solution, add_special_tokens=False)["input_ids"]
            demonstration = (*tokens, *([end_token_id] if tokens[-1:] != [end_token_id] else []))
            if positions and len(ids) + len(demonstration) > positions:
                raise DataError(
                    f"{record.where}: the prompt has {len(ids)} tokens and its demonstration "
                    f"{len(demonstration)} (field {dataset.demonstration_key!r}), together "
                    f"more than the model's max_position_embeddings={positions}; shorten or remove the record"
                )
        prompts.append(Prompt(record.id, tuple(ids), text, answer, demonstration, record.fields))

    if dropped := len(records) - len(prompts):
        log.warning(
            "%s: dropped %d of %d prompts, longer than data.max_prompt_tokens=%d",
            *(dataset.path, dropped, len(records), data.max_prompt_tokens),
        )
    if not prompts:
        raise DataError(f"{dataset.path}: every prompt is longer than {data.max_prompt_tokens} tokens")
    return prompts


class _Renderer:
    """A record's prompt as the text that is tokenised."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.chat = data.chat_template and bool(tokenizer.chat_template)
        self._tokenizer = tokenizer
        self._system = data.system_prompt
        self._no_chat = (
            "the tokenizer has no chat template" if data.chat_template else "data.chat_template is false"
        )
        if self._system and not self.chat:
            raise DataError(f"data.system_prompt needs a chat template, but {self._no_chat}")

    def __call__(self, record: Record, prompt: Any) -> str:
        if not self.chat:
            if isinstance(prompt, list):
                raise DataError(f"{record.where}: the prompt is a list of chat messages, but {self._no_chat}")
            if not isinstance(prompt, str):
                raise DataError(f"{record.where}: the prompt is no string but {_shown(prompt)}")
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise DataError(
                f"{record.where}: the prompt is neither a string nor a list of chat messages like "
                f'{{"role": "user", "content": "..."}} but {_shown(prompt)}'
            )
        if self._system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise DataError(f"{record.where}: the chat template refuses the prompt: {error}") from None
        return str(text)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _field(record: Record, key: str) -> Any:
    value = record.fields.get(key)
    if value is None:
        problem = "is null" if key in record.fields else "is missing"
        raise DataError(f"{record.where}: field {key!r} {problem}; fields there: {', '.join(record.fields)}")
    return value


def _string(record: Record, key: str) -> str:
    value = _field(record, key)
    if not isinstance(value, str):
        raise DataError(f"{record.where}: field {key!r} is no string but {_shown(value)}")
    return value


def _answer(record: Record, key: str) -> str:
    value = _field(record, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{record.where}: field {key!r} is neither a string nor a number but {_shown(value)}")
    return str(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
