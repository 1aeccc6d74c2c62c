"""Tokens and stop strings that end a response: the same for every engine, and for texts from the data.

Engines differ in the files they read. vLLM 0.32 stops at the tokenizer's end token and those of
generation_config.json, or of config.json where that file is missing; SGLang 0.5.23 at all of them and at
`_ALWAYS`. The policy's end tokens are the union. Every request names them, and the embedded engine has them.

A response also ends with the token that completes a stop string in its text. The text is that of the response
alone, special tokens included. The tokens stay as they were sampled: the stop string is a part of the
response, and so is the text of its last token after it. Engines search for stop strings differently: vLLM
after every token, SGLang in the last few tokens, so that it misses a string that the policy writes in more
tokens than the tokenizer would. So the engines' stops only save tokens, and `StopStrings.end` decides where
the response ends.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.json_files import read_json_object
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.tokenizer import end_token_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAID = "\u2042said\u2042"  # a message that only the template's probe uses
# SGLang stops at these added tokens, whatever the files say (`attach_additional_stop_token_ids`).
_ALWAYS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")


def end_token_ids(
    path: str,
    card: ModelCard,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int] = (),
    chat: bool = False,
) -> tuple[int, ...]:
    """All tokens at which responses of the model in `path` end; the first ends a text from the data.

    With a `chat` template, the first is the token that the template writes after a message of the policy, if
    sampling stops there; otherwise it is the tokenizer's own. `stop_token_ids`: further tokens, which the
    configuration names. Raises DataError for a tokenizer without an end token; ConfigError, which names the
    file, for values that are not tokens of the model.
    """
    own = end_token_id(tokenizer)
    added = tokenizer.get_added_vocab()
    always = [added[token] for token in _ALWAYS if token in added]
    tokens = (own, *ids_in_files(Path(path), card), *always, *stop_token_ids)
    first = _written(tokenizer, tokens) if chat else None
    return tuple(dict.fromkeys(tokens if first is None else (first, *tokens)))


def ids_in_files(directory: Path, card: ModelCard) -> list[int]:
    """The tokens in `eos_token_id` of generation_config.json and config.json in a model's directory.

    `card`: the model's. Raises ConfigError, which names the file, for values that are not tokens of the
    model.
    """
    config = directory / "config.json"
    text = card.in_file.get("text_config")
    parts = [card.in_file, text] if isinstance(text, dict) else [card.in_file]
    vocabulary = next((part["vocab_size"] for part in parts if "vocab_size" in part), math.inf)
    tokens = [number for part in parts for number in _ids(config, part, vocabulary)]
    recommended = directory / "generation_config.json"
    if recommended.is_file():
        tokens = [*_ids(recommended, read_json_object(recommended), vocabulary), *tokens]
    return list(dict.fromkeys(tokens))


def ended(ids: Sequence[int], end_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens of a response from the data, with the first end token unless they have one."""
    return tuple(ids) if ids and ids[-1] in end_token_ids else (*ids, end_token_ids[0])


def _ids(file: Path, content: Mapping[str, Any], vocabulary: float) -> list[int]:
    value = content.get("eos_token_id")
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    for number in ids:
        if type(number) is not int or not 0 <= number < vocabulary:
            raise ConfigError(
                f"{file}: eos_token_id={value}: {number!r} is not a token of the model, whose config.json "
                f"has vocab_size={vocabulary}: name the tokens at which a response ends, or leave the key out"
            )
    return ids


def _written(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int | None:
    """The token among `ids` that the chat template writes right after a message of the policy."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SAID}]
    # Some templates end a turn by beginning the next one (GLM 4.5), and some the last turn alone (gpt-oss).
    for messages in ([*chat, {"role": "user", "content": "b"}], chat):
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template is a program, and may fail in any way; this one takes no such chat
            continue
        after = text.rpartition(_SAID)[2] if _SAID in text else ""
        first: list[int] = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        if first and first[0] in ids:
            return first[0]
    return None


def other_end(teacher: str, card: ModelCard, end_token_ids: Sequence[int]) -> str | None:
    """A warning if no token that ends the teacher's responses ends the policy's; otherwise None.

    The policy would learn to write that token, and the text after it. A base model and a chat model often
    differ in this. `teacher`, `card`: the teacher's directory and its card; `end_token_ids`: the policy's.
    """
    tokens = ids_in_files(Path(teacher), card)
    if not tokens or set(tokens) & set(end_token_ids):
        return None
    return (
        f"teacher.path={teacher}: its responses end at token {tokens[0]}, and the policy's at "
        f"{', '.join(map(str, end_token_ids))}: it will learn to write {tokens[0]} and to go on. Name it in "
        "rollout.stop_token_ids"
    )


_WITHOUT_TEXT = 8  # tokens without any text that `recent` expects among those of a stop string


class StopStrings:
    """Finds stop strings in the tokens of responses. `stop`, in every method, are the strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def end(self, token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
        """The number of tokens up to and including the first that completes a stop string; None without."""
        if not stop or not self.has(token_ids, stop):
            return None
        counts = range(len(token_ids) + 1)
        return bisect_left(counts, True, key=lambda count: self.has(token_ids[:count], stop))

    def has(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """True if the text of the tokens contains a stop string."""
        text = self._text(token_ids)
        return any(string in text for string in stop)

    @staticmethod
    def recent(stop: Sequence[str]) -> int:
        """The number of last tokens among which a string that was just completed begins.

        A token has at least one byte, except tokens without text. `end` finds a string with many such tokens
        in it, which `has` of so few last tokens may miss.
        """
        return max(len(string.encode()) for string in stop) + _WITHOUT_TEXT

    def unwritable(self, stop: Sequence[str]) -> list[str]:
        """The strings that the tokenizer cannot write, and at which no response would end."""
        return [string for string in stop if not self.has(self._tokens(string), [string])]

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, token_ids: Sequence[int]) -> str:
        # The clean-up of spaces would change text that was complete before.
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))
