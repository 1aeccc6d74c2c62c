"""The `Server` protocol: everything that SGLang and vLLM do differently, weights aside.

Weights reach a server through its receivers (megatron_gvpo.weights.receivers).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol
from zipfile import BadZipFile

import numpy as np

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.http import Http, ServerGone, ServerRefused
from megatron_gvpo.servers.request_images import RequestImage, difference
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig, SamplingConfig
from megatron_gvpo.settings.servers import AFTER_PORT, EngineServers, ServersConfig
from megatron_gvpo.supports import Support

MemoryPart = Literal["weights", "cache"]  # the parts of a server's accelerator memory
PLUGINS = Path(__file__).parent / "plugins"  # goes on the servers' PYTHONPATH; nothing is installed there
# Options in every request. vLLM takes missing options from the model's generation_config.json, such as the
# top_k and the penalty of Qwen2.5, and SGLang from --preferred-sampling-params: they would sample another
# policy.
PLAIN = {
    "top_k": -1,  # all tokens
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# The range of log-probs, in nats, that are accepted. Engines compute log-softmax in fp32, whose 24 bits leave
# an error of 1e-7 for usual logits, and of about 1e-3 for logits in the thousands; a likely token's log-prob
# may exceed 0 by as much. A sampler draws no token below -104, the logarithm of the least number of fp32;
# vLLM writes -9999 for minus infinity.
HIGHEST_LOGPROB, LOWEST_LOGPROB = 1e-3, -1e4
RETRY = 0.05  # seconds between attempts to drop the prefix cache


@dataclass(frozen=True)
class Completion:
    """One response from a server. "abort" means that a client stopped it: it is incomplete."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop", "length" or "abort"
    version: str | None = None  # the version of the weights that sampled it, if the server reports it
    experts: np.ndarray | None = None  # integers [prompt + response - 1, layers, experts per token]
    cached: int | None = None  # prompt tokens that its prefix cache had, if the server reports it
    support: Support | None = None  # with truncated sampling: the tokens over which `logprobs` are normalised
    stop_string: str | None = None  # the stop string at which the server ended the response, if any

    def __post_init__(self) -> None:
        """Raises ValueError or TypeError for values that no engine can have sent."""
        for index, token in enumerate(self.token_ids):
            if type(token) is not int or not 0 <= token < 2**31:
                raise ValueError(f"{shortened(token)} at index {index} of the response is not a token id")
        log_probs(self.logprobs)
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens with {len(self.logprobs)} log-probs")
        if self.cached is not None and not (type(self.cached) is int and self.cached >= 0):
            raise ValueError("the count of cached tokens is not an integer from 0")
        if not self.token_ids and self.finish_reason != "abort":
            raise ValueError("a finished response without any token")
        if self.support is not None and (problem := self.support.problem(self.token_ids)) is not None:
            raise ValueError(problem)

    def up_to_stop(self, stops: Sequence[int]) -> Completion:
        """The sample up to its first stop token.

        An engine that stops a response for its client does not check the tokens of that step for a stop
        token. With speculation there may be several.
        """
        end = next((i + 1 for i, token in enumerate(self.token_ids) if token in stops), len(self.token_ids))
        return self._first(end)

    def ended_elsewhere(self, stops: Sequence[int]) -> str | None:
        """The problem if the server ended the response at another token than these, and at no string."""
        if self.finish_reason != "stop" or self.stop_string is not None or self.token_ids[-1] in stops:
            return None
        return (
            f"ended a response at token {self.token_ids[-1]}, and the run's end at "
            f"{', '.join(map(str, stops))}: its model has another eos_token_id in config.json or "
            "generation_config.json than model.path; make the files alike, or name the token in "
            "rollout.stop_token_ids"
        )

    def first(self, count: int) -> Completion:
        """The first `count` tokens, with which the response ends."""
        dropped = len(self.token_ids) - count
        experts = self.experts if self.experts is None or not dropped else self.experts[:-dropped]
        return replace(self._first(count), experts=experts, finish_reason="stop")

    def before(self, token: int) -> Completion:
        """An aborted sample up to the first of these tokens."""
        return self._first(self.token_ids.index(token) if token in self.token_ids else len(self.token_ids))

    def _first(self, tokens: int) -> Completion:
        support = None if self.support is None else self.support.parts([(0, tokens)])
        return replace(
            self, token_ids=self.token_ids[:tokens], logprobs=self.logprobs[:tokens], support=support
        )


