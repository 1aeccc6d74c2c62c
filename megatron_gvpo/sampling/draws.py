"""The embedded engine's draws, from the whole vocabulary or the tokens that min-p, top-k and top-p leave."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.supports import Support


class Draws:
    """Draws the tokens of n sequences, and records their supports where `sampling` wants them.

    Every sequence has a random stream of its own, from its entry of `seeds`, with a number for each step.
    """

    def __init__(
        self, sampling: SamplingConfig, seeds: Sequence[tuple[int, int]], steps: int, device: torch.device
    ) -> None:
        self.supports = SupportRecord(len(seeds))
        self._sampling = sampling
        uniform = np.stack([np.random.default_rng(seed).random(steps) for seed in seeds])
        self._uniform_ns = torch.from_numpy(uniform).to(device)

    def next(self, logits: Tensor, sequences: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Draw a token of each of `sequences`, int64 [rows], from logits [rows, vocabulary].

        Returns the tokens, int64 [rows], and their log-probs at the temperature, fp32 [rows]: over the
        supports where these are recorded, otherwise over the whole vocabulary.
        """
        sampling = self._sampling
        logp = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
        p = logp.exp()
        if sampling.truncates:
            is_outside = outside_support(p, sampling)
            p = p.masked_fill(is_outside, 0.0)
            if sampling.wants_support:
                logp = torch.log_softmax(logp.masked_fill(is_outside, -torch.inf), dim=-1)
                self.supports.add(sequences, ~is_outside)
        token = draw(p, self._uniform_ns[sequences, step])
        return token, logp.gather(1, token[:, None]).squeeze(1)


def outside_support(p: Tensor, sampling: SamplingConfig) -> Tensor:
    """True for the tokens that are not to be drawn, bool [rows, vocabulary]; `p` are the probabilities, fp32.

    Min-p comes first, then top-k, then top-p, each among the tokens that the former left, as in vLLM. The
    likeliest token always stays. Of equally likely tokens, any may be left out.
    """
    p = p.masked_fill(p < sampling.min_p * p.amax(-1, keepdim=True), 0.0)
    rising, index = p.sort(-1)
    if sampling.top_k is not None:
        rising[:, : -sampling.top_k] = 0.0
    sums = running_sum(rising)
    is_left_out = sums <= (1 - sampling.top_p) * sums[:, -1:]  # this also excludes tokens of probability 0
    is_left_out[:, -1] = False
    return is_left_out.scatter(-1, index, is_left_out)


_BLOCK = 128  # tokens


def draw(p: Tensor, uniform: Tensor) -> Tensor:
    """One token per row by inverting the distribution function at `uniform`, fp64 in [0, 1).

    `p` fp32 [rows, vocabulary], in any scale; the result is int64 [rows]. A draw finds a block of tokens, and
    then the token within it: on a CPU, running sums over the whole vocabulary take as long as the head's
    product. The running sums are fp64, where fp32 would lose the tail of a large vocabulary.
    """
    columns = p.shape[1]
    padded = F.pad(p, (0, -columns % _BLOCK)) if columns % _BLOCK else p
    blocks = padded.unflatten(1, (-1, _BLOCK))
    block, inside = _at(blocks.sum(-1), uniform)
    within, _ = _at(blocks[torch.arange(len(p), device=p.device), block], inside)
    return (block * _BLOCK + within).clamp(max=columns - 1)  # a token is out of range only if p is NaN


def _at(p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The column at `uniform`, int64 [rows], and where in the column's share it lies, fp64 in [0, 1)."""
    cdf = running_sum(p)
    point = uniform[:, None] * cdf[:, -1:]
    column = torch.searchsorted(cdf, point, right=True).clamp(max=p.shape[1] - 1)
    ends = F.pad(cdf, (1, 0))
    begin, end = ends.gather(1, column), ends.gather(1, column + 1)
    inside = ((point - begin) / (end - begin)).clamp(max=1 - 2**-53)  # rounding may give 1
    return column.squeeze(1), inside.squeeze(1)


def running_sum(p: Tensor) -> Tensor:
    """`p.cumsum(-1)` of [rows, columns] in fp64.

    PyTorch's own is not deterministic on a GPU, and refused there in deterministic runs (2.13).
    """
    refused = p.is_cuda and torch.are_deterministic_algorithms_enabled()
    return running_sum_by_products(p.double()) if refused else p.cumsum(-1, dtype=torch.float64)


def running_sum_by_products(p: Tensor) -> Tensor:
    """`p.cumsum(-1)` by products with a triangle of ones: within blocks of columns, then over the blocks."""
    rows, columns = p.shape
    side = max(1, math.isqrt(columns - 1) + 1)
    blocks = F.pad(p, (0, side * side - columns)).view(rows, side, side)
    ones = torch.ones(side, side, dtype=p.dtype, device=p.device)
    within = blocks @ ones.triu()
    before = within[:, :, -1] @ ones.triu(1)
    return (within + before[:, :, None]).view(rows, -1)[:, :columns].contiguous()


class SupportRecord:
    """Collects the supports of n sequences, a step of all unfinished ones at a time."""

    def __init__(self, n: int) -> None:
        self._n = n
        # (sequences, number of members of each, all members)
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, sequences: Tensor, is_member: Tensor) -> None:
        """Add one token of each of `sequences`, int64 [rows]; `is_member`: bool [rows, vocabulary]."""
        members = is_member.nonzero()[:, 1].to(torch.int32)
        self._steps.append((sequences.cpu(), is_member.sum(1).cpu(), members.cpu()))

    def result(self) -> list[Support | None]:
        """The supports of every sequence's tokens, in the order of its steps; None if none was added."""
        if not self._steps:
            return [None] * self._n
        sequence_t, count_t, ids_k = (torch.cat(parts).numpy() for parts in zip(*self._steps, strict=True))
        by_token = np.argsort(sequence_t, kind="stable")
        by_member = np.argsort(np.repeat(sequence_t, count_t), kind="stable")
        tokens = np.bincount(sequence_t, minlength=self._n)
        members = np.bincount(sequence_t, count_t, minlength=self._n).astype(int)
        counts = np.split(count_t[by_token].astype("<i4"), np.cumsum(tokens)[:-1])
        ids = np.split(ids_k[by_member].astype("<i4"), np.cumsum(members)[:-1])
        return [Support(c.tobytes(), i.tobytes()) for c, i in zip(counts, ids, strict=True)]
