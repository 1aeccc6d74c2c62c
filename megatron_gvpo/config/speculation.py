"""Settings of speculative decoding on rollout servers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from megatron_gvpo.config.section import EVERY_KEY, LocalPath, Section


class SpeculationConfig(Section):
    """Speculative decoding: a draft proposes tokens, and the policy accepts or replaces them.

    Responses are distributed, and have log-probs, as without it. Source: Leviathan et al., arXiv 2211.17192.
    """

    free_keys = EVERY_KEY

    # The source of proposals. `ngram`: the text so far, where the last tokens occurred before. `suffix`: that
    # and earlier responses (vLLM, with arctic-inference). `draft`: a small model. `mtp`: the model's own
    # heads for further tokens. `eagle`: an EAGLE or EAGLE-3 head.
    method: Literal["ngram", "suffix", "draft", "mtp", "eagle"]
    tokens: int = Field(3, gt=0, le=64)  # Tokens proposed at a time, at most.
    # Checkpoint directory of the draft model or EAGLE head. It stays as it is while the policy trains.
    model: LocalPath | None = None

    @property
    def own_weights(self) -> bool:
        """True if the draft has its own weights on the servers, which pushes do not change."""
        return self.method in ("draft", "mtp", "eagle")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.method in ("draft", "eagle") and self.model is None:
            raise ValueError(f"method={self.method}: give its checkpoint directory, model")
        if self.method not in ("draft", "eagle") and self.model is not None:
            raise ValueError(
                f"model={self.model}: method={self.method} has no model of its own; leave it out"
            )
        return self
