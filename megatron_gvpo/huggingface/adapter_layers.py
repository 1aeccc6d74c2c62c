"""The layers that have adapters, the shapes of the adapters, and the limits of servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.settings.adapter import AdapterConfig, possible_targets
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of vLLM's --max-lora-rank (0.32.0)
_PREFIX = "base_model.model."  # begins every tensor's name in a Hugging Face PEFT adapter


def adapter_of(model: ModelConfig) -> AdapterConfig:
    """Return `model.adapter`, which the checks of the configuration require for this transport."""
    assert model.adapter is not None
    return model.adapter


def adapted_layers(model: ModelConfig, card: ModelCard) -> tuple[str, ...]:
    """Hugging Face's names of the layers with adapters, such as q_proj, sorted. `card`: the policy's."""
    [architecture] = card.architectures
    return adapter_of(model).selected(possible_targets(architecture))


def served_rank(model: ModelConfig) -> int:
    """The adapter rank that vLLM reserves memory for.

    Raises ConfigError if the rank is too large for vLLM.
    """
    rank = adapter_of(model).rank
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


# --- adapters that a rollout engine would not serve as they are --------------------------------------------

# SGLang (0.5.23) joins the layers of each entry, (needed layers, others), to one. If some have adapters, all
# needed layers must: SGLang would ignore the adapters of the others.
_TOGETHER = ((("q_proj", "v_proj"), ("k_proj",)), (("gate_proj",), ("up_proj",)))


def check_limits(rollout: RolloutConfig, model: ModelConfig, card: ModelCard) -> None:
    """Raise ConfigError for adapters that servers of `rollout.engine` cannot serve. `card`: the policy's."""
    layers, engine, servers = adapted_layers(model, card), rollout.engine, rollout.servers
    if servers.model_path and servers.model_path != model.path:
        raise ConfigError(
            f"rollout.servers.model_path={servers.model_path}: with rollout.weights.transport=adapter "
            f"servers keep the weights that they start with, and an adapter fits those of "
            f"model.path={model.path}: leave it out, or use broadcast, which sends merged weights"
        )
    if engine == "vllm":
        served_rank(model)
        # VLLM (0.32.0) decodes with products of the base weights that it computes at its start.
        if "kv_b_proj" in layers:
            raise ConfigError(
                "model.adapter.targets: vLLM applies an adapter of kv_b_proj to prompts, and not when it "
                "decodes: leave it out, or use rollout.engine=sglang, or "
                "rollout.weights.transport=broadcast, which sends merged weights"
            )
    for needed, others in _TOGETHER if engine == "sglang" else ():
        present = sorted({*needed, *others} & set(layers))
        absent = [name for name in needed if name not in layers]
        if present and absent:
            raise ConfigError(
                f"model.adapter.targets: SGLang serves no adapter of {present[0]} without one of "
                f"{absent[0]}: add it, or use rollout.weights.transport=broadcast, which sends merged weights"
            )
