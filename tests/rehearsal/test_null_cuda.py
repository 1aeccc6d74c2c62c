"""The null CUDA under PyTorch: memory, copies, launches, waits and products are those that were asked for."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import on_null_cuda

CODE = """
import gc
import torch
from megatron_gvpo.algorithms.losses.dpo import DPO
from megatron_gvpo.rehearsal.nullcuda import counters
from megatron_gvpo.types import TrainBatch

result = {}

def counted(work):
    before = counters.read()
    work()
    return {k: v - before[k] for k, v in counters.read().items() if v != before[k]}

def error(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"

GIB = 2**30
result["total"] = torch.cuda.get_device_properties(0).total_memory
result["devices"] = torch.cuda.device_count()
x = torch.zeros(1024, 512, device="cuda", dtype=torch.bfloat16)
w = torch.zeros(512, 2048, device="cuda", dtype=torch.bfloat16)
x @ w  # cuBLAS's workspace
result["product"] = counted(lambda: x @ w)
b = torch.zeros(3, 32, 64, device="cuda")
result["batched"] = counted(lambda: b @ b.transpose(1, 2))
result["item"] = counted(lambda: x[0, 0].item())
result["no wait"] = counted(lambda: x + x)
host = torch.arange(1000, dtype=torch.int64)
device = host.cuda()
result["copied"] = torch.equal(device.cpu(), host)
result["copies"] = counted(lambda: host.cuda())
large = torch.ones(4 * 2**20, dtype=torch.uint8)
result["large copy"] = int(large.cuda().cpu().sum())
del x, w, b, device
gc.collect(); torch.cuda.empty_cache()
left = torch.cuda.mem_get_info()[0]
result["most"] = error(lambda: torch.empty(left - 2**21, dtype=torch.uint8, device="cuda"))
gc.collect(); torch.cuda.empty_cache()
result["one more"] = error(lambda: torch.empty(left + 2**20, dtype=torch.uint8, device="cuda"))
result["free again"] = torch.cuda.mem_get_info()[0] == left
result["other device"] = torch.cuda.mem_get_info(1)[0]
result["no device"] = error(lambda: torch.empty(1, device="cuda:8"))
result["two devices"] = error(lambda: torch.ones(2, device="cuda") + torch.ones(2))
one = torch.ones(2, 2, device="cuda")
result["dtypes"] = error(lambda: one @ one.bfloat16())
graph = torch.cuda.CUDAGraph()
result["graph"] = error(lambda: torch.cuda.graph(graph).__enter__())
result["refused"] = counters.refused()
result["inverse"] = error(lambda: torch.linalg.inv(torch.eye(3, device="cuda")))
group_n, reward_n = torch.tensor([0, 0, 5, 5]), torch.tensor([1.0, 0.0, 0.0, 1.0])
rows = TrainBatch([[1]] * 4, [[2]] * 4, group_n, reward_n, truncated_n=torch.zeros(4).bool())
result["pairs"] = [column.tolist() for column in DPO()._pairs(rows.to(torch.device("cuda")))]
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    values: dict[str, Any] = on_null_cuda.run_code(CODE)
    return values


def test_a_device_has_the_memory_that_it_was_given(report: dict[str, Any]) -> None:
    assert report["total"] == 8 * 2**30 and report["devices"] == 8
    assert report["most"] is None  # all but the allocator's rounding
    assert report["one more"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate")
    assert report["free again"] and report["other device"] == 8 * 2**30


def test_products_are_counted_with_their_operations(report: dict[str, Any]) -> None:
    assert report["product"] == {
        "kernel_launches": 1,
        "matrix_products": 1,
        "matrix_flops": 2 * 1024 * 512 * 2048,
    }
    assert report["batched"]["matrix_flops"] == 2 * 3 * 32 * 64 * 32


def test_a_host_that_waits_is_counted_and_one_that_does_not_is_not(report: dict[str, Any]) -> None:
    assert report["item"]["host_waits"] == 1 and report["item"]["copies_to_host"] == 1
    assert report["no wait"] == {"kernel_launches": 1}


def test_small_copies_are_made_and_large_ones_counted(report: dict[str, Any]) -> None:
    assert report["copied"]
    assert report["copies"]["copies_to_device"] == 1 and report["copies"]["bytes_to_device"] == 8000
    assert report["large copy"] == 0


def test_preferences_have_their_pairs_though_no_kernel_compares_rewards(report: dict[str, Any]) -> None:
    assert report["pairs"] == [[0, 3], [1, 2], [1.0, 1.0]]


def test_what_a_device_would_refuse_is_refused(report: dict[str, Any]) -> None:
    assert "invalid device ordinal" in report["no device"]
    assert "Expected all tensors to be on the same device" in report["two devices"]
    assert report["dtypes"].startswith("RuntimeError") and "dtype" in report["dtypes"]


def test_what_is_not_answered_says_so(report: dict[str, Any]) -> None:
    assert "not supported by the null CUDA" in report["graph"]
    assert report["refused"] == "cudaStreamBeginCapture"
    assert report["inverse"] is not None  # cuSOLVER is the real one, and finds no device


COMPILED = """
import torch
from megatron_gvpo.rehearsal.nullcuda import counters

gelu = torch.compile(lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))))
x = torch.zeros(64, 64, device="cuda")
gelu(x)
before = counters.read()["kernel_launches"]
gelu(x)
result = counters.read()["kernel_launches"] - before
"""


def test_functions_are_compiled_also_where_a_cpu_run_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-core's fused functions keep less than their parts. On a CPU none is compiled."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert on_null_cuda.run_code(COMPILED) == 1
