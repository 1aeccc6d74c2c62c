"""Time of compilers is measured apart, so that an empty cache does not slow a phase down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch._dynamo.callback import callback_handler
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_gvpo.rehearsal.compile_clock import CompileClock

SLEEP = 0.2  # seconds


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileClock]:
    """A clock that is installed, with Triton's cache empty."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", None)
    clock = CompileClock()
    clock.install()
    with torch._dynamo.config.patch(disable=False):  # a run on a CPU, earlier in this process, disables it
        yield clock
    callback_handler.start_callbacks.pop()
    callback_handler.end_callbacks.pop()
    torch.compiler.reset()


@triton.jit
def _double(source, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.load(source + at) * 2)


def _compile_kernel() -> None:
    pointers = {"source": "*fp32", "out": "*fp32", "size": "constexpr"}
    triton.compile(ASTSource(_double, pointers, {(2,): 64}), target=GPUTarget("cuda", 90, 32))


def test_a_kernel_counts_once_and_not_from_the_cache(clock: CompileClock) -> None:
    begin = time.perf_counter()
    _compile_kernel()
    cold = clock.seconds
    assert 0 < cold <= time.perf_counter() - begin
    _compile_kernel()
    assert clock.seconds == cold


def test_torch_compile_counts_with_what_it_compiles_by_triton(clock: CompileClock) -> None:
    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        time.sleep(SLEEP)
        hour = SimpleNamespace(total=3600 * 10**6)
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=hour, cache_hit=False)
        return graph.forward

    doubled = torch.compile(lambda x: 2 * x, backend=backend)
    begin = time.perf_counter()
    doubled(torch.ones(3))
    counted = clock.seconds
    assert SLEEP <= counted <= time.perf_counter() - begin, "a kernel within does not count again"
    time.sleep(SLEEP)
    doubled(torch.ones(3))
    assert clock.seconds == counted
