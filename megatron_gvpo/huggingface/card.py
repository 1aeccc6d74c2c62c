"""The card of a model: its config.json, and facts that follow from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.json_files import read_json_object
from megatron_gvpo.core.plain_values import finite_number
from megatron_gvpo.huggingface.image_families import text_values
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.reward_servers import key_of

# Architectures whose first layers are dense: one layer if config.json does not say how many.
DENSE_FIRST = ("ExaoneMoeForCausalLM", "Glm4MoeLiteForCausalLM", "HYV3ForCausalLM")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # several names for the number of experts


def _remedy(directory: Path) -> str:
    """Return the end of the error for a path that is not a model's directory: its content, and a remedy."""
    try:
        if directory.is_file():
            return f"; it is a file: name its directory, {directory.parent}"
        if (directory / "adapter_config.json").is_file():
            return "; it is an adapter: name its base model, and the adapter in model.adapter.path"
        if any(directory.glob("*.gguf")):
            return "; it has GGUF files, which are quantised and not read: name the model they were made of"
        inner = sorted(file.parent for file in directory.glob("*/config.json"))
        inner += sorted(file.parent for file in directory.glob("snapshots/*/config.json"))  # the hub's cache
    except OSError:
        return ""
    if inner:
        return f"; {inner[0]} has one"
    if not (is_there := directory.exists()):
        name = re.fullmatch(r"(?:https?:/+[\w.]+/)?([\w.-]+/[\w.-]+)", str(directory))
        if name is not None:
            return f"; if it is a name of the hub, download it: hf download {name[1]} --local-dir DIR"
    return "" if is_there else "; there is no such directory"


class ModelCard(dict[str, Any]):
    """The keys and values of a model's config.json.

    The card of a model with images has the keys of its language model at the top, as text models have them.
    Reading checks only the form of the file, because servers run models that the trainer does not know;
    `check_values` checks the values, and `architectures.check_family` the model.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(text_values(values))
        # The keys as the file has them. Of a key that both parts of the file have, the card shows one value.
        self.in_file: Mapping[str, Any] = values.in_file if isinstance(values, ModelCard) else values

    @classmethod
    def read(cls, directory: str | Path, key: str = "model.path") -> ModelCard:
        """Read the config.json of a Hugging Face checkpoint directory.

        Raises ConfigError, which names the configuration key, if there is none or it is not a JSON object.
        """
        file = Path(directory) / "config.json"
        try:
            exists = file.is_file()
        except OSError as error:  # no permission, or a name that is too long
            raise ConfigError(f"{file}: {error.strerror}") from None
        if not exists:
            raise ConfigError(
                f"{key}={directory}: no config.json there (a Hugging Face checkpoint directory)"
                f"{_remedy(Path(directory))}"
            )
        return cls(read_json_object(file))

    @property
    def architectures(self) -> list[str]:
        """The names of the model's classes in transformers; empty if config.json has none."""
        return self.get("architectures") or []

    @property
    def experts(self) -> int:
        """The number of routed experts; 0 for a dense model."""
        return int(next((self[name] for name in _EXPERTS if self.get(name)), 0))

    @property
    def dense_layers(self) -> int:
        """The number of first layers without experts in a mixture of experts."""
        layers = self.get("first_k_dense_replace")
        if layers is None:
            return int(any(name in DENSE_FIRST for name in self.architectures))
        return int(layers)

    @property
    def is_mla(self) -> bool:
        """True if the attention has a latent for keys and values (multi-head latent attention)."""
        return bool(self.get("kv_lora_rank"))

    @property
    def has_delta_nets(self) -> bool:
        """True if most layers have a gated delta net in place of attention (Qwen3-Next, Qwen3.5)."""
        return bool(self.get("linear_num_value_heads"))

    @property
    def window(self) -> int | None:
        """The tokens of the sliding window; None if every token attends to all before it."""
        return (self.get("sliding_window") or None) if self.get("use_sliding_window", True) else None

    def check_values(self, where: str) -> None:
        """Raises ConfigError, which begins with `where`, if a value of config.json cannot be right.

        transformers takes its own default for a key that is missing, and a layer of another size for a wrong
        one. If no shape of a weight shows it, such as the number of heads, the result is silently another
        model.
        """
        required = [name for name, field in _CardValues.model_fields.items() if field.is_required()]
        absent = [name for name in required if self.get(name) is None]
        if self.get("intermediate_size") is None and not self.get("moe_intermediate_size"):
            absent.append("intermediate_size")
        if absent:
            raise ConfigError(f"{where}: no {', '.join(absent)} in config.json")
        try:
            values = _CardValues.model_validate(
                {key: value for key, value in self.items() if value is not None}
            )
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key = str(problem["loc"][0])
            raise ConfigError(
                f"{where}: {key}={shown(self[key])} in config.json: {_expectation(problem)}"
            ) from None
        if self.experts and self.get("moe_intermediate_size", 1) is None:
            raise ConfigError(f"{where}: moe_intermediate_size=null in config.json: the model has experts")
        if not self.is_mla:  # the sizes of latent attention's heads have keys of their own
            _check_heads(values, where)


