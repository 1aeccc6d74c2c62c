"""What the project needs of a rollout server: the part of it that SGLang and vLLM do differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from megatron_gvpo.config.schema import Config, SamplingConfig
from megatron_gvpo.rollout.http import Http

MemoryPart = Literal["weights", "cache"]  # of what a server holds on an accelerator
# Of a bucket: a file in shared memory; or memory of a GPU that both see, with a handle for each of the
# server's ranks (megatron_gvpo.weights.ipc).
SharedPlace = Path | list[dict[str, Any]]
PLUGINS = Path(__file__).parent / "plugins"  # on the servers' PYTHONPATH: nothing to install there


@dataclass(frozen=True)
class Sample:
    """One response as the server gave it; "abort" means that it was stopped from outside: incomplete."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop", "length" or "abort"
    version: str | None = None  # of the weights, where the server says it
    experts: np.ndarray | None = None  # integers [prompt and response - 1, layers, experts a token]


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself."""

    version: str  # of its software
    model_path: str
    context_length: int
    processes: int  # ranks that receive weights


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a weight push, by its Hugging Face name."""

    name: str
    dtype: str  # "bfloat16", "float32", ...
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Patch:
    """Changes of one tensor: `count` elements, by position and value; -1: all of it, by value."""

    spec: TensorSpec
    count: int


@dataclass(frozen=True)
class Rendezvous:
    """Where the trainer (rank 0) and the ranks of the servers form a process group for the weights."""

    address: str
    port: int
    world_size: int
    name: str  # never used twice in a run: a refused broadcast would become the next one's data
    backend: str  # "gloo" or "nccl"


@dataclass(frozen=True)
class Launch:
    """How to start a server of one's own."""

    command: list[str]
    environment: dict[str, str]
    secret: str = ""  # to be read from a YAML file of this user's alone, whose path then ends the command


class Server(Protocol):
    """The dialect of one kind of server, spoken to one of them. Raises ServerRefused and ServerGone.

    `timeout` is in seconds, everywhere.
    """

    tested: ClassVar[Sequence[str]]  # releases that this dialect was read from and tested with

    def __init__(self, http: Http) -> None: ...

    @property
    def url(self) -> str: ...

    @staticmethod
    def group_prefixes(meeting: Rendezvous) -> Sequence[str]:
        """What its ranks put before their keys in the store where the process group meets."""

    @staticmethod
    def launch(config: Config, port: int, api_key: str | None, on_gpu: bool) -> Launch:
        """The command that starts such a server on `rollout.servers.host`:`port`."""

    async def healthy(self, timeout: float) -> bool:
        """Whether it is up and its model process answers."""

    async def facts(self, timeout: float) -> ServerInfo: ...

    async def sample(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        seed: int,
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        timeout: float,
    ) -> Sample:
        """One response of at most `max_tokens` tokens; the stop token, where one was met, is its last.

        With `sampling.wants_routing` its experts come with it, unless it was aborted.
        """

    async def score(self, token_ids: Sequence[int], timeout: float) -> list[float]:
        """Log-probs at temperature 1 of all tokens but the first, given those before them."""

    async def abort(self, timeout: float) -> None:
        """End all requests in flight: they answer with what they have, as "abort"."""

    async def pause(self, timeout: float) -> None:
        """Stop generating, ending what is in flight as `abort` does; requests that come now wait."""

    async def resume(self, timeout: float) -> None: ...

    async def flush_cache(self, timeout: float) -> None:
        """Forget the prefixes computed with older weights. Nothing may be in flight."""

    async def weight_version(self, timeout: float) -> str: ...

    async def join(self, meeting: Rendezvous, rank_offset: int, timeout: float) -> None:
        """Form the process group; answers when all its ranks are there."""

    async def leave(self, meeting: Rendezvous, timeout: float) -> None: ...

    async def begin_update(self, timeout: float) -> None: ...

    async def receive(self, specs: Sequence[TensorSpec], meeting: Rendezvous, timeout: float) -> None:
        """Take the broadcast of one bucket of tensors; answers when they are loaded."""

    async def join_for_patches(self, meeting: Rendezvous, rank_offset: int, timeout: float) -> None:
        """As `join`, for a group that carries patches."""

    async def leave_patches(self, meeting: Rendezvous, timeout: float) -> None: ...

    async def receive_patches(
        self, patches: Sequence[Patch], size: int, meeting: Rendezvous, timeout: float
    ) -> None:
        """Take a broadcast of `size` bytes: the int32 positions of all patches, then their values."""

    async def check_patches(self, timeout: float) -> None:
        """All patches of a push have come: refuse them where they changed more than they name."""

    async def end_update(self, version: str, timeout: float) -> None:
        """The weights are complete, and this is their version."""

    async def tell_gpus(self, file: Path, timeout: float) -> None:
        """Each of its ranks writes the UUIDs of the GPUs that it sees, as JSON, into `file` with a suffix."""

    async def receive_shared(self, specs: Sequence[TensorSpec], place: SharedPlace, timeout: float) -> None:
        """Take one bucket of tensors, their bytes one after another, from where both can map them."""

    async def release_memory(self, timeout: float) -> None:
        """Give the accelerator's memory back, with what was in it. It is paused, and nothing is in flight."""

    async def reclaim_memory(self, part: MemoryPart, timeout: float) -> None:
        """Take a released part again, empty; once each."""

    async def load_directory(self, directory: Path, version: str, timeout: float) -> None:
        """Take the weights from safetensors files."""


def finish(reason: Any) -> str:
    """A server's finish reason as one of ours."""
    return reason if reason in ("stop", "length") else "abort"
