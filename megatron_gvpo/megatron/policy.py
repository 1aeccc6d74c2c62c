"""The policy as the trainer sees it: score rows, take an optimizer update, export weights.

Every rank calls every method with the same rows; the work is shared inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megatron_gvpo.algorithms.base import STEP_START, Loss, Metrics, token_weights
from megatron_gvpo.config import Config
from megatron_gvpo.exchange import all_gather_msgpack
from megatron_gvpo.kernels.linear_logprob import LinearLogprob
from megatron_gvpo.megatron import forward, parallel
from megatron_gvpo.megatron.batch import plan
from megatron_gvpo.megatron.memory import Memory
from megatron_gvpo.megatron.model import build
from megatron_gvpo.megatron.optimizer import Optimizer, Update
from megatron_gvpo.megatron.shadow import Shadow
from megatron_gvpo.types import LossInputs, Rows, Totals


@dataclass(frozen=True)
class UpdateResult:
    """An optimizer update and the loss and metrics it was taken on."""

    update: Update
    metrics: dict[str, float]  # "loss" among them
    logp_r: Tensor | None  # before the update, fp32 [r] on the CPU of every rank; where it was asked for
    head: dict[str, float]  # how the output layer came by its gradient, which depends on the machine


class Policy:
    """A Megatron model, its optimizer and, where the method wants one, its reference weights."""

    def __init__(self, config: Config) -> None:
        deterministic = config.train.deterministic
        parallel.initialize(config.parallel, config.train.seed, deterministic)
        self.model = build(config.model, config.parallel, deterministic)
        self.model.config.finalize_model_grads_func = finalize_model_grads
        updates = config.train.steps * config.train.mini_batches
        self.optimizer = Optimizer(self.model, config.optimizer, config.model, updates)
        self.memory = Memory(self.model, self.optimizer)
        self._loss: Loss = config.algorithm.loss.sized(config.rollout.max_tokens)
        self._budget = config.train.max_tokens_per_micro_batch * config.parallel.cp
        self._temperature = config.rollout.temperature if config.algorithm.sampler == "engine" else 1.0
        self._stash_bytes = config.train.head_stash_mb << 20
        self._shadow_of = next((r for r in self._loss.anchors.values() if r != STEP_START), None)
        self.shadow = Shadow(self.model) if self._shadow_of else None

    def score_reference(self, rows: Rows) -> Tensor:
        """`score` under the weights of the method's fixed or moving reference."""
        assert self.shadow is not None, "the method has no reference of its own"
        with self.shadow.lent():
            return self.score(rows)

    def score(self, rows: Rows, temperature: float | None = None) -> Tensor:
        """Log-probs of the response tokens, without gradient, fp32 [r] on the CPU of every rank.

        `temperature`: default the sampling temperature.
        """
        micro_batches, _ = self._plan(rows, keep_groups=False)

        def keep(_: Rows, output: LinearLogprob) -> tuple[Tensor, Tensor]:
            return output.logp_r.new_zeros(()), output.logp_r.detach()

        scored = forward.run(
            self.model,
            [rows.select(index) for index in micro_batches],
            keep,
            temperature=self._temperature if temperature is None else temperature,
            forward_only=True,
        )
        return _gather(rows, micro_batches, scored)

    def update(self, rows: Rows, *, at_step_start: bool, keep_logp: bool = False) -> UpdateResult:
        """One optimizer update on `rows`, which hold whole groups.

        `at_step_start`: no update has been taken since the step began, so that an anchor at step start is
        the present policy; the rows' columns of such anchors need not be filled. `keep_logp`: return the
        log-probs that the update's own forward found.
        """
        loss, totals = self._loss, Totals.of(rows)
        mine, some_split = self._plan(rows, keep_groups=loss.couples_groups)
        split = (some_split and loss.couples_groups) or loss.couples_step
        rows = self._known_weights(rows, totals, at_step_start, split)

        def share(rows: Rows, output: LinearLogprob) -> tuple[Tensor, Any]:
            logp_r = output.logp_r.detach()
            besides = _head_metrics(rows, output, totals)
            bonus = output.logp_r.new_zeros(())
            if output.entropy_r is not None:
                mean = output.entropy_r.sum() / totals.tokens
                bonus, besides["entropy"] = -loss.entropy_coef * mean, float(mean)
            if split:
                surrogate = output.surrogate
                if surrogate is None:  # the head, which then differentiates entropies, had no weights
                    assert rows.weight_r is not None, "a split group needs its weights before the forward"
                    surrogate = (rows.weight_r * output.logp_r).sum()
                return surrogate + bonus, (logp_r, besides)
            anchored = _anchored(rows, logp_r)
            value, metrics = loss(LossInputs(anchored, output.logp_r, totals))
            trained = value if output.surrogate is None else output.surrogate
            return trained + bonus, (logp_r, _floats({"loss": value + bonus, **metrics}) | besides)

        self.optimizer.zero_grad()
        results = forward.run(
            self.model,
            [rows.select(index) for index in mine],
            share,
            temperature=self._temperature,
            entropy=loss.wants_entropy,
            stash_bytes=self._stash_bytes,
        )
        logp_r = _gather(rows, mine, [found for found, _ in results]) if split or keep_logp else None
        if split:  # the loss and its metrics, too, are defined on whole groups only
            assert logp_r is not None
            value, shares = loss(LossInputs(_anchored(rows, logp_r), logp_r, totals))
            besides = _sum_over_ranks([share for _, share in results] if _owns_results() else [])
            metrics = _floats({"loss": value, **shares}) | besides
            if loss.wants_entropy:
                metrics["loss"] -= loss.entropy_coef * metrics["entropy"]
        else:
            metrics = _sum_over_ranks([share for _, share in results] if _owns_results() else [])
        head = {name: metrics.pop(name) for name in list(metrics) if name.startswith("head/")}
        return UpdateResult(self.optimizer.apply(), metrics, logp_r, head)

    def _known_weights(self, rows: Rows, totals: Totals, at_step_start: bool, split: bool) -> Rows:
        """Fill `weight_r` where dL/dlogp can be had before the forward: the head then needs one pass less.

        Where a coupled group is `split` over micro-batches there is no other way, and a scoring pass at
        the present weights finds them.
        """
        loss = self._loss
        anchored = rows.old_logp_r is not None or rows.ref_logp_r is not None  # with others than the present
        if loss.linear or (at_step_start and loss.known_at_step_start and not anchored):
            # Only differences from anchors enter, and these are 0: zeros serve for all log-probs.
            logp_r = torch.zeros(int(rows.length_n.sum()))
        elif split:
            logp_r = self.score(rows)
        else:
            return rows
        weight_r, _ = token_weights(loss, _anchored(rows, logp_r), logp_r, totals)
        return rows.with_columns(weight_r=weight_r)

    def end_step(self) -> None:
        """Move a reference that follows the policy."""
        if self.shadow is not None and self._shadow_of is not None and self._shadow_of.decay is not None:
            self.shadow.follow(self._shadow_of.decay)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor on the CPU); a collective, iterate it to the end on every rank."""
        return self.model.export()

    def _plan(self, rows: Rows, keep_groups: bool) -> tuple[list[list[int]], bool]:
        """The row indices of this rank's micro-batches, and whether some group is split."""
        dp_size = parallel_state.get_data_parallel_world_size()
        mcore = self.model.config
        multiple = mcore.pipeline_model_parallel_size if len(self.model.chunks) > 1 else 1
        whole = plan(rows, dp_size, self._budget, mcore.hidden_size, keep_groups, multiple)
        return whole.micro_batches[parallel_state.get_data_parallel_rank()], whole.split_groups


