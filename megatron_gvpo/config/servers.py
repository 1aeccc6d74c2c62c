"""Settings of rollout servers and of the way that weights take to them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_gvpo.config.section import Section
from megatron_gvpo.weights.transports import known_transport


class ServersConfig(Section):
    """The servers of `rollout.engine: sglang` or `vllm`.

    Without `urls` the trainer's first rank starts `count` servers beside itself and ends them with the run.
    With `urls` it uses servers that run already, such as those of `megatron-gvpo serve` on other nodes.
    """

    urls: tuple[str, ...] = ()
    count: PositiveInt = 1
    tp: PositiveInt = 1  # tensor parallel: GPUs of one server
    host: str = "127.0.0.1"  # the address that started servers listen on
    port: NonNegativeInt = 0  # of the first server, the others follow; 0: free ones are found
    model_path: str | None = None  # default: model.path; or the same model in FP8, for FP8 rollouts
    python: str = "python"  # interpreter of the engine's own environment
    args: tuple[str, ...] = ()  # further arguments of the server's own command line
    context_length: PositiveInt | None = None  # default: the model's
    # The servers have the trainer's own GPUs: they give their memory back while it trains, it gives its own
    # while they generate.
    colocated: bool = False
    api_key_env: str | None = None  # environment variable with the key of servers given by `urls`
    allow_untested_version: bool = False
    restarts: NonNegativeInt = 3  # of each started server, before the run gives up
    # Seconds.
    start_timeout: PositiveFloat = 900.0  # until a server is healthy, or back after a failure
    request_timeout: PositiveFloat = 1800.0  # one response
    health_timeout: PositiveFloat = 30.0  # without a healthy answer a server counts as lost: others serve
    hang_timeout: PositiveFloat = 300.0  # without one it is started anew; longer than any push

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"rollout.servers.urls: {url!r} does not begin with http:// or https://")
        if len(set(self.urls)) != len(self.urls):
            raise ValueError("rollout.servers.urls: a server is named twice")
        return self


class WeightSyncConfig(Section):
    """How new weights reach the servers after every step."""

    # broadcast: a process group with all servers; delta: the same, with only what changed; shared: memory of
    # the trainer's nodes, for servers on them; disk: files.
    transport: Annotated[str, AfterValidator(known_transport)] = "broadcast"
    bucket_mb: PositiveInt = 512  # extra memory of a push: one half is sent while the other is filled
    # Of the trainer's first rank, where servers meet it; default: torchrun's MASTER_ADDR, or loopback.
    address: str | None = None
    # Of the disk transport, which has one of the run's own in it; default: OUTPUT_DIR; all nodes must see it.
    directory: str | None = None
    in_flight: Literal["wait", "carry"] = "carry"
    # Responses under way when a push comes: finished first, or stopped and continued under the new weights.
    attempts: PositiveInt = 3  # of a push, before the run stops
    timeout: PositiveFloat = 300.0  # seconds for one step of a push, such as a bucket
