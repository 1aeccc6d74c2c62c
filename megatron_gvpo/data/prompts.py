"""Prompts from a data set's records: rendered by the chat template, tokenised, checked before training."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from functools import partial
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megatron_gvpo.core.environment import is_first_process
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.core.slow_work import slow_work
from megatron_gvpo.data.demonstrations import DemonstrationReader
from megatron_gvpo.data.known_forms import as_dataset, recogniser, solution_field, unread_system
from megatron_gvpo.data.messages import check_roles, not_a_message, not_a_prompt, shown_value
from megatron_gvpo.data.opened_thoughts import OpenedThoughts
from megatron_gvpo.data.prompt_images import MARK, PromptImages, as_parts, images_in, short_names
from megatron_gvpo.data.record_tools import tools_of, unread_tools
from megatron_gvpo.data.scored_responses import scored_responses
from megatron_gvpo.data.sources import Record, converted, field_of, read_records
from megatron_gvpo.data.tool_calls import with_values
from megatron_gvpo.data.turn_writer import TurnWriter
from megatron_gvpo.data.unknown_characters import UnknownCharacters
from megatron_gvpo.groups import Chat, Image, Prompt, Scored
from megatron_gvpo.huggingface.tokenizer import check_writes_content, opened, rendered
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["DataError", "PromptWriter", "load_prompts"]

log = logging.getLogger(__name__)
_AT_ONCE = 1024  # records tokenised in one call


class Prompts(list[Prompt]):
    """The prompts of a data set, and how many of its records were dropped because they are too long."""

    dropped = 0


def load_prompts(
    dataset: DatasetConfig,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    longest: int,
    end_token_ids: Sequence[int],
    positions: int | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    images: PromptImages | None = None,
    sampler: str = "engine",
) -> Prompts:
    """All prompts of a data set, in the order of its records.

    `sampler`: `algorithm.sampler`; in records of a known form, its fields are found without a key.

    With `data.chat_template` and a tokenizer that has one, a plain string becomes a user message, and
    `data.system_prompt` comes first unless the record has a system message of its own. A prompt has at most
    `longest` tokens; `data.prompt_too_long` says what happens to longer ones. Demonstrations end with the
    first of `end_token_ids` unless they end with one, and together with their prompt they must fit into the
    model's `positions` tokens. `tools`: JSON schemas for the chat template. `images`: of a model that takes
    images. A prompt's tokens include those that stand for its images. Raises DataError.
    """
    recognise = recogniser(dataset, sampler)
    dataset = as_dataset(dataset, sampler)
    render = _Renderer(data, tokenizer, tools, images, dataset.tools_key)
    reader = _PromptReader(dataset, data, tokenizer, render, longest, end_token_ids, positions, tools)
    prompts = Prompts()
    records = pictured = equipped = 0
    for record, text, ids, pictures in _encoded(dataset, recognise, render, tokenizer):
        records += 1
        pictured += bool(pictures)
        equipped += bool(dataset.tools_key is not None and record.fields.get(dataset.tools_key))
        if (prompt := reader.read(record, text, ids, pictures)) is not None:
            prompts.append(prompt)
    _check_records(dataset, records, pictured, equipped)
    if not prompts:
        raise DataError(
            f"{dataset.path}: every prompt is longer than data.max_prompt_tokens={longest} tokens"
        )
    prompts.dropped = records - len(prompts)
    if is_first_process():
        if prompts.dropped:
            log.warning(
                f"{dataset.path}: dropped {prompts.dropped} of {records} prompts, longer than "
                f"data.max_prompt_tokens={longest}"
            )
        for warning in (*reader.warnings(), *_template_warnings(render, tokenizer, prompts[0])):
            log.warning(warning)
    return prompts


def _template_warnings(
    render: _Renderer, tokenizer: PreTrainedTokenizerBase, prompt: Prompt
) -> Iterator[str]:
    """Yield warnings about parts of one prompt that the chat template leaves out or the model cannot read."""
    if render.leaves_tools_out():
        yield (
            "rollout.conversation: the chat template writes nothing of the tools, so that the policy is not "
            "told of them: name them in data.system_prompt, unless it has learned to call them"
        )
    if render.chat and (broken := broken_marks(tokenizer, prompt.text)):
        yield (
            f"the chat template writes {', '.join(broken)}, which the tokenizer has no token for: the model "
            "reads it as text, or not at all. It is the template of another model, or its tokens are missing"
        )


def _check_records(dataset: DatasetConfig, records: int, pictured: int, equipped: int) -> None:
    """Raises DataError for no records, and for images_key or tools_key if none of them has any."""
    if not records:
        left_out = f" that convert={dataset.convert} does not leave out" if dataset.convert else ""
        raise DataError(f"{dataset.path}: no records{left_out}")
    if dataset.images_key is not None and not pictured:
        raise DataError(
            f"{dataset.path}: no record has an image in the field {dataset.images_key!r} (images_key): name "
            "the field that has, or leave it out"
        )
    if dataset.tools_key is not None and not equipped:
        raise DataError(
            f"{dataset.path}: no record has tools in the field {dataset.tools_key!r} (tools_key): name the "
            "field that has, or leave it out"
        )


def broken_marks(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The marks like <|im_start|> in a rendered prompt that are not tokens of the tokenizer."""
    marks = dict.fromkeys(re.findall(r"<\|[^|<>\s]{1,40}\|>", text))
    return [mark for mark in marks if len(tokenizer(mark, add_special_tokens=False)["input_ids"]) != 1]


