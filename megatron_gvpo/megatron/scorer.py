"""A model that computes log-probs and exports its weights: the policy's base class, and used to evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_gvpo.config.schema import Config
from megatron_gvpo.kernels.linear_logprob import LinearLogprob
from megatron_gvpo.megatron import forward, parallel
from megatron_gvpo.megatron.device_memory import DeviceMemory
from megatron_gvpo.megatron.forward import LogprobHead
from megatron_gvpo.megatron.microbatch import my_share
from megatron_gvpo.megatron.model.build import build
from megatron_gvpo.megatron.model.own_weights import OwnWeights
from megatron_gvpo.types import TrainBatch


class Scorer:
    """A Megatron model for scoring; unless `trained`, it has no gradient buffers and takes less memory."""

    def __init__(self, config: Config, trained: bool = False) -> None:
        deterministic = config.train.deterministic
        parallel.initialize(config.parallel, config.train.seed, deterministic)
        self.model = build(
            config.model,
            config.parallel,
            deterministic,
            trained,
            replays=config.rollout.router_replay,
            share_prompts=trained and config.train.share_prompts,
        )
        self.memory = DeviceMemory((self.model, None))
        self._budget = config.train.max_tokens_per_micro_batch * config.parallel.cp
        self._temperature = config.rollout.temperature if config.algorithm.samples_from_policy else 1.0

    def score(self, rows: TrainBatch, temperature: float | None = None) -> Tensor:
        """Return the response tokens' log-probs, without gradient, fp32 [r] on the CPU of every rank.

        `temperature`: default the sampling temperature.
        """
        share = my_share(self.model, rows, self._budget, keep_groups=self.model.share_prompts)

        def keep(_: TrainBatch, values: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
            output = LinearLogprob(*values)
            return output.logp_r.new_zeros(()), output.logp_r.detach()

        scored = forward.run(
            self.model,
            share.packs(rows),
            keep,
            head=LogprobHead(temperature or self._temperature, self.model.vocab_size),
            forward_only=True,
        )
        return share.gather(rows, scored)

    def weights(self, on_host: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor). A collective: iterate it to the end on every rank.

        `on_host`: on the CPU; otherwise on the model's device.
        """
        return self.model.export(on_host)

    def own_weights(self) -> OwnWeights:
        """This rank's own weights, ready to be read. A collective: every rank calls it."""
        return self.model.own_weights()
