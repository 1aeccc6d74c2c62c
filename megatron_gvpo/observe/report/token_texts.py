"""Splits a response's text into the pieces that its tokens stand for, so that a page can colour them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNFINISHED = "\ufffd"  # decoders write it for a token that holds part of a character


class TokenTexts:
    """The texts of tokens, by the tokenizer of the run's model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # Some decoders drop the space of a text's first token, so each token is decoded after this one.
        self._before = 0
        self._text_before = self._decode([self._before])

    @classmethod
    def of_run(cls, directory: Path, model: str | None, began_in: str | None) -> TokenTexts | None:
        """The tokenizer in `directory`/hf, or in the run's model.path; None if neither has one.

        `began_in`: the directory in which the run was started, which a relative model.path refers to.
        """
        from tokenizers import Tokenizer

        folders = [directory / "hf"]
        if model is not None:
            folders += [Path(began_in or ".", model).expanduser(), Path(model).expanduser()]
        for folder in folders:
            try:
                return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))
            # the library raises bare Exceptions for missing and damaged files, and other versions
            except Exception:
                continue
        return None

    def split(self, token_ids: Sequence[int]) -> list[str]:
        """The piece of every token; together they are the text, special tokens included.

        A character whose bytes are spread over several tokens is in the last one's piece.
        """
        pieces = [self._piece(token) for token in token_ids]
        if any(UNFINISHED in piece for piece in pieces):
            return self._in_context(token_ids)
        return pieces

    def _piece(self, token: int) -> str:
        if (piece := self._known.get(token)) is None:
            piece = self._decode([self._before, token]).removeprefix(self._text_before)
            self._known[token] = piece
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _in_context(self, token_ids: Sequence[int]) -> list[str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        pieces = [stream.step(self._tokenizer, token) or "" for token in token_ids]
        known, decoded = "".join(pieces), self._decode(token_ids)
        if decoded.startswith(known):
            pieces[-1] += decoded[len(known) :]  # an incomplete last character
        return pieces
