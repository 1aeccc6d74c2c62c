"""Checks before the first step that a rollout server fits the run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.data.image_files import ImageError
from megatron_gvpo.data.image_processor import ImageProcessor
from megatron_gvpo.data.task import Task
from megatron_gvpo.huggingface.adapter_layers import adapted_layers, adapter_of
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.huggingface.end_tokens import ids_in_files
from megatron_gvpo.huggingface.image_families import takes_images
from megatron_gvpo.huggingface.vocabulary import vocabulary
from megatron_gvpo.servers.answers import Routers
from megatron_gvpo.servers.http import TOO_EARLY, ServerRefused
from megatron_gvpo.servers.request_images import ImageSender, RequestImage
from megatron_gvpo.servers.server import Completion, Server, ServerInfo
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig
from megatron_gvpo.weights.receivers import receiver_class

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


async def check_server(
    server: Server, model: ModelConfig, rollout: RolloutConfig, cards: ModelCards, task: Task
) -> int:
    """Compare the server's release, model and tokenizer with the run's. Raises ConfigError if they differ.

    The server must end responses only at the tokens of `task`. Returns the most tokens of a prompt with its
    response, 0 if the server does not tell.
    """
    where = f"rollout server {server.url}"
    try:
        info = await server.info(TIMEOUT)
    except ServerRefused as error:
        raise ConfigError(
            f"{where} does not speak as rollout.engine={rollout.engine} does: {error}. Is it another "
            "engine, or does it want another key (rollout.servers.api_key_env)?"
        ) from None
    _check_release(where, server, info, rollout)
    prompt = task.longest_prompt
    needed = prompt + rollout.max_tokens
    if 0 < info.context_length < needed:
        raise ConfigError(
            f"{where} has room for {info.context_length} tokens of prompt and response (by its context "
            "length, or by SGLang's --mem-fraction-static and GPU memory if its log says that the KV pool "
            "holds fewer); data.max_prompt_tokens="
            f"{prompt} plus rollout.max_tokens={rollout.max_tokens} need {needed}"
        )
    await _check_speculation(server, rollout.speculation is not None)
    if rollout.weights.traits.sends_adapter:
        await _check_adapters(server, model, rollout, cards.policy)
    # A server that an earlier trainer left in mid push samples nothing yet. Its first responses are checked.
    with contextlib.suppress(_WaitsForWeights):
        if rollout.router_replay:
            await _check_routing(server, rollout, cards.policy)
        if rollout.wants_support:
            await _check_support(server, rollout)
        if takes_images(cards.policy):
            await _check_image(server, model.path, rollout, cards.policy)
    served = Path(info.model_path)
    # A directory on another machine is not compared here; the first push compares log-probs.
    if (served / "config.json").is_file():
        _check_files(where, served, model.path, cards, task.end_token_ids)
    return info.context_length


def _check_release(where: str, server: Server, info: ServerInfo, rollout: RolloutConfig) -> None:
    """Check the server's release and the number of its HTTP processes. Raises ConfigError."""
    if info.version not in server.tested and not rollout.servers.allow_untested_version:
        raise ConfigError(
            f"{where} runs {rollout.engine} {info.version}; tested: {', '.join(server.tested)}. "
            "The interface changes between releases: use a tested one, or set "
            "rollout.servers.allow_untested_version=true and watch the mismatch metrics"
        )
    if info.http_processes > 1:
        raise ConfigError(
            f"{where} has {info.http_processes} HTTP processes (--tokenizer-worker-num), each of which sees "
            "a part of a weight push and asks for no key: start it with one"
        )


def _check_files(
    where: str, served: Path, path: str, cards: ModelCards, end_token_ids: Sequence[int]
) -> None:
    """Compare the directory of the served model with the policy's, `path`. Raises ConfigError."""
    model = cards.policy
    is_configured = served == Path(cards.served_path)
    other_config = cards.served if is_configured else ModelCard.read(served, where)
    for key in SHAPE:
        if other_config.get(key) != model.get(key):
            raise ConfigError(
                f"{where} serves {served} with {key}={other_config.get(key)!r}, but "
                f"model.path={path} has {key}={model.get(key)!r}: start it with the "
                "trainer's model"
            )
    if further := [number for number in ids_in_files(served, other_config) if number not in end_token_ids]:
        raise ConfigError(
            f"{where} serves {served}, whose eos_token_id in config.json or generation_config.json "
            f"has {further[0]}, at which responses of model.path={path} do not end: make the "
            "files alike, or name the token in rollout.stop_token_ids"
        )
    expected = cards.served.get("quantization_config")
    if other_config.get("quantization_config") != expected:
        raise ConfigError(
            f"{where} serves {served} with quantization_config="
            f"{other_config.get('quantization_config')}, but {cards.served_path} has {expected}: set "
            "rollout.servers.model_path to the model that the server serves"
        )
    if takes_images(model):
        _check_processor(where, served, path)
    _check_vocabulary(where, served, path)


