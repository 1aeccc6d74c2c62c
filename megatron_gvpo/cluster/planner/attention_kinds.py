"""Sizes of attention that is not plain: latent attention and gated delta nets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net in place of attention (Qwen3-Next; arXiv 2412.06464)."""

    layers: int  # that have it; the others have attention
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens of the convolution

    @property
    def _widths(self) -> tuple[int, int]:
        return self.key_heads * self.key_dim, self.value_heads * self.value_dim

    def split(self, hidden: int) -> int:
        """Parameters of one layer that tensor parallelism splits."""
        keys, values = self._widths
        projections = hidden * (2 * keys + 2 * values + 2 * self.value_heads) + values * hidden
        return projections + (2 * keys + values) * self.kernel + 2 * self.value_heads

    @property
    def replicated(self) -> int:
        """Parameters of one layer that tensor parallelism does not split, besides its norms of the input."""
        return self.value_dim

    @property
    def state(self) -> int:
        """Elements that a rollout engine keeps for one sequence and layer, however long."""
        keys, values = self._widths
        return self.value_heads * self.key_dim * self.value_dim + (2 * keys + values) * self.kernel
