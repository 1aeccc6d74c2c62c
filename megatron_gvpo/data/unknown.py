"""Finds characters that a tokenizer has no token for, which it leaves out or writes as its unknown token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 5  # characters named in a warning


class UnknownCharacters:
    """Collects texts and their places, then says which characters the tokenizer does not know."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._first: dict[str, tuple[str, str]] = {}  # a character's first text, and the text's place

    def see(self, where: str, texts: Iterable[str]) -> None:
        for text in texts:
            for character in set(text) - self._first.keys():
                self._first[character] = (where, text)

    def warning(self) -> str | None:
        """The first place and the characters; None if all are known, or the tokenizer cannot tell."""
        if not self._tokenizer.is_fast:  # a slow one does not tell where its tokens are in the text
            return None
        seen = [c for c in self._first if not c.isspace()]
        try:
            alone = self._tokenizer(seen, add_special_tokens=False)["input_ids"] if seen else []
        except Exception:  # tokenizers raises no narrower one; what it cannot write it does not leave out
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
        found: int | None = backend.token_to_id(named) if named else None
        return found

    def _has_token(self, character: str) -> bool:
        """True if the character is a part of a known token in its first text, such as of a known word."""
        text = self._first[character][1]
        place = text.index(character)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return any(
            first <= place < end and token != self._unknown
            for token, (first, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        )