class _PromptReader:
    """Makes a prompt of each record, with its answer, demonstration and scored responses, all checked."""

    def __init__(
        self,
        dataset: DatasetConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        render: _Renderer,
        longest: int,
        end_token_ids: Sequence[int],
        positions: int | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        self._dataset, self._data = dataset, data
        self._turn_writer = TurnWriter(tokenizer, render.chat, tools)
        self._longest, self._end_token_ids, self._positions = longest, end_token_ids, positions
        self._read_demonstration = DemonstrationReader(tokenizer, end_token_ids, render.chat, tools)
        self.unknown = UnknownCharacters(tokenizer)
        self.thoughts = OpenedThoughts()
        self.unread_tools: str | None = None  # a warning, once a record has tools that no key names
        self.unread_system: str | None = None  # another, once a record has a system message that is not shown
        self._shows_tools = not render.chat or bool(tools) or dataset.tools_key is not None

    def read(
        self, record: Record, text: str, ids: Sequence[int], pictures: tuple[Image, ...]
    ) -> Prompt | None:
        """The prompt with this text and these token ids; None if it is too long and may be dropped.

        Raises DataError, which names the record.
        """
        dataset = self._dataset
        self.unknown.see(record.where, [text])
        if not self._shows_tools and self.unread_tools is None:
            self.unread_tools = unread_tools(record)
        if self.unread_system is None:
            self.unread_system = unread_system(record, text)
        if not self._has_room(record, text, ids):
            return None
        answer = None if dataset.answer_key is None else _answer(record, dataset.answer_key)
        demonstration: tuple[int, ...] | None = None
        chat: Chat | None = None
        if dataset.demonstration_key is not None:
            demonstration, chat = self._demonstration(
                record, dataset.demonstration_key, text, ids, bool(pictures)
            )
        responses: tuple[Scored, ...] = ()
        if dataset.responses_key is not None:
            responses = self._responses(record, dataset.responses_key, text, ids)
        fields = record.fields
        if dataset.images_key is None and MARK in text and (names := {"image", "images"} & fields.keys()):
            raise DataError(
                f"{record.where}: the prompt has {MARK}, and no key names the images: the record has the "
                f"field {min(names)!r}; set images_key={min(names)}, or remove the mark (data.train.convert)"
            )
        if dataset.images_key is not None:
            fields = short_names(fields, dataset.images_key, pictures)
        return Prompt(
            record.id,
            tuple(ids),
            text,
            answer,
            demonstration,
            fields,
            responses,
            pictures,
            chat,
            dataset.prompt_key,
        )

    def warnings(self) -> list[str]:
        """Warnings about the records so far: fields that nothing reads, unknown characters, open thoughts."""
        texts = self.unread_tools, self.unread_system, self.unknown.warning(), self.thoughts.warning()
        return [text for text in texts if text is not None]

    def _has_room(self, record: Record, text: str, ids: Sequence[int]) -> bool:
        """Return False for a prompt that is to be dropped.

        Raises DataError for one that is empty, or too long and not dropped.
        """
        if not ids:
            problem = f"the tokenizer knows none of {shown_value(text)}" if text else "it has no tokens"
            raise DataError(f"{record.where}: the prompt is empty: {problem}")
        if len(ids) <= self._longest:
            return True
        if self._data.prompt_too_long == "drop":
            return False
        limit = _too_long(self._data, self._longest)
        raise DataError(f"{record.where}: the prompt has {len(ids)} tokens, {limit}")

    def _demonstration(
        self, record: Record, key: str, prompt: str, ids: Sequence[int], has_pictures: bool
    ) -> tuple[tuple[int, ...], Chat | None]:
        """The token ids of the worked solution in field `key`, and its chat, where it is one."""
        value, key = field_of(record, key, "demonstration_key"), solution_field(key, record.fields)
        try:
            solution = self._read_demonstration(value)
        except DataError as error:
            raise DataError(f"{record.where}: the demonstration (field {key!r}) {error}") from None
        self.unknown.see(record.where, solution.texts)
        chat = solution.chat
        self.thoughts.see(record.where, prompt, solution.turns)
        if chat is not None and has_pictures:
            raise DataError(
                f"{record.where}: the demonstration (field {key!r}) is a chat, and the prompt has images: "
                "conversations with images are not supported"
            )
        length = len(solution.token_ids) + (len(chat.observation_tokens) if chat is not None else 0)
        if self._positions and len(ids) + length > self._positions:
            raise DataError(
                f"{record.where}: the prompt has {len(ids)} tokens and its demonstration {length} (field "
                f"{key!r}), together more than the model's max_position_embeddings={self._positions}; "
                "shorten or remove the record"
            )
        return solution.token_ids, chat

    def _responses(self, record: Record, key: str, prompt: str, ids: Sequence[int]) -> tuple[Scored, ...]:
        """The scored responses in field `key`."""
        texts, responses = scored_responses(record, key, self._turn_writer, self._end_token_ids)
        self.unknown.see(record.where, texts)
        self.thoughts.see(record.where, prompt, texts)
        longest = max(len(response.token_ids) for response in responses)
        if self._positions and len(ids) + longest > self._positions:
            raise DataError(
                f"{record.where}: the prompt has {len(ids)} tokens and its longest response {longest} "
                f"(field {key!r}), together more than the model's "
                f"max_position_embeddings={self._positions}; shorten or remove it"
            )
        return responses


def _encoded(
    dataset: DatasetConfig,
    recognise: Callable[[Record], Record],
    render: _Renderer,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[tuple[Record, str, list[int], tuple[Image, ...]]]:
    """The records of a data set, each with its prompt as text and as tokens, and its images."""
    done = 0
    pictures_of = _reader(dataset, render)
    records = _records(dataset, recognise)
    with slow_work(f"reading {dataset.path}") as now, ThreadPoolExecutor() as pool:
        for some in batched(records, _AT_ONCE):
            now(f"{done} records so far, tokenising {len(some)} more")
            pictures = list(pool.map(pictures_of, some))
            texts = [
                render(record, field_of(record, dataset.prompt_key), len(images))
                for record, images in zip(some, pictures, strict=True)
            ]
            # A chat template writes the special tokens itself.
            encoded = _tokens(tokenizer, texts, [r.where for r in some], special=not render.chat)
            encoded = [
                render.expanded(ids, images, record.where)
                for record, ids, images in zip(some, encoded, pictures, strict=True)
            ]
            yield from zip(some, texts, encoded, pictures, strict=True)
            done += len(some)
            now(f"{done} records so far")


def _reader(dataset: DatasetConfig, render: _Renderer) -> Callable[[Record], tuple[Image, ...]]:
    """A function that reads a record's images. Raises DataError if the model takes none."""
    key, images = dataset.images_key, render.images
    if key is None:
        return lambda _: ()
    if images is None:
        raise DataError(f"{dataset.path}: images_key={key}, and the model takes no images: leave it out")
    directory = Path(dataset.path) if Path(dataset.path).is_dir() else Path(dataset.path).parent
    return partial(images.of, key=key, directory=directory)


def _records(dataset: DatasetConfig, recognise: Callable[[Record], Record]) -> Iterator[Record]:
    """The records of a data set, converted by the user's function, or recognised."""
    count = left_out = 0
    for record in read_records(dataset.path, dataset.split, dataset.subset, dataset.limit):
        count += 1
        if dataset.convert is None:
            yield recognise(record)
        elif (changed := converted(record, dataset.convert)) is not None:
            yield changed
        else:
            left_out += 1
    if left_out and is_first_process():
        log.warning(f"{dataset.path}: convert={dataset.convert} left out {left_out} of {count} records")


def _tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], sources: Sequence[str], special: bool = False
) -> list[list[int]]:
    """The token ids of each text; if `special`, with the special tokens that begin a text.

    `sources`: where each text comes from. Raises DataError, which names it, for a text that the tokenizer
    refuses.
    """
    try:
        if special:
            return opened(tokenizer, texts)
        ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return ids
    except Exception as error:  # the library raises bare Exceptions
        if len(texts) > 1:  # find the text that fails
            pairs = zip(texts, sources, strict=True)
            return [_tokens(tokenizer, [text], [source], special)[0] for text, source in pairs]
        raise DataError(
            f"{sources[0]}: the tokenizer cannot write {shown_value(texts[0])}: {error}"
        ) from None


