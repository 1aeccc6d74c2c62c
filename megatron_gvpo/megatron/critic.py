"""PPO's critic: a second model of the policy's architecture and layout whose head gives one number a token.

It shares the process groups with the policy and nothing else: weights, gradients and optimizer states are its
own, so that it takes as much memory as the policy does.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_gvpo.algorithms.advantages.gae import Critic as CriticOptions
from megatron_gvpo.config.schema import Config
from megatron_gvpo.megatron import forward
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.megatron.microbatch import detached, floats, gather, my_micro_batches, sum_over_ranks
from megatron_gvpo.megatron.model.build import Model, build
from megatron_gvpo.megatron.optimizer import Optimizer
from megatron_gvpo.types import BatchTotals, TrainBatch


class ValueHead(torch.nn.Module):
    """V = hidden . weight + bias, in fp32; whole on every tensor-parallel rank, and 0 at first."""

    def __init__(self, width: int, like: Tensor, sequence_parallel: bool) -> None:
        """In the dtype and on the device of `like`."""
        super().__init__()
        self.weight = torch.nn.Parameter(like.new_zeros(1, width))
        self.bias = torch.nn.Parameter(like.new_zeros(1))
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden_rh: Tensor) -> Tensor:
        """[r, h] -> fp32 [r]"""
        return hidden_rh.float() @ self.weight[0].float() + self.bias.float()


def without_output_layer(chunks: list[Any]) -> list[Any]:
    """The loaded, unwrapped chunks of a GPTModel with a value head where the output layer was."""
    for chunk in chunks:
        # Where embeddings are tied, a pipeline would go on summing the gradients of both ends.
        chunk.share_embeddings_and_output_weights = False
        for parameter in chunk.parameters():
            if hasattr(parameter, "shared_embedding"):
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

    The value of a token is that of what came before it, prompt and response: of the hidden state that
    predicts it. All tensor-parallel ranks compute the same, so that, unlike after the policy's head, whose
    vocabulary they share, none has a part of the hidden states' gradient only.
    """
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    mine_r = output_layer(hidden_states.squeeze(1).index_select(0, batch.response_r))
    return forward.of_whole_pack(mine_r, batch)


class Critic:
    """Values of response tokens, and updates towards their returns. Every rank calls every method alike."""

    shadow = None

    def __init__(self, config: Config, options: CriticOptions) -> None:
        own = config.model.model_copy(update={"path": options.path or config.model.path})
        parallel, train = config.parallel, config.train
        self.model: Model = build(
            own,
            parallel,
            train.deterministic,
            before_wrapping=without_output_layer,
            key="model.path" if options.path is None else "algorithm.critic.path",
        )
        self.model.config.finalize_model_grads_func = finalize_model_grads
        policys = config.optimizer
        settings = policys.model_copy(
            update={
                "lr": options.lr,
                "min_lr": policys.min_lr * options.lr / policys.lr,
                "warmup_steps": options.warmup_steps,
            }
        )
        self.optimizer = Optimizer(self.model, settings, own, train.updates)
        self._options = options
        self._budget = train.max_tokens_per_micro_batch * parallel.cp

    def values(self, rows: TrainBatch) -> Tensor:
        """V of what came before every response token, without gradient, fp32 [r] on the CPU of every rank."""
        mine, _ = my_micro_batches(self.model, rows, self._budget, keep_groups=False)

        def keep(_: TrainBatch, value_r: Tensor) -> tuple[Tensor, Tensor]:
            return value_r.new_zeros(()), value_r.detach()

        packs = [rows.select(index) for index in mine]
        return gather(rows, mine, forward.run(self.model, packs, keep, head=value_head, forward_only=True))

    def update(self, rows: TrainBatch) -> dict[str, float]:
        """One optimizer update towards `rows.return_r`; returns metrics."""
        totals = BatchTotals.of(rows)
        mine, _ = my_micro_batches(self.model, rows, self._budget, keep_groups=False)

        def share(rows: TrainBatch, value_r: Tensor) -> tuple[Tensor, Any]:
            value, metrics = self._options.loss(rows, value_r, totals)
            return value, detached(metrics)

        self.optimizer.zero_grad()
        packs = [rows.select(index) for index in mine]
        shares = forward.run(self.model, packs, share, head=value_head)
        metrics = sum_over_ranks([floats(share) for share in shares])
        self.model.about_to_change()
        update = self.optimizer.apply()
        return metrics | {"value_grad_norm": update.grad_norm, "value_skipped": float(update.skipped)}
