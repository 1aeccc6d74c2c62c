"""The model that the server trains: its description for clients, and the checks of their requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.end_tokens import end_token_ids
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.settings.adapter import possible_targets
from megatron_gvpo.settings.tinker import TinkerConfig
from megatron_gvpo.tinker.requests import LoraOptions
from megatron_gvpo.tinker.sessions import ClientModel
from megatron_gvpo.tinker.wire import Datum, Refusal

_OF_ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
)


@dataclass(frozen=True)
class ServedModel:
    """Facts of the model."""

    name: str
    path: str
    architecture: str
    vocabulary: int
    positions: int
    end_token_ids: tuple[int, ...]
    rank: int | None  # the rank of the adapters; None: all weights train
    layers: tuple[str, ...]  # Hugging Face's names of the linear layers that have adapters
    # true if every sample ends at the model's own end token, as on rollout servers
    is_always_ended: bool = False
    served_positions: int | None = None  # the context length of rollout servers

    @staticmethod
    def of(config: TinkerConfig, served_positions: int | None) -> ServedModel:
        """Read the model's files. Raises ConfigError, DataError."""
        path, adapter = config.model.path, config.model.adapter
        card = ModelCard.read(path)
        architecture = (card.architectures or [""])[0]
        tokenizer = load_tokenizer(path, config.model.trust_remote_code)
        layers = () if adapter is None else adapter.selected(possible_targets(architecture))
        return ServedModel(
            name=config.name,
            path=path,
            architecture=architecture,
            vocabulary=int(card["vocab_size"]),
            positions=int(card.get("max_position_embeddings") or 2**31 - 1),
            end_token_ids=end_token_ids(path, card, tokenizer),
            rank=None if adapter is None else adapter.rank,
            layers=layers,
            is_always_ended=config.run.rollout.uses_servers,
            served_positions=served_positions,
        )

    @property
    def sampled_positions(self) -> int:
        """The most tokens of a prompt with its response."""
        return min(self.positions, self.served_positions or self.positions)

    @property
    def most_snapshots(self) -> int:
        """How many unnamed weights to sample from a client's model keeps, those that were used last."""
        return 4 if self.rank is None else 16  # adapters are small

    @property
    def about(self) -> str:
        """The greeting in a client's log at the start of a session."""
        trained = "all weights" if self.rank is None else f"adapters of rank {self.rank}"
        return f"megatron-gvpo trains {trained} of {self.name}"

    @property
    def warning(self) -> str | None:
        """The warning in a client's log: how this server differs from the SDK's defaults."""
        if self.rank is None:
            return None
        return "this server has no adapter on the output layer: train_unembed=True has no effect"

    def check_name(self, name: str) -> None:
        """Raises Refusal for another model."""
        if name not in (self.name, self.path):
            raise Refusal(f"base_model={name!r}: this server has {self.name}", 404)

    def check_lora(self, options: LoraOptions | None) -> None:
        """Raises Refusal for adapters other than those of the configuration."""
        if self.rank is None:
            if options is not None and options.rank != 0:
                raise Refusal(
                    f"rank={options.rank}: this server trains all weights (its configuration has no "
                    "model.adapter); ask for rank=0"
                )
            return
        if options is None or options.rank != self.rank:
            wish = "no adapters" if options is None else f"rank={options.rank}"
            raise Refusal(f"{wish}: this server trains adapters of rank {self.rank} (model.adapter.rank)")
        if options.seed is not None:
            raise Refusal(f"seed={options.seed}: all adapters begin with the server's own seed; leave it out")
        for option, wanted, trained in (
            ("train_attn", options.train_attn, any(layer in _OF_ATTENTION for layer in self.layers)),
            ("train_mlp", options.train_mlp, any(layer not in _OF_ATTENTION for layer in self.layers)),
        ):
            if wanted != trained:
                raise Refusal(
                    f"{option}={wanted}: this server's adapters are on {', '.join(self.layers)} "
                    "(model.adapter.targets)"
                )

    def check_weights(self, info: dict[str, Any]) -> None:
        """Raises Refusal for a checkpoint of another model, or of other adapters."""
        for key, value in self.weights_info().items():
            if info.get(key) != value:
                raise Refusal(f"the checkpoint has {key}={info.get(key)!r}, and this server {value!r}")

    def check_data(self, data: Sequence[Datum]) -> None:
        """Raises Refusal for sequences that the model cannot read."""
        if not data:
            raise Refusal("data is empty: give at least one datum")
        for i, datum in enumerate(data):
            if not datum.tokens:
                raise Refusal(f"data[{i}].model_input is empty; it needs at least one token")
            if len(datum.tokens) > self.positions:
                raise Refusal(
                    f"data[{i}] has {len(datum.tokens)} tokens, and the model {self.positions} positions"
                )
            self.check_tokens(f"data[{i}].model_input", datum.tokens)
            if (targets := datum.inputs.get("target_tokens")) is not None:
                self.check_tokens(f"data[{i}].loss_fn_inputs['target_tokens']", targets.tolist())

    def check_tokens(self, where: str, tokens: Sequence[int]) -> None:
        """Raises Refusal for tokens outside the vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            raise Refusal(f"{where} has a token that is not in the model's vocabulary [0, {self.vocabulary})")

    def info(self, model: ClientModel) -> dict[str, Any]:
        """The answer to get_info."""
        return {
            "type": "get_info",
            "model_data": {"arch": self.architecture, "model_name": self.name, "tokenizer_id": self.name},
            "model_id": model.model_id,
            "is_lora": self.rank is not None,
            "lora_rank": self.rank,
            "model_name": self.name,
        }

    def weights_info(self) -> dict[str, Any]:
        """The facts that a checkpoint must agree with, in the API's terms."""
        return {"base_model": self.name, "is_lora": self.rank is not None, "lora_rank": self.rank}
