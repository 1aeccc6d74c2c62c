"""A warning about characters of the data that the tokenizer cannot write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SHOWN = 5  # the most characters that a warning names


class UnknownCharacters:
    """Finds the characters of texts for which a tokenizer has no token.

    The tokenizer leaves them out, or writes its unknown token for them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._first: dict[str, tuple[str, str]] = {}  # by character: the first record and text that has it

    def see(self, where: str, texts: Iterable[str]) -> None:
        """Collect the characters of texts; `where`: the record that has them."""
        for text in texts:
            for character in set(text) - self._first.keys():
                self._first[character] = (where, text)

    def warning(self) -> str | None:
        """A warning that names the first record and the characters.

        None if all are known, or the tokenizer cannot tell.
        """
        if not self._tokenizer.is_fast:  # a slow tokenizer does not report where tokens are in the text
            return None
        seen = [c for c in self._first if not c.isspace()]
        try:
            alone = self._tokenizer(seen, add_special_tokens=False)["input_ids"] if seen else []
        except Exception:  # the library raises bare Exceptions, and drops no character it cannot write
            return None
        unknown = self._unknown
        suspects = [c for c, ids in zip(seen, alone, strict=True) if set(ids) <= {unknown}]
        missing = [c for c in suspects if not self._has_token(c)]
        if not missing:
            return None
        named = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in missing[:SHOWN])
        more = f" and for {len(missing) - SHOWN} other characters" if len(missing) > SHOWN else ""
        how = "leaves them out" if unknown is None else f"writes {self._tokenizer.decode([unknown])} for them"
        return f"{self._first[missing[0]][0]}: the tokenizer has no token for {named}{more}, and {how}"

    @property
    def _unknown(self) -> int | None:
        """The id of the token for unknown characters, which may be named in tokenizer.json alone."""
        backend = self._tokenizer.backend_tokenizer
        named = self._tokenizer.unk_token or getattr(backend.model, "unk_token", None)
        token: int | None = backend.token_to_id(named) if named else None
        return token

    def _has_token(self, character: str) -> bool:
        """True if a known token, such as a word, contains the character in the first text that has it."""
        text = self._first[character][1]
        index = text.index(character)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return any(
            first <= index < end and token != self._unknown
            for token, (first, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        )
