"""The lengths of prompts and responses that fit together into the model."""

from __future__ import annotations

from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.config import Config

WITHOUT_LIMIT = 1024  # the longest prompt, in tokens, if neither configuration nor config.json limits it


def longest_prompt(config: Config, model: dict[str, Any]) -> int:
    """Tokens of the longest prompt: data.max_prompt_tokens, or the positions that responses leave.

    `model`: the model's config.json.
    """
    if config.data.max_prompt_tokens is not None:
        return config.data.max_prompt_tokens
    _, room = _room(config, model)
    return WITHOUT_LIMIT if room is None else room - max(_responses(config).values(), default=1)


def room_for_prompt(config: Config, model: dict[str, Any]) -> int | None:
    """Tokens that `eval.sampling.max_tokens` leaves for the prompt of an evaluation; None without a limit.

    `model`: the model's config.json.
    """
    _, room = _room(config, model)
    return None if room is None else room - config.eval.sampling.max_tokens


def check_lengths(config: Config, model: dict[str, Any]) -> None:
    """Raises ConfigError, which names the key to lower, if prompt and response exceed the model's limit."""
    where, room = _room(config, model)
    prompt = config.data.max_prompt_tokens
    if room is None:
        return
    if prompt is not None and prompt >= room:
        raise ConfigError(
            f"data.max_prompt_tokens={prompt} leaves nothing of {where}={room} for a response: lower it, or "
            "leave it out"
        )
    for name, tokens in _responses(config).items():
        if prompt is None and tokens >= room:
            raise ConfigError(
                f"{name}={tokens} leaves nothing of {where}={room} for a prompt: lower it to {room} less the "
                f"longest prompt's tokens{_default_of(config, name)}"
            )
        if prompt is not None and prompt + tokens > room:
            raise ConfigError(
                f"data.max_prompt_tokens={prompt} plus {name}={tokens} exceeds {where}={room}: lower {name} "
                f"to {room - prompt} or less{_default_of(config, name)}, or leave data.max_prompt_tokens out"
            )


def _responses(config: Config) -> dict[str, int]:
    """The longest responses that the run samples, by the key that says so."""
    responses = {}
    if config.algorithm.samples_from_policy:
        responses["rollout.max_tokens"] = config.rollout.max_tokens
    if config.data.eval is not None:
        responses["eval.sampling.max_tokens"] = config.eval.sampling.max_tokens
    return responses


def _room(config: Config, model: dict[str, Any]) -> tuple[str, int | None]:
    """The key that limits prompt and response together, as errors call it, and that limit in tokens."""
    positions, served = model.get("max_position_embeddings"), config.rollout.servers.context_length
    limits = [("the model's max_position_embeddings", positions)] if positions else []
    limits += [("rollout.servers.context_length", served)] if served and config.samples_responses else []
    return min(limits, key=lambda limit: limit[1], default=("", None))


def _default_of(config: Config, name: str) -> str:
    """The end of a message about a length that is a default, which the user may not have seen."""
    section = config.rollout if name.startswith("rollout") else config.eval.sampling
    return "" if "max_tokens" in section.model_fields_set else " (it is a default)"
