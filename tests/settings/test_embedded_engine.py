"""Models that the embedded engine cannot sample from are refused before anything is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.sampling.embedded import check_embedded_engine

MODEL: Any = SimpleNamespace(path="m")


QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
DELTA_NET = {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (QWEN3_MOE, r"model\.path=m has experts, .* rollout\.engine to sglang or vllm"),
        (DELTA_NET, "gated delta net"),
    ],
)
def test_they_are_named_with_what_would_be_right(model: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_embedded_engine(MODEL, ModelCard(model))


def test_others_pass() -> None:
    for model in (
        {"architectures": ["Qwen3ForCausalLM"]},
        {**QWEN3_MOE, "architectures": ["GptOssForCausalLM"]},
    ):
        check_embedded_engine(MODEL, ModelCard(model))
