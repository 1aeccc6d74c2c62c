"""The supports of sampled tokens: the part of the vocabulary that top-p, top-k and min-p left.

Programs that only watch a run import this file, too, so the methods that need numpy import it themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Support(NamedTuple):
    """The supports of a response's tokens.

    `counts` has the number of members for each token, 0 where it was sampled from the whole vocabulary;
    `ids` has the members' token ids, token after token. Both are int32, little-endian: 4 bytes a token and 4
    a member.
    """

    counts: bytes
    ids: bytes

    @staticmethod
    def of(members: Sequence[Sequence[int]]) -> Support:
        """The supports with these members, one a token.

        Raises TypeError, ValueError or OverflowError for members that are not integers of 32 bits.
        """
        import numpy as np

        ids = [np.asarray(of_token) for of_token in members if len(of_token)]
        if any(array.dtype.kind not in "iu" or array.ndim != 1 for array in ids):
            raise TypeError("members of a support that are not token ids")
        flat = np.concatenate(ids) if ids else np.zeros(0, np.int64)
        if len(flat) and not 0 <= flat.min() <= flat.max() < 2**31:
            raise ValueError("members of a support that are not token ids")
        return Support(np.array([*map(len, members)], "<i4").tobytes(), flat.astype("<i4").tobytes())

    @staticmethod
    def whole_vocabulary(tokens: int) -> Support:
        """The supports of tokens that were sampled without truncation."""
        return Support(bytes(4 * tokens), b"")

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(number of members of each token's support [tokens], members of all of them [k]), int64."""
        import numpy as np

        counts, ids = (np.frombuffer(data, "<i4").astype(np.int64) for data in self)
        return counts, ids

    def parts(self, spans: Iterable[tuple[int, int]]) -> Support:
        """The supports of the tokens of some spans; a span (begin, end) leaves out the token at `end`."""
        import numpy as np

        offsets = np.concatenate(([0], np.cumsum(self.arrays[0])))
        cut = [(begin, end) for begin, end in spans]
        return Support(
            b"".join(self.counts[4 * begin : 4 * end] for begin, end in cut),
            b"".join(self.ids[4 * offsets[begin] : 4 * offsets[end]] for begin, end in cut),
        )

    def then(self, other: Support) -> Support:
        """The supports of these tokens, and of `other`'s after them."""
        return Support(self.counts + other.counts, self.ids + other.ids)

    def problem(self, token_ids: Sequence[int]) -> str | None:
        """The reason why these are not supports of the tokens, or None: each support must have its token."""
        import numpy as np

        counts, ids = self.arrays
        if len(counts) != len(token_ids):
            return f"supports of {len(counts)} tokens for {len(token_ids)} tokens: want one a token"
        if (counts < 0).any() or counts.sum() != len(ids):
            return f"supports with {len(ids)} members in all, and counts that add up to {counts.sum()}"
        row_k = np.repeat(np.arange(len(counts)), counts)
        has_token = counts == 0
        has_token[row_k[ids == np.asarray(token_ids, np.int64)[row_k]]] = True
        if not has_token.all():
            position = int(has_token.argmin())
            return (
                f"token {token_ids[position]}, number {position}, is not in the support it was sampled from"
            )
        return None
