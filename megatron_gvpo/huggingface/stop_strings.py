"""Stop strings: a response also ends with the token that completes one of them in its text.

The text is that of the response alone, special tokens included. The tokens stay as they were sampled: the
stop string is a part of the response, and so is what its last token writes after it.

Engines read texts in ways of their own: vLLM token by token, SGLang a few last tokens at a time, which
misses a string that the policy writes in more tokens than the tokenizer would. So they only save tokens, and
the response ends where `StopStrings.end` says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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

        A token writes a byte at least, but for tokens without any text: `end` finds a string with many such
        tokens in it, and `has` of so few tokens may not.
        """
        return max(len(string.encode()) for string in stop) + _WITHOUT_TEXT

    def unwritable(self, stop: Sequence[str]) -> list[str]:
        """Those of the strings that the tokenizer cannot write: no response would end at them."""
        return [string for string in stop if not self.has(self._tokens(string), [string])]

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, token_ids: Sequence[int]) -> str:
        # The clean-up of spaces would change text that was complete before.
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))