def _too_long(data: DataConfig, longest: int) -> str:
    limit = f"more than data.max_prompt_tokens={longest}; raise it"
    if data.max_prompt_tokens is None:
        limit = f"and the longest response leaves {longest} of the model's: lower rollout.max_tokens"
    return f"{limit}, or drop such prompts with data.prompt_too_long=drop"


class PromptWriter:
    """Writes prompts with text added to the user's message, rendered and tokenised like the others."""

    def __init__(
        self,
        dataset: DatasetConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        longest: int,
        tools: Sequence[Mapping[str, Any]] = (),
        images: PromptImages | None = None,
    ) -> None:
        self._render = _Renderer(data, tokenizer, tools, images, dataset.tools_key)
        self._tokenizer = tokenizer
        self._turn_writer = TurnWriter(tokenizer, self._render.chat, tools)
        self._key = dataset.prompt_key
        self.longest = longest

    def encode(self, text: str) -> list[int]:
        """Token ids, without the tokenizer's special tokens."""
        ids: list[int] = self._tokenizer([text], add_special_tokens=False)["input_ids"][0]
        return ids

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """The token ids of a text as the assistant's turn, without an end token. Raises DataError."""
        return self._turn_writer.tokens(self._turn_writer.text(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The tokens as text, without special ones."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @property
    def is_chat(self) -> bool:
        """True if the chat template renders prompts."""
        return self._render.chat

    def text(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of the prompt in the data, and of `messages` after it, up to the policy's next turn.

        Raises DataError for messages that the chat template refuses.
        """
        record = Record(prompt.id, f"prompt {prompt.id}", prompt.record)
        content = field_of(record, self._key)
        if messages and self.is_chat:
            first = content if isinstance(content, list) else [{"role": "user", "content": content}]
            content = [*first, *messages]
        text = self._render(record, content, len(prompt.images))
        return text if self.is_chat else text + "".join(str(message["content"]) for message in messages)

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of prompts' texts. Raises DataError for one that the tokenizer refuses."""
        sources = [f"text {i}" for i in range(len(texts))]
        return _tokens(self._tokenizer, texts, sources, special=not self._render.chat)

    def extended(self, prompt: Prompt, text: str, *, before: bool = False) -> Prompt | None:
        """The prompt with `text` after the last user message (or the plain prompt), or `before` it.

        Returns None if the prompt then has more than `longest` tokens, or if `text` itself has the mark of an
        image.
        """
        if self._render.images is not None and self._render.images.is_in(text):
            return None

        def with_text(content: str) -> str:
            return text + content if before else content + text

        record = Record(prompt.id, f"prompt {prompt.id}", prompt.record)
        content = field_of(record, self._key)
        if isinstance(content, str):
            content = with_text(content)
        else:
            last = max((i for i, m in enumerate(content) if m["role"] == "user"), default=len(content) - 1)
            content = [
                {**m, "content": _changed(m["content"], with_text, before)} if i == last else m
                for i, m in enumerate(content)
            ]
        text = self._render(record, content, len(prompt.images))
        [ids] = _tokens(self._tokenizer, [text], [record.where], special=not self._render.chat)
        ids = self._render.expanded(ids, prompt.images, record.where)
        if len(ids) > self.longest:
            return None
        return replace(prompt, token_ids=tuple(ids), text=text)


class _Renderer:
    """Renders a record's prompt as the text to tokenise."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] = (),
        images: PromptImages | None = None,
        tools_key: str | None = None,
    ) -> None:
        """`tools`: those of every prompt; `tools_key`: the field with those of a record's own."""
        self._tools, self._tools_key = list(tools) or None, tools_key
        self.images = images
        self.chat = data.chat_template and bool(tokenizer.chat_template)
        self._tokenizer = tokenizer
        self._system = data.system_prompt
        self._no_chat = (
            "the tokenizer has no chat template (chat_template.jinja in model.path)"
            if data.chat_template
            else "data.chat_template is false"
        )
        if self.chat:
            check_writes_content(tokenizer)
        if self._system and not self.chat:
            raise DataError(f"data.system_prompt needs a chat template, but {self._no_chat}")
        if tools_key is not None and not self.chat:
            raise DataError(f"tools_key={tools_key} needs a chat template, but {self._no_chat}")

    def leaves_tools_out(self) -> bool:
        """True if there are tools but the chat template ignores them."""
        if not self.chat or self._tools is None:
            return False
        chat = [{"role": "user", "content": "?"}]
        try:
            return rendered(self._tokenizer, chat, tools=self._tools) == rendered(self._tokenizer, chat)
        except Exception:  # a template that refuses such a chat: its error comes with the first prompt
            return False

    def expanded(self, ids: list[int], pictures: Sequence[Image], where: str) -> list[int]:
        """Token ids with as many placeholders for every image as it has tokens. Raises DataError."""
        return ids if self.images is None else self.images.expanded(ids, pictures, where)

    def __call__(self, record: Record, prompt: Any, pictures: int = 0) -> str:
        """The text of a record's prompt, with placeholders for `pictures` images. Raises DataError."""
        try:
            return self._rendered(record, prompt, pictures)
        except DataError:
            raise
        except ValueError as error:
            raise DataError(f"{record.where}: {error}") from None

    def _is_message(self, message: Any) -> bool:
        return not_a_message(message, self.images is not None) is None

    def _rendered(self, record: Record, prompt: Any, pictures: int) -> str:
        if not self.chat:
            return self._plain(record, prompt, pictures)
        messages = self._messages(record, prompt, pictures)
        if self._system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        return self._by_template(record, messages)

    def _plain(self, record: Record, prompt: Any, pictures: int) -> str:
        """The text of a prompt that is not rendered by a chat template."""
        if isinstance(prompt, list) and prompt and all(map(self._is_message, prompt)):
            raise DataError(f"{record.where}: the prompt is a list of chat messages, but {self._no_chat}")
        if not isinstance(prompt, str):
            raise DataError(f"{record.where}: the prompt is not a string but {shown_value(prompt)}")
        if not prompt.strip() and prompt and not pictures:
            raise DataError(f"{record.where}: the prompt is empty: it has only white space")
        return prompt if self.images is None else self.images.in_text(prompt, pictures)

    def _messages(self, record: Record, prompt: Any, pictures: int) -> list[Any]:
        """The chat messages of a prompt: its own, or one message of the user."""
        if isinstance(prompt, str):
            content = prompt if self.images is None else as_parts(prompt, pictures)
            messages: Any = [{"role": "user", "content": content}]
        else:
            messages = prompt
        if not isinstance(messages, list) or not messages or not all(map(self._is_message, messages)):
            raise DataError(f"{record.where}: {not_a_prompt(prompt, self.images is not None)}")
        if (parts := images_in(messages)) != pictures:
            raise DataError(
                f"{record.where}: the messages have {parts} parts of type image, and {pictures} images"
            )
        if not pictures and not any(str(message["content"]).strip() for message in messages):
            raise DataError(f"{record.where}: the prompt is empty: no message has any text")
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{record.where}: the prompt ends with a message of the assistant, and the response would be "
                "another one: end it before that message (data.train.convert names a function that does)"
            )
        try:
            check_roles(messages, self._tokenizer)
        except DataError as error:
            raise DataError(f"{record.where}: {error}") from None
        return messages

    def _by_template(self, record: Record, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that the chat template writes."""
        tools = self._tools if self._tools_key is None else tools_of(record, self._tools_key)
        try:
            try:
                return self._written([*map(with_values, messages)], tools)
            except Exception:  # a template may take the arguments of calls as text
                return self._written(messages, tools)
        except Exception as error:  # a template is a program, and may fail in any way
            problem = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            problem = " ".join(problem.split())
            raise DataError(f"{record.where}: the chat template refuses the prompt: {problem}") from None

    def _written(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> str:
        return rendered(self._tokenizer, messages, tools=tools, add_generation_prompt=True)


def _changed(content: Any, with_text: Callable[[str], str], before: bool) -> Any:
    """A message's content with text added to it, or to its first or last part."""
    if isinstance(content, str):
        return with_text(content)
    added = {"type": "text", "text": with_text("")}
    return [added, *content] if before else [*content, added]


def _answer(record: Record, key: str) -> str:
    value = field_of(record, key, "answer_key")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{record.where}: field {key!r} is {value}, which is not an answer")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(
            f"{record.where}: field {key!r} is neither a string nor a number but {shown_value(value)}"
        )
    if isinstance(value, float):  # 3 for 3.0, as pandas has whole numbers beside nulls; 0.00001 for 1e-05
        return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")
    return str(value)
