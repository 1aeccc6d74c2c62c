"""Settings of rollout servers, of the transport of weights to them, and of their speculative decoding.

`ENGINES` is the table of rollout engines, by `rollout.engine`.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from megatron_gvpo.core.lazy_imports import known
from megatron_gvpo.core.section import EVERY_KEY, MIB, LocalPath, Processes, Seconds, Section
from megatron_gvpo.settings.transports import TRANSPORTS, Traits, known_transport

# A server on several machines has further ports on machine 0: its own port plus these numbers.
AFTER_PORT = {"guards": 1, "ranks": 2}


class EngineServers(Section):
    """Servers of an engine: those that run at `urls`, or `count` that the trainer's first rank starts.

    Servers that the trainer started are stopped when the run ends.
    """

    free_keys = EVERY_KEY

    urls: tuple[str, ...] = ()  # Addresses of running servers; empty: the trainer starts its own.
    # Servers to start on a machine: beside the trainer's first rank, or on every node of `slurm` and `serve`.
    count: Processes = 1
    tp: PositiveInt = 1  # Tensor-parallel GPUs of one server.
    host: str = "127.0.0.1"  # The address on which started servers listen.
    # Port of the first started server; the others follow. 0 finds free ports.
    port: int = Field(0, ge=0, le=65535)
    python: str = "python"  # Interpreter of the engine's own environment.
    args: tuple[str, ...] = ()  # More arguments for the server's command line, in the engine's own words.
    # Longest prompt and response together, in tokens; default: the model's.
    context_length: PositiveInt | None = None
    api_key_env: str | None = None  # The environment variable with the key of the servers in `urls`.
    # Restarts of a started server before it is given up. An hour after the last, if it still answers, it has
    # as many again. The run ends when no server is left.
    restarts: NonNegativeInt = 3
    # Seconds in which a server must be healthy after its start or a failure.
    start_timeout: Seconds = 900.0
    # Seconds that one response may take, with its wait in the server's queue; then the server counts as lost.
    request_timeout: Seconds = 1800.0
    # Seconds without a healthy answer after which a server is restarted; must be longer than any push.
    hang_timeout: Seconds = 300.0

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        for url in self.urls:
            _check_address(url)
        if self.api_key_env is not None and not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env, re.ASCII):
            raise ValueError(  # without the value, which may be the key itself
                "api_key_env: expected the name of an environment variable (letters, digits and _), such as "
                "JUDGE_KEY; the key itself is in that variable"
            )
        if key := [word for word in self.args if re.match(r"--(\w+-)*(api-key|token|password)(=|$)", word)]:
            raise ValueError(
                f"args: {key[0].partition('=')[0]} would be on a command line, which all users of a machine "
                "can read: name the key's environment variable in servers.api_key_env"
            )
        parts = map(urlsplit, self.urls)
        if len({(url.scheme, url.netloc.lower(), url.path.rstrip("/")) for url in parts}) < len(self.urls):
            raise ValueError("urls: a server is named twice")
        if self.port and self.port + self.count - 1 > 65535:
            raise ValueError(f"port={self.port}: the last of count={self.count} would be beyond 65535")
        return self


class ServersConfig(EngineServers):
    """The servers of `rollout.engine: sglang` or `vllm`; `megatron-gvpo serve` starts some on other nodes."""

    # The checkpoint that servers start with; default: model.path. Name the same model in FP8 for FP8
    # rollouts.
    model_path: LocalPath | None = None
    # Run servers on the trainer's GPUs: they free their memory while it trains, and it frees its own while
    # they generate.
    colocated: bool = False
    # Accept a release of the engine that this package was not tested with.
    allow_untested_version: bool = False
    # Machines of one server, each with tp / nodes of its GPUs; `megatron-gvpo serve` runs on every one.
    nodes: PositiveInt = 1
    # This machine's number among them. Machine 0 has the server's HTTP interface.
    node: NonNegativeInt = 0
    leader: str | None = None  # Address of machine 0, for the others.
    # Seconds without a healthy answer after which a server counts as lost and others serve.
    health_timeout: Seconds = 30.0

    @model_validator(mode="after")
    def _machines(self) -> Self:
        if self.nodes == 1:
            if self.node or self.leader is not None:
                raise ValueError(
                    "node and leader are of a server on several machines: set nodes, or omit them"
                )
            return self
        if self.tp % self.nodes:
            raise ValueError(f"nodes={self.nodes}: does not divide tp={self.tp}, the GPUs of all machines")
        if self.count > 1:
            raise ValueError(
                f"count={self.count}: with nodes={self.nodes} a machine has a part of one server; set it to 1"
            )
        if self.colocated:
            raise ValueError(
                f"colocated=true: servers on the trainer's own GPUs are on one machine each; with "
                f"nodes={self.nodes} they need GPUs of their own"
            )
        if self.node >= self.nodes:
            raise ValueError(f"node={self.node}: nodes={self.nodes} are numbered from 0 to {self.nodes - 1}")
        if self.port + max(AFTER_PORT.values()) > 65535:
            raise ValueError(f"port={self.port}: the machines of a server meet at the two ports behind it")
        return self


def _check_address(url: str) -> None:
    """Raise ValueError for a text that is not a server's address alone."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"urls: {url!r} does not begin with http:// or https://")
    try:
        parts = urlsplit(url)
        port = parts.port  # raises ValueError if it is not a port
    except ValueError as error:
        raise ValueError(f"urls: {url!r}: {error}") from None
    if (
        not parts.hostname
        or port == 0
        or parts.query
        or parts.fragment
        or not url.isprintable()
        or " " in url
    ):
        raise ValueError(f"urls: {url!r}: expected http://HOST:PORT")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(
            f"urls: {url!r}: give the address without /v1, which the paths of requests begin with"
        )
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "urls: an address with a user or a password: servers take a key, whose "
            "environment variable servers.api_key_env names"
        )


