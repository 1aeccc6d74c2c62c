"""Checks before the first step that a rollout server fits the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_gvpo.config.checks.lengths import longest_prompt
from megatron_gvpo.config.schema import Config, ConfigError, read_model_config
from megatron_gvpo.rollout.http import ServerRefused
from megatron_gvpo.rollout.routed_experts import Routers
from megatron_gvpo.rollout.server import Server

TIMEOUT = 60.0  # seconds for one answer
# Keys of config.json; models that differ in one of them are different models.
SHAPE = (
    "architectures",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "tie_word_embeddings",
    "eos_token_id",
)


async def check_server(server: Server, config: Config, model: dict[str, Any]) -> None:
    """Compare the server's release, model and tokenizer with the run's. Raises ConfigError if they differ."""
    where = f"rollout server {server.url}"
    try:
        facts = await server.facts(TIMEOUT)
    except ServerRefused as error:
        raise ConfigError(
            f"{where} does not speak as rollout.engine={config.rollout.engine} does: {error}. Is it another "
            "engine, or does it want another key (rollout.servers.api_key_env)?"
        ) from None
    if facts.version not in server.tested and not config.rollout.servers.allow_untested_version:
        raise ConfigError(
            f"{where} runs {config.rollout.engine} {facts.version}; tested: {', '.join(server.tested)}. "
            "The interface changes between releases: use a tested one, or set "
            "rollout.servers.allow_untested_version=true and watch the mismatch metrics"
        )
    prompt = longest_prompt(config, model)
    needed = prompt + config.rollout.max_tokens
    if 0 < facts.context_length < needed:
        raise ConfigError(
            f"{where} has a context length of {facts.context_length} tokens; data.max_prompt_tokens="
            f"{prompt} plus rollout.max_tokens={config.rollout.max_tokens} need {needed}"
        )
    if config.rollout.router_replay:
        await _check_routing(server, config, model)
    served = Path(facts.model_path)
    if not (served / "config.json").is_file():  # on another machine; the first push compares log-probs
        return
    theirs = json.loads((served / "config.json").read_text())
    for key in SHAPE:
        if theirs.get(key) != model.get(key):
            raise ConfigError(
                f"{where} serves {facts.model_path} with {key}={theirs.get(key)!r}, but "
                f"model.path={config.model.path} has {key}={model.get(key)!r}: start it with the "
                "trainer's model"
            )
    expected = read_model_config(config.served_path).get("quantization_config")
    if theirs.get("quantization_config") != expected:
        raise ConfigError(
            f"{where} serves {facts.model_path} with quantization_config="
            f"{theirs.get('quantization_config')}, but {config.served_path} has {expected}: set "
            "rollout.servers.model_path to the model that the server serves"
        )
    ours, other = _vocabulary(Path(config.model.path)), _vocabulary(served)
    if ours and other and ours != other:
        differing = sorted(token for token, _ in ours.items() ^ other.items())[:5]
        raise ConfigError(
            f"{where} serves {facts.model_path} with another tokenizer than model.path={config.model.path}: "
            f"they differ in {', '.join(map(repr, differing))}"
        )


async def _check_routing(server: Server, config: Config, model: dict[str, Any]) -> None:
    """Sample one token, and check that the server returns the experts it was routed to."""
    try:
        sample = await server.sample([0], 1, 0, config.rollout, (), TIMEOUT)
        if sample.experts is None:
            raise ValueError("no experts: start it with --enable-return-routed-experts")
        Routers.of(model).pack(sample.experts, 1 + len(sample.token_ids))
    except (ServerRefused, ValueError) as error:
        raise ConfigError(
            f"rollout.router_replay=true: rollout server {server.url} answered with {error}"
        ) from None


def _vocabulary(directory: Path) -> dict[str, int]:
    """Token to id, special tokens included, from tokenizer.json; empty if the file does not exist."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return {}
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict):  # unigram models have a list of (token, score)
        vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