def _gather(rows: Rows, micro_batches: list[list[int]], scored: list[Tensor]) -> Tensor:
    """Every rank's log-probs of its micro-batches -> fp32 [r] of all rows, on the CPU of every rank."""
    logp_r = torch.zeros(int(rows.length_n.sum()), dtype=torch.float32)
    if _owns_results():
        for index, values in zip(micro_batches, scored, strict=True):
            spans = [torch.arange(rows.offsets[i], rows.offsets[i + 1]) for i in index]
            if spans:
                logp_r[torch.cat(spans)] = values.float().cpu()
    # Everyone but the owner of a row contributes zeros, so the sum is exact.
    dist.all_reduce(logp_r)
    return logp_r


def _anchored(rows: Rows, logp_r: Tensor) -> Rows:
    """Rows whose missing old and reference log-probs are the present ones."""
    old = logp_r if rows.old_logp_r is None else rows.old_logp_r
    reference = old if rows.ref_logp_r is None else rows.ref_logp_r
    return rows.with_columns(old_logp_r=old, ref_logp_r=reference)


def _head_metrics(rows: Rows, output: LinearLogprob, totals: Totals) -> dict[str, float]:
    """A micro-batch's part in how the output layer came by its gradient: shares of the tokens, and their mean
    of what a rank kept for them."""
    share = float(rows.length_n.sum()) / totals.tokens
    return {
        "head/known": share * (output.mode == "known"),
        "head/stash": share * output.stash_share,
        "head/stash_mb": share * output.stash_bytes / 2**20,
    }


def _owns_results() -> bool:
    """Of the ranks that computed the same log-probs, the one that speaks for them."""
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    first = parallel_state.get_tensor_and_context_parallel_rank() == 0
    return bool(last and first)


def _floats(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _sum_over_ranks(shares: list[Any]) -> dict[str, float]:
    total: dict[str, float] = {}
    for mine in all_gather_msgpack(shares):
        for share in mine:
            for name, value in share.items():
                total[name] = total.get(name, 0.0) + value
    return total