def _check_vocabulary(where: str, served: Path, path: str) -> None:
    """Compare the tokenizers of the two directories, where both have a vocabulary. Raises ConfigError."""
    own, other = vocabulary(Path(path)), vocabulary(served)
    if own and other and own != other:
        differing = sorted(token for token, _ in own.items() ^ other.items())[:5]
        raise ConfigError(
            f"{where} serves {served} with another tokenizer than model.path={path}: "
            f"they differ in {', '.join(map(repr, differing))}"
        )


async def _check_speculation(server: Server, wanted: bool) -> None:
    try:
        speculates = await server.speculates(TIMEOUT)
    except ServerRefused as error:
        raise ConfigError(f"rollout server {server.url} does not tell if it speculates: {error}") from None
    if speculates != wanted:
        has = "speculates" if speculates else "does not speculate"
        set_to = "set" if wanted else "not set"
        raise ConfigError(
            f"rollout server {server.url} {has}, and rollout.speculation is {set_to}: start it with "
            "`megatron-gvpo serve` and this configuration"
        )


class _WaitsForWeights(Exception):  # noqa: N818 - a state of the server
    """The server samples nothing before a whole push."""


async def _sampled(
    server: Server,
    token_ids: Sequence[int],
    rollout: RolloutConfig,
    timeout: float,
    images: Sequence[RequestImage] = (),
) -> Completion:
    """One token that the server samples. Raises ServerRefused, ServerGone, _WaitsForWeights."""
    try:
        return await server.sample(token_ids, 1, 0, rollout, (), timeout, images)
    except ServerRefused as error:
        if error.status == TOO_EARLY:
            raise _WaitsForWeights from None
        raise


async def _check_routing(server: Server, rollout: RolloutConfig, card: ModelCard) -> None:
    """Sample one token, and check that the server returns the experts it was routed to."""
    try:
        sample = await _sampled(server, [0], rollout, TIMEOUT)
        if sample.experts is None:
            raise ValueError("no experts: start it with --enable-return-routed-experts")
        Routers.of(card).pack(sample.experts, 1 + len(sample.token_ids))
    except (ServerRefused, ValueError) as error:
        raise ConfigError(
            f"rollout.router_replay=true: rollout server {server.url} answered with {error}"
        ) from None


async def _check_support(server: Server, rollout: RolloutConfig) -> None:
    """Sample one token, and check that the server returns the tokens from which it was sampled."""
    try:
        sample = await _sampled(server, [0], rollout, TIMEOUT)
        if sample.support is None:
            raise ValueError("no tokens that it could have sampled")
    except (ServerRefused, ValueError) as error:
        raise ConfigError(
            f"rollout.top_p, top_k or min_p: rollout server {server.url} answered with {error}: start it "
            "with `megatron-gvpo serve` and this configuration"
        ) from None


async def _check_image(server: Server, path: str, rollout: RolloutConfig, card: ModelCard) -> None:
    """Sample one token for a prompt with an image, which the server must cut into the trainer's tokens."""
    sender = ImageSender(path, card)
    images = sender.sent([sender.picture()])
    prompt = [card["vision_start_token_id"], *[sender.placeholder] * images[0].tokens]
    prompt.append(card.get("vision_end_token_id") or card["vision_start_token_id"])
    try:
        await _sampled(server, prompt, rollout, rollout.servers.request_timeout, images)
    except ServerRefused as error:
        raise ConfigError(f"rollout server {server.url} does not take an image: {error}") from None


def _check_processor(where: str, served: Path, path: str) -> None:
    try:
        server_settings = ImageProcessor(str(served)).settings
    except ImageError as error:
        raise ConfigError(f"{where}: {error}") from None
    for key, value in ImageProcessor(path).settings.items():
        if server_settings[key] != value:
            raise ConfigError(
                f"{where} serves {served} with {key}={server_settings[key]} in preprocessor_config.json, but "
                f"model.path={path} has {value}: start it with the trainer's model"
            )


async def _check_adapters(
    server: Server, model: ModelConfig, rollout: RolloutConfig, card: ModelCard
) -> None:
    transport = rollout.weights.transport
    receiver: Any = receiver_class(rollout.engine, transport)(server)
    layers = adapted_layers(model, card)
    refusal = await receiver.refusal(adapter_of(model).rank, layers, TIMEOUT)
    if refusal is not None:
        raise ConfigError(
            f"rollout.weights.transport={transport}: rollout server {server.url} takes no such adapters: "
            f"{refusal}. Start it with `megatron-gvpo serve` and this configuration"
        )
