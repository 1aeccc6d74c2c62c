"""The checkpoint's tokenizer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.core.json_files import LFS_POINTER, LFS_REMEDY
from megatron_gvpo.huggingface.bounded_templates import bound_templates

_date = datetime.now()  # the date that chat templates write
# Files that may hold a vocabulary. Without any, transformers (5.19) makes up an empty tokenizer.
_VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")
PROCESSOR = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_FURTHER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*")


def load_tokenizer(
    path: str, trust_remote_code: bool = False, key: str = "model.path"
) -> PreTrainedTokenizerBase:
    """The tokenizer of a local Hugging Face directory. Raises DataError if it is missing or damaged.

    `key`: the configuration's key that names the directory. `trust_remote_code`: run Python files of the
    directory if the tokenizer is defined there.
    """
    for file in (file for pattern in (*_VOCABULARIES, *_FURTHER) for file in Path(path).glob(pattern)):
        if not file.is_file():  # such as a FIFO, which transformers passes over or waits for
            raise DataError(f"{key}={path}: {file.name} there is not a regular file")
        with file.open("rb") as content:
            if content.read(len(LFS_POINTER)) == LFS_POINTER.encode():
                raise DataError(f"{key}={path}: {file.name}: {LFS_REMEDY}")
    if not any(file for pattern in _VOCABULARIES for file in Path(path).glob(pattern)):
        raise DataError(f"{key}={path}: no tokenizer there (tokenizer.json and tokenizer_config.json)")
    bound_templates()
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a damaged file raises errors of many types
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise DataError(
                f"{key}={path}: the tokenizer there is a Python file, which runs only with "
                f"{key.removesuffix('path')}trust_remote_code=true: read it first"
            ) from None
        raise DataError(
            f"{key}={path}: the tokenizer there, or its config.json, cannot be read: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        ) from error
    if not tokenizer.chat_template and (Path(path) / "chat_template.jinja").is_file():
        raise DataError(f"{key}={path}: chat_template.jinja there is empty; remove it to train without one")
    return tokenizer


def write_companions(source: str, trust_remote_code: bool, target: Path) -> None:
    """Write the files beside a model's weights: tokenizer, image processor and generation_config.json.

    `source`: the directory of the model that was trained. Raises DataError, OSError.
    """
    load_tokenizer(source, trust_remote_code).save_pretrained(target)
    for name in (*PROCESSOR, "generation_config.json"):  # the model may lack these files
        if (file := Path(source) / name).is_file():
            shutil.copy(file, target)


def set_date(date: datetime | None) -> None:
    """Set the date that chat templates write, such as that of a resumed run's first start; None: now."""
    global _date
    _date = date or datetime.now()


def end_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a response. Raises DataError if the tokenizer names none."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"model.path={tokenizer.name_or_path}: the tokenizer has no end token; "
            "name it as eos_token in tokenizer_config.json"
        )
    return int(tokenizer.eos_token_id)


# Variables of every chat template that transformers sets itself.
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")


def set_template_variables(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
    """Set variables that the chat template reads, for every chat that this tokenizer writes.

    They are set at the top of the template, so that prompts, conversations and solutions agree. Raises
    DataError for one that the template does not read.
    """
    if not variables:
        return
    key, template = "data.chat_template_kwargs", tokenizer.chat_template
    if not template:
        raise DataError(f"{key}: the tokenizer in {tokenizer.name_or_path} has no chat template")
    texts = template if isinstance(template, Mapping) else {"": template}
    for name in variables:
        if name in _OWN_VARIABLES or not name.isidentifier():
            raise DataError(f"{key}.{name}: not a variable that a configuration may set")
        if not reads_variable(tokenizer, name):
            raise DataError(f"{key}.{name}: the chat template does not read it; leave it out")
    # Jinja writes values of JSON as Python does.
    header = "".join(f"{{%- set {name} = {value!r} -%}}" for name, value in variables.items())
    changed = {name: header + str(text) for name, text in texts.items()}
    tokenizer.chat_template = changed if isinstance(template, Mapping) else changed[""]


def reads_variable(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """True if the chat template, or one of several, has the variable's name in it."""
    template = tokenizer.chat_template or ""
    texts = template.values() if isinstance(template, Mapping) else (template,)
    return any(re.search(rf"\b{re.escape(name)}\b", str(text)) for text in texts)


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any
) -> str:
    """The chat as the chat template writes it. Raises all errors of the template, which is a program.

    A template that writes the date (Llama 3.2, gpt-oss) gets that of this process's start, or of `set_date`:
    otherwise chats that continue after midnight would no longer begin like their prompts.
    """
    if "strftime_now" in str(tokenizer.chat_template):
        options["strftime_now"] = _date.strftime
    chat = [dict(message) for message in messages]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, **options))


def check_writes_content(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises DataError for a chat template that leaves out the user's text: all prompts would be alike.

    If a template refuses the chats of this check, the prompts themselves will show the error.
    """
    try:
        one, other = (rendered(tokenizer, [{"role": "user", "content": text}]) for text in "ab")
    except Exception:  # a template is a program, and may fail in any way
        return
    if one == other:
        raise DataError(
            f"model.path={tokenizer.name_or_path}: the chat template does not write the content of messages, "
            f"so all prompts would be alike, {one[:60]!r}: correct it, or set data.chat_template=false"
        )


def opened(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of prompts, with the special tokens that the tokenizer puts before a text.

    Special tokens that the tokenizer puts after a text, such as an end token, are left out, because they
    would end the prompt.
    """
    encoded = tokenizer(list(texts), return_special_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    return [
        ids[: max((i + 1 for i, added in enumerate(mask) if not added), default=0)] for ids, mask in pairs
    ]