class ModelCards:
    """The cards of the models that a configuration names. Each is read once, when it is first needed.

    A command or the trainer makes one of these and passes it on: no other code reads these models'
    config.json. Every card raises ConfigError, which names the model's key, if it cannot be read.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        served_path = config.rollout.servers.model_path
        self.served_path = served_path or config.model.path  # the directory with which rollout servers start
        self.served_key = "rollout.servers.model_path" if served_path else "model.path"  # the directory's key
        self._components: dict[int, ModelCard] = {}

    @cached_property
    def policy(self) -> ModelCard:
        """The card of `model.path`."""
        return ModelCard.read(self._config.model.path)

    @cached_property
    def served(self) -> ModelCard:
        """The card of the model that rollout servers start with, which is mostly the policy's."""
        if self.served_path == self._config.model.path:
            return self.policy
        return ModelCard.read(self.served_path, self.served_key)

    @cached_property
    def teacher(self) -> ModelCard:
        """The card of `teacher.path`, in a configuration with a teacher."""
        assert self._config.teacher is not None, "the run has no teacher"
        return ModelCard.read(self._config.teacher.path, "teacher.path")

    @cached_property
    def draft(self) -> ModelCard:
        """The card of `rollout.speculation.model`, in a configuration that names one."""
        speculation = self._config.rollout.speculation
        assert speculation is not None and speculation.model is not None, "servers load no draft"
        return ModelCard.read(speculation.model, "rollout.speculation.model")

    @cached_property
    def critic(self) -> ModelCard:
        """The card of `algorithm.critic.path`, in a configuration that names one."""
        critic = self._config.algorithm.critic
        assert critic is not None and critic.path is not None, "the critic has no checkpoint"
        return ModelCard.read(critic.path, "algorithm.critic.path")

    def component(self, i: int) -> ModelCard:
        """The card of the reward model or judge of `rewards.components[i]`, where its `path` is set."""
        served = self._config.rewards.components[i].served
        assert served is not None and served.path is not None, "the component has no checkpoint"
        if i not in self._components:
            self._components[i] = ModelCard.read(served.path, f"{key_of(i, served)}.path")
        return self._components[i]


# The largest allowed sizes are far beyond any model.
_Layers = Annotated[int, Field(ge=1, le=10_000)]
_LayersOrNone = Annotated[int, Field(ge=0, le=10_000)]
_Width = Annotated[int, Field(ge=1, le=1 << 20)]
_FeedForward = Annotated[int, Field(ge=1, le=1 << 24)]
_Heads = Annotated[int, Field(ge=1, le=1 << 16)]
_HeadWidth = Annotated[int, Field(ge=1, le=1 << 16)]
_Experts = Annotated[int, Field(ge=1, le=1 << 20)]
_ExpertsOrNone = Annotated[int, Field(ge=0, le=1 << 20)]
_Tokens = Annotated[int, Field(ge=1, le=1 << 31)]


def is_positive(value: Any) -> bool:
    """True for a finite number above 0, such as the base of the rotary frequencies."""
    return (number := finite_number(value)) is not None and number > 0


def _positive(value: Any) -> Any:
    if not is_positive(value):
        raise ValueError("expected a positive number")
    return value


_Positive = Annotated[Any, AfterValidator(_positive)]


