"""A model that computes log-probs and exports its weights: the policy's base class, and used to evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.kernels.linear_logprob import LinearLogprob
from megatron_gvpo.megatron import forward, parallel
from megatron_gvpo.megatron.device_memory import DeviceMemory
from megatron_gvpo.megatron.forward import LogprobHead
from megatron_gvpo.megatron.microbatch import my_share
from megatron_gvpo.megatron.model.build import build
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.model.own_weights import OwnWeights
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig, TrainConfig
from megatron_gvpo.types import TrainBatch


def score(model: Model, rows: TrainBatch, max_tokens: int, temperature: float) -> Tensor:
    """Return a model's log-probs of the response tokens, without gradient, fp32 [r] on every rank's CPU.

    `max_tokens`: the most tokens of a micro-batch.
    """
    share = my_share(model, rows, max_tokens, keep_groups=False)

    def keep(_: TrainBatch, values: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        output = LinearLogprob(*values)
        return output.logp_r.new_zeros(()), output.logp_r.detach()

    scored = forward.run(
        model, share.packs(rows), keep, head=LogprobHead(temperature, model.vocab_size), forward_only=True
    )
    return share.gather(rows, scored)


def temperature_of(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> float:
    """The temperature of the log-probs that a run trains on: that of sampling, or 1 for given texts."""
    return rollout.temperature if algorithm.samples_from_policy else 1.0


class ScoredModel:
    """A Megatron model that computes log-probs and exports its weights. Every method is a collective."""

    def __init__(self, model: Model, max_tokens: int, temperature: float = 1.0) -> None:
        """`max_tokens`: the most tokens of a micro-batch. `temperature`: divides the logits in `score`."""
        self.model = model
        self.memory = DeviceMemory((model, None))
        self._budget, self._temperature = max_tokens, temperature

    def score(self, rows: TrainBatch, temperature: float | None = None) -> Tensor:
        """Return the response tokens' log-probs, without gradient, fp32 [r] on the CPU of every rank.

        `temperature`: default the sampling temperature.
        """
        return score(self.model, rows, self._budget, temperature or self._temperature)

    def weights(self, on_host: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor). A collective: iterate it to the end on every rank.

        `on_host`: on the CPU; otherwise on the model's device.
        """
        return self.model.export(on_host)

    def adapter_weights(self, on_host: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face PEFT's name, full tensor) of every adapter tensor, like `weights`.

        Raises ValueError if the model has no adapters.
        """
        return self.model.export_adapters(on_host)

    def own_weights(self) -> OwnWeights:
        """Return this rank's own weights, ready to be read. A collective: every rank calls it."""
        return self.model.own_weights()


class Scorer(ScoredModel):
    """A Megatron model for scoring; unless `trained`, it has no gradient buffers and takes less memory."""

    def __init__(
        self,
        model: ModelConfig,
        layout: ParallelConfig,
        train: TrainConfig,
        *,
        temperature: float = 1.0,
        replays_routing: bool = False,
        trained: bool = False,
        muon: bool = False,
    ) -> None:
        """`temperature`: divides the logits in `score`.

        `replays_routing`: tokens go to the experts that the engine chose (`rollout.router_replay`).
        `muon`: matrices are trained as a whole (`optimizer.muon`).
        """
        parallel.initialize(layout, train.seed, train.deterministic)
        built = build(
            model,
            layout,
            train.deterministic,
            trained,
            replays=replays_routing,
            share_prompts=train.share_prompts if trained else False,
            seed=train.seed,
            muon=muon,
        )
        super().__init__(built, train.max_tokens_per_micro_batch * layout.cp, temperature)