@dataclass(frozen=True)
class ServerInfo:
    """A server's description of itself."""

    version: str  # the engine's release
    model_path: str
    context_length: int
    processes: int  # ranks that receive weights
    http_processes: int = 1  # processes that take requests

    def __post_init__(self) -> None:
        """Raises ValueError for values that a server cannot have."""
        for name in ("version", "model_path"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is not a string")
        for name, least in (("context_length", 0), ("processes", 1), ("http_processes", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**31:
                raise ValueError(f"{name} is not an integer from {least}")


@dataclass(frozen=True)
class Launch:
    """The command line and environment that start a server."""

    command: list[str]
    environment: dict[str, str]
    # YAML text that only this user may read. The supervisor writes it to a file and appends the file's path
    # to the command.
    secret: str = ""
    key: str = ""  # the API key, which is removed from the server's log


def meeting_of_ranks(servers: ServersConfig) -> tuple[str, int]:
    """The address of machine 0, and the port at which a server's ranks on several machines meet there."""
    return servers.leader or servers.host, servers.port + AFTER_PORT["ranks"]


def refuse_http_processes(servers: EngineServers, option: str, key: str) -> None:
    """Raise ConfigError if `servers.args` ask for several HTTP processes by `option`.

    Each process sees a part of the requests of a weight push. SGLang's additional processes do not check the
    API key. `key`: the configuration's, of `servers`.
    """
    words = " ".join([*servers.args, ""]).replace("_", "-")
    if re.search(rf"(^| ){option}[ =](?!1 )", words):
        raise ConfigError(
            f"{key}.args: {option} would give a server several HTTP processes, and a weight push and its API "
            f"key need one: leave it out, and start more servers with {key}.count"
        )


class Server(Protocol):
    """A client of one server, in its engine's dialect. Every `timeout` is in seconds.

    The methods raise ServerRefused for an answer that is a refusal, ServerGone for no answer.
    """

    tested: ClassVar[Sequence[str]]  # the engine's releases that this dialect was tested with

    def __init__(self, http: Http, keeps_weights: bool = False) -> None:
        """`keeps_weights`: offloaded weights wait in host memory, because no push brings all of them."""

    @property
    def http(self) -> Http:
        """The connection to the server; its weight receivers use it, too."""

    @property
    def url(self) -> str: ...

    @staticmethod
    def launch(
        model: ModelConfig,
        rollout: RolloutConfig,
        cards: ModelCards,
        port: int,
        api_key: str | None,
        on_gpu: bool,
    ) -> Launch:
        """The command that starts such a server on `rollout.servers.host`:`port`."""

    async def check_health(self, timeout: float) -> None:
        """Return if the server is up and its model process answers."""

    async def info(self, timeout: float) -> ServerInfo: ...

    def use_adapter(self, name: str) -> None:
        """Make `sample` and `score` name this adapter from now on, in place of the model itself.

        They raise ServerGone if the server does not have it: the server has restarted.
        """

    async def sample(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        seed: int,
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        timeout: float,
        images: Sequence[RequestImage] = (),
    ) -> Completion:
        """Sample one response of at most `max_tokens` tokens.

        A stop token ends the response and is its last token.

        The strings `sampling.stop` end it where the server sees one (see `StopStrings`).
        With `sampling.wants_routing` the sample has its experts, unless it was aborted; with
        `sampling.wants_support` its supports, and log-probs over them. `token_ids` have all
        tokens of the `images`. Raises ServerRefused if the server makes other tokens of them.
        """

    async def score(self, token_ids: Sequence[int], timeout: float, first: int = 1) -> list[float]:
        """Log-probs at temperature 1 of the tokens from index `first` on, each after the tokens before it."""

    async def speculates(self, timeout: float) -> bool:
        """True if it decodes speculatively.

        Raises ConfigError if it accepts drafted tokens in a way that changes the policy's distribution.
        """

    async def drafts(self, timeout: float) -> Drafts:
        """The tokens that it has drafted and accepted so far; zeros where it does not speculate."""

    async def abort(self, timeout: float) -> None:
        """End all requests in flight.

        The stopped requests are answered with the tokens so far and the finish reason "abort".
        """

    async def pause(self, timeout: float) -> None:
        """Stop generating. Requests in flight end as in `abort`; new requests wait for `resume`."""

    async def resume(self, timeout: float) -> None: ...

    async def flush_cache(self, timeout: float) -> None:
        """Drop the prefix cache, which older weights computed. It waits for requests in flight to end.

        Raises ServerRefused if some have not ended within the timeout.
        """

    async def weight_version(self, timeout: float) -> str: ...

    async def offload_memory(self, timeout: float) -> None:
        """Free the accelerator memory of weights and cache; their contents are lost.

        The server is paused, and nothing is in flight. With `keeps_weights` the model's are kept on the host.
        """

    async def onload_memory(self, part: MemoryPart, timeout: float) -> None:
        """Allocate the memory of an offloaded part again, without its content. Each part is onloaded once."""


async def drop_cache(url: str, attempt: Callable[[], Awaitable[bool]], timeout: float) -> None:
    """Call `attempt` until it is true: an engine keeps its prefix cache while a request holds some of it.

    Such a request may be an aborted one, or a health check's. `url` is for the error, ServerRefused.
    """
    deadline = time.monotonic() + timeout
    while not await attempt():
        if time.monotonic() > deadline:
            raise ServerRefused(
                f"{url}: the cache of older weights was not dropped within {timeout:g} s, because requests "
                "still hold parts of it",
                503,
            )
        await asyncio.sleep(RETRY)


@contextmanager
def answer_of(server: Server, path: str) -> Iterator[None]:
    """Turn errors in reading an answer into ServerRefused: the server is not the engine that it should be."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, EOFError, OverflowError, BadZipFile) as error:
        raise ServerRefused(
            f"{server.url}{path}: its answer lacks fields that the engine's has, or has others "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})",
            502,
        ) from None


def check_prompt(server: Server, sent: Sequence[int], used: Any, images: Sequence[RequestImage]) -> None:
    """Raise ServerRefused if a prompt with images that a server used is not the trainer's."""
    if problem := difference(sent, used, images[0].placeholder):
        raise ServerRefused(
            f"{server.url}: {problem}: start it with the trainer's model, whose preprocessor_config.json "
            "says how images are cut into patches",
            400,
        )


@contextmanager
def named_adapter(server: Server, name: str | None) -> Iterator[None]:
    """Turn a refusal that names the adapter into ServerGone: the server had it, so it has restarted."""
    try:
        yield
    except ServerRefused as error:
        if name is None or name not in str(error):
            raise
        raise ServerGone(f"{server.url} has restarted, without the adapter {name}: {error}") from None


def log_probs(values: Iterable[Any]) -> list[float]:
    """The values, each the log-prob of a token. Raises ValueError, which names the first wrong one."""
    logprobs = list(values)
    for index, value in enumerate(logprobs):
        if type(value) not in (int, float) or not LOWEST_LOGPROB <= value <= HIGHEST_LOGPROB:
            raise ValueError(
                f"{shortened(value)} at index {index} is not a log-prob, which is a number from "
                f"{LOWEST_LOGPROB:g} to 0"
            )
    return logprobs


def shortened(value: Any) -> str:
    """Shorten a value of an answer for an error message."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of over 40 digits"
    return text if len(text) <= 80 else f"{text[:80]}..."


def finish(reason: Any) -> str:
    """A server's finish reason: "stop", "length" or "abort". Raises ValueError for any other."""
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {shortened(reason)}, which is not stop, length or abort")
    return str(reason)


@dataclass(frozen=True)
class Drafts:
    """Counts of a server since its start."""

    rounds: int = 0  # verifications, each of which gives the accepted tokens and one more of the policy
    drafted: int = 0  # tokens proposed
    accepted: int = 0  # tokens of those that the policy accepted

    def __post_init__(self) -> None:
        """Raises ValueError for values that a server cannot have."""
        if not all(type(n) is int and 0 <= n < 2**63 for n in (self.rounds, self.drafted, self.accepted)):
            raise ValueError("counts of drafted tokens are not integers from 0")

    def __add__(self, other: Drafts) -> Drafts:
        rounds, drafted = self.rounds + other.rounds, self.drafted + other.drafted
        return Drafts(rounds, drafted, self.accepted + other.accepted)

    def since(self, earlier: Drafts) -> Drafts:
        """The counts since `earlier`; all counts if the server has restarted, and counts from 0 again."""
        if self.rounds < earlier.rounds or self.drafted < earlier.drafted or self.accepted < earlier.accepted:
            return self
        rounds, drafted = self.rounds - earlier.rounds, self.drafted - earlier.drafted
        return Drafts(rounds, drafted, self.accepted - earlier.accepted)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of acceptance and of tokens from a verification; empty if nothing was drafted."""
        if not self.drafted or not self.rounds:
            return {}
        return {
            "speculation/acceptance": self.accepted / self.drafted,
            "speculation/length": 1 + self.accepted / self.rounds,
        }
