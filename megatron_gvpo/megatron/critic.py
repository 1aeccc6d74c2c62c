"""PPO's critic: a second model with the policy's architecture and layout, whose head gives a number a token.

It shares the process groups with the policy and nothing else. Its weights, gradients and optimizer states are
its own, so it takes as much memory as the policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_gvpo.algorithms.advantages.gae import CriticOptions
from megatron_gvpo.megatron import forward
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.megatron.microbatch import detached, floats, my_share, sum_over_ranks
from megatron_gvpo.megatron.model.build import build
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.optimizer import Optimizer
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig, OptimizerConfig, TrainConfig
from megatron_gvpo.types import BatchTotals, TrainBatch


class ValueHead(torch.nn.Module):
    """V = hidden . weight + bias, in fp32.

    Every tensor-parallel rank has the whole head, which is 0 at the start.
    """

    def __init__(self, width: int, like: Tensor, sequence_parallel: bool) -> None:
        """`like` gives dtype and device."""
        super().__init__()
        self.weight = torch.nn.Parameter(like.new_zeros(1, width))
        self.bias = torch.nn.Parameter(like.new_zeros(1))
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden_rh: Tensor) -> Tensor:
        """[r, h] -> fp32 [r]"""
        return hidden_rh.float() @ self.weight[0].float() + self.bias.float()


def without_output_layer(chunks: list[Any]) -> list[Any]:
    """Replace the output layer of a GPTModel, given as its loaded, unwrapped chunks, by a value head."""
    for chunk in chunks:
        # With tied embeddings, a pipeline would still sum the gradients of its first and last stage.
        chunk.share_embeddings_and_output_weights = False
        for parameter in chunk.parameters():
            if hasattr(parameter, "shared_embedding"):  # Megatron's mark on the tied weights
                del parameter.shared_embedding
        if chunk.post_process:
            like = next(chunk.decoder.parameters())
            settings = chunk.config
            chunk.output_layer = ValueHead(settings.hidden_size, like, settings.sequence_parallel)
    return chunks


def value_head(
    hidden_states: Tensor, output_layer: ValueHead, _: Tensor | None, batch: PackedBatch
) -> Tensor:
    """hidden_states [t, 1, h] (t / tp under sequence parallelism) -> values of the pack's tokens, fp32 [r].

    A token's value is the value of the text before it, read from the hidden state that predicts the token.
    All tensor-parallel ranks compute the same values. So each has the hidden states' whole gradient, unlike
    with the policy's head, whose vocabulary is divided among them.
    """
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    local_r = output_layer(hidden_states.squeeze(1).index_select(0, batch.response_r))
    return forward.gather_context_parallel(local_r, batch)


class Critic:
    """Computes response tokens' values, and trains towards their returns. Every rank calls every method."""

    def __init__(
        self,
        options: CriticOptions,
        policy: ModelConfig,
        parallel: ParallelConfig,
        train: TrainConfig,
        optimizer: OptimizerConfig,
    ) -> None:
        """`policy` and `optimizer`: the policy's settings; the critic's differ from them as `options` say."""
        # The critic's own weights train, so it has no adapter.
        own = policy.model_copy(update={"path": options.path or policy.path, "adapter": None})
        self.model: Model = build(
            own,
            parallel,
            train.deterministic,
            before_wrapping=without_output_layer,
            key="model.path" if options.path is None else "algorithm.critic.path",
            muon=optimizer.muon is not None,
        )
        settings = optimizer.model_copy(
            update={
                "lr": options.lr,
                "min_lr": optimizer.min_lr * options.lr / optimizer.lr,
                "warmup_steps": options.warmup_steps,
            }
        )
        self.optimizer = Optimizer(self.model, settings, own, train.updates)
        self.checkpoint: Path | None = None  # the last one that was read into it, perhaps in part
        self._options = options
        self._budget = train.max_tokens_per_micro_batch * parallel.cp

    def values(self, rows: TrainBatch) -> Tensor:
        """Return V before every response token, without gradient, fp32 [r] on the CPU of every rank."""
        share = my_share(self.model, rows, self._budget, keep_groups=False)

        def keep(_: TrainBatch, value_r: Tensor) -> tuple[Tensor, Tensor]:
            return value_r.new_zeros(()), value_r.detach()

        values = forward.run(self.model, share.packs(rows), keep, head=value_head, forward_only=True)
        return share.gather(rows, values)

    def update(self, rows: TrainBatch) -> dict[str, float]:
        """Take one optimizer update towards `rows.return_r`; returns metrics."""
        totals = BatchTotals.of(rows)
        share = my_share(self.model, rows, self._budget, keep_groups=False)

        def loss(rows: TrainBatch, value_r: Tensor) -> tuple[Tensor, Any]:
            value, metrics = self._options.loss(rows, value_r, totals)
            return value, detached(metrics)

        self.optimizer.zero_grad()
        results = forward.run(self.model, share.packs(rows), loss, head=value_head)
        metrics = sum_over_ranks(floats(results))
        self.model.finish_background_work()
        update = self.optimizer.apply()
        return metrics | {"value_grad_norm": update.grad_norm, "value_skipped": float(update.skipped)}
