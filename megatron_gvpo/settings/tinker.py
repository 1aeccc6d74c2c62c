"""The configuration of `megatron-gvpo serve --tinker`: the model, its layout, and who may use it.

Clients choose the method, the data and the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, PositiveInt, ValidationError, model_validator

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.secrets import from_variable, resolve
from megatron_gvpo.core.section import EVERY_KEY, MIB, LocalPath, Section, Seed
from megatron_gvpo.settings.config import Config, merged_values
from megatron_gvpo.settings.explain import explain
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig
from megatron_gvpo.settings.servers import ServersConfig, WeightSyncConfig, known_engine


class ServeConfig(Section):
    free_keys: ClassVar[tuple[str, ...]] = EVERY_KEY

    # The key that clients send, `{env: NAME}`. The SDK accepts only keys that begin with `tml-`.
    key: str = Field(min_length=8)
    address: str = "127.0.0.1"  # The address on which the server listens; others let other machines in.
    port: int = Field(8000, ge=0, le=65535)  # 0: a free one, which the server prints.
    # The name under which clients ask for the model and load its tokenizer. Default: model.path.
    name: str | None = None
    # A session ends when its client has sent nothing for this many seconds. The SDK sends something every 10.
    session_seconds: float = Field(120.0, ge=1, le=1e6)
    most_models: PositiveInt = 8  # Models in training at once; their states are in host memory.


class SamplingEngine(Section):
    """The engine that samples for clients, with the keys of a training run's section `rollout`."""

    free_keys: ClassVar[tuple[str, ...]] = EVERY_KEY

    # `local` runs inside the server's processes; `sglang` and `vllm` are rollout servers.
    engine: Annotated[str, AfterValidator(known_engine)] = "local"
    servers: ServersConfig = ServersConfig()  # As rollout.servers of a training run.
    weights: WeightSyncConfig = WeightSyncConfig()  # As rollout.weights of a training run.


class TinkerConfig(Section):
    output_dir: LocalPath  # The directory of the checkpoints.
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    serve: ServeConfig
    rollout: SamplingEngine = SamplingEngine()  # The engine that samples for clients.
    # Tokens that a rank computes at once. It bounds memory and does not change gradients.
    max_tokens_per_micro_batch: PositiveInt = 8192
    head_stash_mb: int = Field(1024, ge=0)  # As train.head_stash_mb.
    sampling_batch_size: PositiveInt = 256  # Sequences that the engine `local` samples at once on a rank.
    seed: Seed = 0  # Seed of new adapters, and of samples for which the client gives none.
    deterministic: bool = False  # As train.deterministic.

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.serve.name or self.model.path

    @property
    def head_stash_bytes(self) -> int:
        return self.head_stash_mb * MIB

    @cached_property
    def run(self) -> Config:
        """A training run with the same model, layout and rollout servers: checks and servers read such a one.

        Raises ConfigError.
        """
        engine = {name: getattr(self.rollout, name) for name in SamplingEngine.model_fields}
        values = {
            "output_dir": self.output_dir,
            "model": self.model,
            "parallel": self.parallel,
            "rollout": {**engine, "n": 2, "max_tokens": 1},
            # Clients choose data, method and rate; the values here only have to be possible.
            "data": {"train": {"path": self.output_dir}},
            "rewards": {"components": [{"name": "math"}]},
            "train": {"steps": 1, "prompts_per_step": 1},
            "optimizer": {"lr": 1e-4},
        }
        try:
            return Config.model_validate(values)
        except ValidationError as error:
            raise ConfigError(explain(error, Config)) from None

    @model_validator(mode="before")
    @classmethod
    def _with_secrets(cls, values: Any) -> Any:
        return resolve(values)

    @model_validator(mode="after")
    def _possible(self) -> TinkerConfig:
        if not from_variable(self.serve.key):
            raise ValueError(
                "serve.key: a secret in the configuration: give `{env: NAME}`, and the key in the "
                "environment variable NAME"
            )
        if not self.serve.key.startswith("tml-"):
            raise ValueError("serve.key: the SDK sends only keys that begin with `tml-`; choose such a key")
        if self.model.adapter is not None and self.model.adapter.path is not None:
            raise ValueError("model.adapter.path: every client starts with new adapters; leave it out")
        if self.model.fp8 is not None and self.model.fp8.weights and self.model.adapter is None:
            raise ValueError(
                "model.fp8.weights=true: clients' models wait in host memory, and weights in FP8 would come "
                "back from there and from checkpoints with other scales; leave it out, which keeps model.fp8"
            )
        if self.rollout.servers.colocated:
            raise ValueError(
                "rollout.servers.colocated=true: clients train and sample in turns, and the memory would "
                "change hands at every turn; give the servers GPUs of their own, and leave it out"
            )
        return self


def load_tinker_config(files: Sequence[str | Path], overrides: Iterable[str] = ()) -> TinkerConfig:
    """Read and merge YAML files (later ones win), apply `key.sub=value` overrides, validate.

    Raises ConfigError.
    """
    values = merged_values(files, overrides)
    # The file belongs to a training run, with many keys that a server does not know.
    if "serve" not in values:
        raise ConfigError(
            f"{', '.join(map(str, files))}: no section `serve`: a server's configuration has output_dir, "
            "model, parallel and serve, with serve.key; data and method are its clients'. "
            "Example: examples/tinker/server.yaml; all keys: docs/howto/tinker_server.md"
        )
    try:
        config = TinkerConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, TinkerConfig)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _ = config.run  # the rules between model, layout and servers
    return config
