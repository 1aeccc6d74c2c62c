"""Reduces the sizes above which libraries and this package act otherwise, so that a tiny model exceeds them.

    with small_constants():
        ...

A bucket of Megatron closes at 40 million elements, an export's file at 5 GiB: a model of 30,000 elements has
one bucket and one file, and a test on it shows nothing about a second one. `CONSTANTS` lists such sizes;
docs/explanation/audit.md names those that were left out, and why.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

MIB = 2**20


@dataclass(frozen=True)
class Constant:
    """A size in the code: `module:NAME`, or `module:function(parameter)` for a parameter's default."""

    location: str
    real: object
    small: object
    meaning: str


CONSTANTS = [
    Constant(
        "megatron.core.distributed:DistributedDataParallelConfig.__init__(bucket_size)",
        None,  # DistributedDataParallel then takes max(40_000_000, 1_000_000 * ranks)
        2000,
        # The output layer of the tiny models has more elements, even one of its two shards: an untied layer
        # fills the first bucket alone, as that of a large model does.
        "elements at which Megatron closes a bucket of gradients and gathered weights",
    ),
    Constant(
        "megatron_gvpo.kernels.head:_CPU_LOGITS",
        288 * MIB,
        4000,
        "bytes of one tile of logits in the head",
    ),
    Constant("megatron_gvpo.settings.sections:MIB", MIB, 2, "unit of train.head_stash_mb: 2 KiB of stash"),
    Constant("megatron_gvpo.settings.servers:MIB", MIB, 2**13, "unit of rollout.weights.bucket_mb"),
    Constant(
        "megatron_gvpo.megatron.model.model:Model.save_hf(shard_bytes)",
        5 * 2**30,
        20_000,
        "bytes of one safetensors file of an export",
    ),
    Constant(
        "megatron_gvpo.megatron.checkpoint.storage:_LARGE",
        MIB,
        1000,
        "bytes from which on a checkpoint's tensor is written and read without a copy",
    ),
    Constant(
        "megatron_gvpo.huggingface.complete_weights:_ROWS",
        4096,
        7,
        "rows of a stored output layer that are compared at a time with tied embeddings",
    ),
    Constant("megatron_gvpo.data.prompts:_AT_ONCE", 1024, 5, "records that are tokenised in one call"),
    Constant("megatron_gvpo.rewards.pool:_CHUNK", 32, 2, "rewards that are ordered from a worker at once"),
    Constant("megatron_gvpo.workers.messages:_SHORT", 2**16, 100, "bytes of an order that needs no file"),
]


@dataclass(frozen=True)
class ServerOption:
    """A size of a rollout server: an option of its command line, or an environment variable."""

    name: str
    real: str
    small: str
    meaning: str


_PART = "tokens of a prompt that are computed at once; a longer prompt is computed in parts"
# A step's requests do not fit the cache, which holds little more than one response of the longest length.
SERVER_OPTIONS = {
    "sglang": [
        ServerOption("--chunked-prefill-size", "2048 to 16384, by GPU", "16", _PART),
        ServerOption("--max-prefill-tokens", "16384", "24", "tokens of new prompts in one batch"),
        ServerOption("--max-total-tokens", "by GPU memory", "240", "tokens in the cache"),
        ServerOption("SGLANG_LOGPROB_CHUNK_SIZE", "2048", "5", "rows of logits of a prompt at once"),
        # The share of max_tokens that the server expects a new request to need; when requests need more, it
        # takes some back.
        ServerOption("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "4096", "4", "tokens set aside for a request"),
    ],
    # Chunked prefill is off on CPUs, where it would end vLLM (servers/vllm.py).
    "vllm": [
        ServerOption("--block-size", "by GPU", "32", "tokens of a block of the cache"),
        ServerOption("--num-gpu-blocks-override", "by GPU memory", "10", "blocks of the cache"),
        ServerOption("--max-model-len", "the model's", "256", "tokens of a prompt and its response"),
    ],
}


def small_servers(engine: str) -> tuple[str, dict[str, str]]:
    """Return an override of the configuration, and environment variables, for servers with small sizes."""
    options = [option for option in SERVER_OPTIONS[engine] if option.name.startswith("--")]
    variables = {o.name: o.small for o in SERVER_OPTIONS[engine] if o not in options}
    arguments = [word for option in options for word in (option.name, option.small)]
    return f"rollout.servers.args={json.dumps(arguments)}", variables


@contextlib.contextmanager
def small_constants() -> Iterator[None]:
    """Context with small sizes in place of CONSTANTS.

    Raises AssertionError for a size that is not the real one.
    """
    with contextlib.ExitStack() as stack:
        for constant in CONSTANTS:
            read, write = _accessors(constant.location)
            assert read() == constant.real, f"{constant.location} is {read()}, and not {constant.real}"
            write(constant.small)
            stack.callback(write, constant.real)
        yield


@contextlib.contextmanager
def a_bucket_for_each_weight() -> Iterator[None]:
    """Context in which Megatron closes a bucket after every weight, inside `small_constants`.

    A module that reads a weight without the hook that waits for its bucket is noticed in whichever bucket
    the weight is.
    """
    _, write = _accessors(CONSTANTS[0].location)
    write(1)
    try:
        yield
    finally:
        write(CONSTANTS[0].small)


@contextlib.contextmanager
def late_gathers() -> Iterator[set[int]]:
    """Context in which overlapped gathers of weights arrive only when a reader waits for them.

    Yields a list that gets an entry for each group of buckets that was gathered so.

    On a network they arrive at any time. In a tiny model on one machine they arrive at once, so that a reader
    that does not wait would not be noticed.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    start, late = Group.start_param_sync, set[int]()

    def start_late(group: Any, force_sync: bool = False) -> None:
        before = [bucket.param_data.clone() for bucket in group.buckets]
        start(group, force_sync)
        if group.param_gather_handle is None:
            return
        late.add(id(group))
        group.param_gather_handle.wait()
        arrived = [bucket.param_data.clone() for bucket in group.buckets]

        def write(tensors: list[Tensor]) -> None:
            for bucket, tensor in zip(group.buckets, tensors, strict=True):
                bucket.param_data.copy_(tensor)

        write(before)
        group.param_gather_handle = SimpleNamespace(wait=lambda: write(arrived))

    with mock.patch.object(Group, "start_param_sync", start_late):
        yield late


def _accessors(location: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return functions that read and write the constant."""
    module, path = location.split(":")
    path, _, parameter = path.removesuffix(")").partition("(")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    if not parameter:
        return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)
    function = getattr(owner, name)
    with_defaults = [
        p.name for p in inspect.signature(function).parameters.values() if p.default is not p.empty
    ]
    index = with_defaults.index(parameter)

    def write(value: Any) -> None:
        defaults = list(function.__defaults__)
        defaults[index] = value
        function.__defaults__ = tuple(defaults)

    return lambda: function.__defaults__[index], write
