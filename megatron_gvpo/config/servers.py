"""Settings of rollout servers, and of the transport of weights to them."""

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

    urls: tuple[str, ...] = ()  # Addresses of servers that run already; empty: the trainer starts its own.
    count: PositiveInt = 1  # Servers to start.
    tp: PositiveInt = 1  # Tensor-parallel GPUs of one server.
    host: str = "127.0.0.1"  # The address that started servers listen on.
    port: NonNegativeInt = 0  # Port of the first started server; the others follow. 0 finds free ports.
    # The checkpoint that servers start with; default: model.path. Name the same model in FP8 for FP8
    # rollouts.
    model_path: str | None = None
    python: str = "python"  # Interpreter of the engine's own environment.
    args: tuple[str, ...] = ()  # Further arguments of the server's own command line.
    # Longest prompt and response together, in tokens; default: the model's.
    context_length: PositiveInt | None = None
    # Servers run on the trainer's GPUs. They give their memory back while it trains, and it gives its own
    # back while they generate.
    colocated: bool = False
    api_key_env: str | None = None  # The environment variable with the key of the servers in `urls`.
    # Accept a release of the engine that this package was not tested with.
    allow_untested_version: bool = False
    restarts: NonNegativeInt = 3  # Restarts of each started server before the run gives up.
    start_timeout: PositiveFloat = 900.0  # Seconds until a server must be healthy, or back after a failure.
    request_timeout: PositiveFloat = 1800.0  # Seconds that one response may take.
    # Seconds without a healthy answer after which a server counts as lost and others serve.
    health_timeout: PositiveFloat = 30.0
    # Seconds without a healthy answer after which a server is started anew; longer than any push.
    hang_timeout: PositiveFloat = 300.0

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

    # `broadcast`: a process group with all servers. `delta`: the same, with only the changed elements.
    # `shared`: memory of the trainer's nodes, for servers on them. `disk`: files.
    transport: Annotated[str, AfterValidator(known_transport)] = "broadcast"
    # MiB of extra memory for a push: one half is sent while the other is filled.
    bucket_mb: PositiveInt = 512
    # Address of the trainer's first rank, where servers meet it. Default: torchrun's MASTER_ADDR, or
    # loopback.
    address: str | None = None
    # Directory of the disk transport, which all nodes must see; the run makes one of its own in it. Default:
    # OUTPUT_DIR.
    directory: str | None = None
    # Responses under way when a push comes: wait until they are finished, or stop them and carry them on
    # under the new weights.
    in_flight: Literal["wait", "carry"] = "carry"
    # Failed pushes in a row after which a server is replaced. The run stops after attempts x (servers + 1)
    # failed pushes in a row.
    attempts: PositiveInt = 3
    timeout: PositiveFloat = 300.0  # Seconds for one part of a push, such as a bucket.