class WeightSyncConfig(Section):
    """Settings of the push of new weights to the servers after every step."""

    fixed_keys = ("in_flight",)
    free_keys = ("transport", "bucket_mb", "address", "directory", "attempts", "timeout")

    # `broadcast`: to all servers in one process group. `sharded`: each rank sends the parts that it holds to
    # the server ranks that need them. `colocated`: the same through memory, for servers on the trainer's own
    # GPUs. `delta`: as `broadcast`, but only the changed elements. `shared`: all through memory of the
    # trainer's nodes, for servers there. `disk`: through files. `adapter`: files with only the adapter
    # (model.adapter); all others send the whole model with the adapter merged, or refuse it.
    transport: Annotated[str, AfterValidator(known_transport)] = "broadcast"
    # MiB of extra memory for a push: one half is filled while the other is sent.
    bucket_mb: int = Field(512, gt=0, le=2**20)
    # Address of the trainer's first rank, where servers meet it. Default: torchrun's MASTER_ADDR, or
    # loopback.
    address: str | None = None
    # Directory for the transports disk and adapter, which all nodes must see; the run creates its own below
    # it. Default: OUTPUT_DIR.
    directory: LocalPath | None = None
    # Responses in progress when a push comes: `wait` until they are finished, or stop them and `carry` them
    # on under the new weights.
    in_flight: Literal["wait", "carry"] = "carry"
    # Failed pushes in a row after which a server is restarted. The run stops after attempts x (servers + 1)
    # failed pushes in a row.
    attempts: PositiveInt = 3
    timeout: Seconds = 300.0  # Seconds for one part of a push, such as a bucket.

    @property
    def traits(self) -> Traits:
        return TRANSPORTS[self.transport]

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mb * MIB


# --- the section `rollout.speculation` ---------------------------------------------------------------------


class SpeculationConfig(Section):
    """Speculative decoding: a draft proposes tokens, and the policy accepts or replaces them.

    The distribution of responses and their log-probs are the same as without speculation. Source: Leviathan
    et al., arXiv 2211.17192.
    """

    free_keys = EVERY_KEY

    # The source of proposals. `ngram`: the text so far, where the last tokens occurred before. `suffix`: that
    # and earlier responses (vLLM, with arctic-inference). `draft`: a small model. `mtp`: the model's own
    # heads for further tokens. `eagle`: an EAGLE or EAGLE-3 head.
    method: Literal["ngram", "suffix", "draft", "mtp", "eagle"]
    tokens: int = Field(3, gt=0, le=64)  # Tokens proposed at a time, at most.
    # Checkpoint directory of the draft model or EAGLE head. It stays as it is while the policy trains.
    model: LocalPath | None = None

    @property
    def own_weights(self) -> bool:
        """True if the draft has its own weights on the servers, which pushes do not change."""
        return self.method in ("draft", "mtp", "eagle")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.method in ("draft", "eagle") and self.model is None:
            raise ValueError(f"method={self.method}: give its checkpoint directory as model")
        if self.method not in ("draft", "eagle") and self.model is not None:
            raise ValueError(
                f"model={self.model}: method={self.method} has no model of its own; leave it out"
            )
        return self


def run_directory(output_dir: str, weights: WeightSyncConfig) -> Path:
    """A directory of this run alone, because other runs may share `rollout.weights.directory`.

    The path is absolute, because servers may have been started in another directory.
    """
    out, shared = Path(output_dir).absolute(), weights.directory
    if shared is None:
        return out / "weights"
    digest = hashlib.blake2b(os.path.realpath(out).encode(), digest_size=4).hexdigest()
    return Path(shared).absolute() / f"{out.name}-{digest}"


SERVED = "megatron_gvpo.sampling.served:ServedEngine"  # the engine that asks servers for responses
ENGINES: dict[str, str] = {  # "module:class" for each value of `rollout.engine`
    "local": "megatron_gvpo.sampling.embedded:EmbeddedEngine",
    "sglang": SERVED,
    "vllm": SERVED,
}


def known_engine(name: str) -> str:
    """Returns a known name. Raises ValueError, which lists the engines, for any other."""
    return known(ENGINES, name)