class _CardValues(BaseModel):
    """The values of config.json that have a type and bounds. A null counts as a key that is missing."""

    model_config = ConfigDict(strict=True, frozen=True)

    hidden_size: _Width
    num_hidden_layers: _Layers
    num_attention_heads: _Heads
    vocab_size: _FeedForward
    num_key_value_heads: _Heads | None = None
    intermediate_size: _FeedForward | None = None
    head_dim: _HeadWidth | None = None
    max_position_embeddings: _Tokens | None = None
    sliding_window: _Tokens | None = None
    max_window_layers: _LayersOrNone | None = None
    # keys of a mixture of experts
    moe_intermediate_size: _FeedForward | None = None
    shared_expert_intermediate_size: _FeedForward | None = None
    num_experts: _Experts | None = None
    n_routed_experts: _Experts | None = None
    num_local_experts: _Experts | None = None
    num_experts_per_tok: _Experts | None = None
    n_shared_experts: _ExpertsOrNone | None = None
    num_shared_experts: _ExpertsOrNone | None = None
    n_group: _Experts | None = None
    topk_group: _Experts | None = None
    first_k_dense_replace: _LayersOrNone | None = None
    num_nextn_predict_layers: _LayersOrNone | None = None
    # keys of latent attention
    q_lora_rank: _Width | None = None
    kv_lora_rank: _Width | None = None
    qk_rope_head_dim: _HeadWidth | None = None
    qk_nope_head_dim: _HeadWidth | None = None
    v_head_dim: _HeadWidth | None = None
    # keys of gated delta nets
    linear_num_key_heads: _Heads | None = None
    linear_num_value_heads: _Heads | None = None
    linear_key_head_dim: _HeadWidth | None = None
    linear_value_head_dim: _HeadWidth | None = None
    linear_conv_kernel_dim: Annotated[int, Field(ge=1, le=64)] | None = None
    rms_norm_eps: _Positive = None
    rope_theta: _Positive = None
    initializer_range: _Positive = None
    routed_scaling_factor: _Positive = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    use_sliding_window: bool | None = None
    norm_topk_prob: bool | None = None


def _expectation(problem: ErrorDetails) -> str:
    """The end of an error message, such as "must be at least 1"."""
    bounds = problem.get("ctx", {})
    return {
        "int_type": "expected a whole number",
        "bool_type": "expected true or false",
        "greater_than_equal": f"must be at least {bounds.get('ge')}",
        "less_than_equal": f"must be at most {bounds.get('le')}",
        "value_error": f"{bounds.get('error')}",
    }.get(problem["type"], problem["msg"])


def _check_heads(values: _CardValues, where: str) -> None:
    """Raises ConfigError if the heads do not divide the width, or their own number, or RoPE's halves."""
    heads, hidden, groups = values.num_attention_heads, values.hidden_size, values.num_key_value_heads
    if values.head_dim is None and hidden % heads:
        raise ConfigError(
            f"{where}: num_attention_heads={heads} in config.json does not divide hidden_size={hidden}"
        )
    if groups and heads % groups:
        raise ConfigError(
            f"{where}: num_key_value_heads={groups} in config.json does not divide "
            f"num_attention_heads={heads}"
        )
    if (width := values.head_dim or hidden // heads) % 2:
        raise ConfigError(f"{where}: heads of {width} elements in config.json, which RoPE cannot halve")


def shown(value: Any) -> str:
    """The value, or its beginning, for a message."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# The values of config.json on which the meaning of weights depends, although their shapes may not show it.
Facts = dict[str, str | int | float | bool]  # by dotted key

_NOT_OF_THE_WEIGHTS = frozenset(
    {
        *("_name_or_path", "_attn_implementation", "attn_implementation", "dtype", "torch_dtype"),
        *("transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("max_position_embeddings", "return_dict", "output_hidden_states", "output_attentions"),
    }
)


def facts_of(config: Mapping[str, Any]) -> Facts:
    """The texts, numbers and booleans of a config.json, which change a model's outputs for given weights.

    Lists and null are left out: versions of transformers write them differently.
    """
    return dict(_facts(config, ""))


def first_difference(one: Facts, other: Facts) -> tuple[str, Any, Any] | None:
    """The first key, in alphabetical order, that both have with different values, and the values; or None."""
    different = sorted(key for key in one.keys() & other.keys() if one[key] != other[key])
    return (different[0], one[different[0]], other[different[0]]) if different else None


def _facts(config: Mapping[str, Any], above: str) -> Iterator[tuple[str, str | int | float | bool]]:
    for key, value in config.items():
        if key in _NOT_OF_THE_WEIGHTS:
            continue
        if isinstance(value, Mapping):
            yield from _facts(value, f"{above}{key}.")
        elif isinstance(value, str | int | float | bool):
            yield f"{above}{key}", value
