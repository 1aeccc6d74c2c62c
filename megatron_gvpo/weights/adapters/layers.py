"""The layers of the model that have adapters, and what an adapter of theirs looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_gvpo.config.checks.adapters import possible_targets
from megatron_gvpo.config.schema import AdapterConfig, Config, ConfigError, read_model_config

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that its --max-lora-rank takes (0.32.0)
_PREFIX = "base_model.model."  # of all names in an adapter of Hugging Face PEFT


def adapter_of(config: Config) -> AdapterConfig:
    """`model.adapter`, which the checks of the configuration want for this transport."""
    assert config.model.adapter is not None
    return config.model.adapter


def adapted_layers(config: Config) -> tuple[str, ...]:
    """Hugging Face's names of the layers with adapters, such as q_proj, sorted."""
    [architecture] = read_model_config(config.model.path)["architectures"]
    return adapter_of(config).selected(possible_targets(architecture))


def served_rank(config: Config) -> int:
    """The rank that vLLM makes room for. Raises ConfigError for one that is beyond the largest."""
    rank = adapter_of(config).rank
    if rank > VLLM_RANKS[-1]:
        raise ConfigError(
            f"model.adapter.rank={rank}: vLLM serves adapters of rank {VLLM_RANKS[-1]} at most: use a "
            "smaller one, rollout.engine=sglang, or rollout.weights.transport=broadcast, which sends merged "
            "weights"
        )
    return next(served for served in VLLM_RANKS if served >= rank)


def adapter_shapes(
    stored: Mapping[str, tuple[int, ...]], layers: Sequence[str], rank: int
) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """Shapes of the adapter's tensors by Hugging Face PEFT's names, and those that the trainer may lack.

    `stored`: shapes of the model's tensors. An expert may have no adapter.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in stored.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer.rpartition(".")[2] in layers:
            rows, columns = shape
            shapes[f"{_PREFIX}{layer}.lora_A.weight"] = (rank, columns)
            shapes[f"{_PREFIX}{layer}.lora_B.weight"] = (rows, rank)
    return shapes, frozenset(name for name in shapes if ".experts." in name)
