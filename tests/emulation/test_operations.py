"""Operations on the emulated GPU give the CPU's values, or are refused; nothing gives wrong numbers.

The table is PyTorch's own, with its samples: forward, and in fp32 backward. `make proof` runs all of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import on_null_cuda
from helpers.paths import IMPORTS
from helpers.suite.real_parts import used

# Operations of the layers, the head, the optimizer and the trainer, and special kinds: views, in place,
# lists, masks, sizes that depend on values.
OURS = {
    *("add", "mul", "div", "sub", "pow", "exp", "log", "sqrt", "rsqrt", "where", "clamp", "maximum", "abs"),
    *("sum", "mean", "amax", "logsumexp", "cumsum", "softmax", "log_softmax", "norm", "isfinite", "any"),
    *("mm", "bmm", "addmm", "matmul", "nn.functional.linear", "nn.functional.silu", "nn.functional.gelu"),
    *(
        "nn.functional.embedding",
        "nn.functional.cross_entropy",
        "nn.functional.rms_norm",
        "nn.functional.pad",
    ),
    *("nn.functional.layer_norm", "nn.functional.conv2d", "nn.functional.softplus", "sigmoid", "tanh"),
    *("gather", "scatter", "scatter_add", "index_select", "index_put", "index_add", "masked_fill"),
    *(
        "masked_select",
        "masked_scatter",
        "nonzero",
        "unique",
        "bincount",
        "repeat_interleave",
        "searchsorted",
    ),
    *("sort", "argsort", "topk", "argmax", "max", "cat", "stack", "split", "chunk", "reshape", "permute"),
    *("__getitem__", "expand", "tril", "arange", "full_like", "zeros_like", "clone", "contiguous", "equal"),
    *("linalg.vector_norm", "as_strided", "roll", "flip"),
}


def outcomes(folder: Path, *names: str, seconds: float = 900.0) -> dict[str, str]:
    """Run the worker on one emulated GPU. Fails with the operation that it was at, if it takes longer."""
    path = os.pathsep.join([IMPORTS, on_null_cuda.emulated_environment()["PYTHONPATH"]])
    environment = os.environ | on_null_cuda.emulated_environment() | {"PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-m", "helpers.workers.emulated_operations"]
    result, log = folder / "outcomes.json", folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, str(result), *names], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            pytest.fail(f"operations took more than {seconds:.0f} s; the last: {log.read_text()[-300:]}")
    assert code == 0, log.read_text()[-3000:]
    used("emulated GPU")
    by_operation: dict[str, str] = json.loads(result.read_text())
    return by_operation


def test_what_training_calls_gives_the_values_of_the_cpu(tmp_path: Path) -> None:
    by_operation = outcomes(tmp_path, *OURS)
    assert {name.split("/")[0].split(".")[0] for name in by_operation} >= {
        name.split(".")[0] for name in OURS
    }
    assert len(by_operation) > 200
    assert {name: outcome for name, outcome in by_operation.items() if outcome != "equal"} == {}


# Results that CUDA defines differently: strides of memory that nobody may rely on.
_OTHERWISE = {"as_strided.partial_views"}


@pytest.mark.proof  # four to five minutes of processor time
def test_no_operation_of_pytorch_gives_wrong_values(tmp_path: Path) -> None:
    by_operation = outcomes(tmp_path, seconds=1700.0)
    wrong = {
        name: outcome
        for name, outcome in by_operation.items()
        if outcome.startswith(("differs", "0", "1", "2")) and name.split("/")[0] not in _OTHERWISE
    }
    assert wrong == {}
    assert sum(outcome == "equal" for outcome in by_operation.values()) > 0.97 * len(by_operation)


CODE = """
import threading
import torch
from megatron_gvpo.emulation import mode
from megatron_gvpo.rehearsal.nullcuda.aliases import alias
mode.install()
result = {}

def error(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"

torch.cuda.manual_seed(7)
first = torch.randn(4, device="cuda"), torch.randn(4, device="cuda")
state = torch.cuda.get_rng_state()
third = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state)
result["restored"] = torch.equal(third, torch.rand(3, device="cuda"))
torch.cuda.manual_seed(7)
result["seeded"] = torch.equal(first[0], torch.randn(4, device="cuda"))
result["goes on"] = not torch.equal(*first)
many = torch.randn(100_000, device="cuda")
result["moments"] = [many.mean().item(), many.std().item()]

large = torch.arange(3 * 2**20, dtype=torch.int32)
pinned = large.pin_memory()
result["copies"] = [
    torch.equal(copy.cpu(), large)
    for copy in (
        large.cuda(),
        pinned.to("cuda", non_blocking=True),
        torch.empty_like(large, device="cuda").copy_(pinned),
    )
]
result["float8"] = [
    torch.equal(many[:64].to(t).float().cpu(), many[:64].cpu().to(t).float())
    for t in (torch.float8_e4m3fn, torch.float8_e5m2)
]
result["unwritten"] = bool(torch.empty(8, device="cuda").isnan().all())
x = torch.zeros(4, 4, device="cuda")
x.t()[1:, 2].add_(5)
result["view"] = x[2].tolist()
result["alias"] = alias(x.t()).t().tolist() == x.tolist()
torch.add(x, 1, out=x)
result["out"] = x[2].tolist()
lists = [many[:5].clone(), many[5:9].clone()]
norms = [part.cpu().norm().item() for part in lists]
result["norms"] = [a.item() - b for a, b in zip(torch._foreach_norm(lists), norms, strict=True)]
torch._foreach_mul_(lists, 3.0)
result["scaled"] = [a.norm().item() - 3 * b for a, b in zip(lists, norms, strict=True)]
result["printed"] = str(x[0])
seen = []
thread = threading.Thread(target=lambda: seen.append((x + 1)[0, 0].item()))
thread.start(); thread.join()
result["thread"] = seen
begin, end, side = (*(torch.cuda.Event(enable_timing=True) for _ in range(2)), torch.cuda.Stream())
begin.record()
with torch.cuda.stream(side):
    side.wait_event(begin)
    elsewhere = x[0] + 2
    end.record()
torch.cuda.current_stream().wait_event(end)
result["streams"] = [elsewhere.tolist(), begin.query(), end.query(), begin.elapsed_time(end) >= 0]
source = torch.ones(2).pin_memory()
early = source.to("cuda", non_blocking=True)
source.zero_()
result["order"] = [early.tolist(), source.to("cuda", non_blocking=True).tolist()]
gates = torch.zeros(1, 16, device="cuda")
result["unknown"] = error(lambda: torch.ops.aten._thnn_fused_lstm_cell(gates, gates, gates[:, :4]))
result["two devices"] = error(lambda: x + torch.ones(4, 4))
result["dtypes"] = error(lambda: x @ x.bfloat16())

with torch.utils._python_dispatch._disable_current_modes():
    result["kernel outside"] = error(lambda: x + 1)
    result["product outside"] = error(lambda: x @ x)
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    values: dict[str, Any] = on_null_cuda.run_code(CODE, emulated=True)
    return values


def test_random_numbers_depend_on_the_state_of_cudas_generator(report: dict[str, Any]) -> None:
    assert report["restored"] and report["seeded"] and report["goes on"]
    mean, deviation = report["moments"]
    assert abs(mean) < 0.02 and abs(deviation - 1) < 0.02


def test_copies_of_every_kind_are_made(report: dict[str, Any]) -> None:
    assert report["copies"] == [True] * 3 and report["float8"] == [True] * 2


def test_views_outputs_threads_and_text_show_the_same_memory(report: dict[str, Any]) -> None:
    assert report["view"] == [0.0, 5.0, 5.0, 5.0] and report["out"] == [1.0, 6.0, 6.0, 6.0]
    assert report["alias"] and report["thread"] == [2.0]
    assert report["printed"] == "tensor([1., 1., 1., 1.], device='cuda:0')"


def test_streams_events_and_copies_obey_the_hosts_order(report: dict[str, Any]) -> None:
    assert report["streams"] == [[3.0] * 4, True, True, True]
    assert report["order"] == [[1.0, 1.0], [0.0, 0.0]]


def test_lists_of_tensors_are_computed(report: dict[str, Any]) -> None:
    assert report["norms"] + report["scaled"] == pytest.approx([0.0] * 4, abs=1e-5)


def test_memory_that_nobody_wrote_is_not_a_number(report: dict[str, Any]) -> None:
    assert report["unwritten"]


def test_what_cannot_be_computed_is_an_error_with_its_name(report: dict[str, Any]) -> None:
    assert "cannot compute aten._thnn_fused_lstm_cell" in report["unknown"], report["unknown"]
    assert "vectorized_elementwise_kernel" in report["kernel outside"]
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in report["product outside"]


def test_pytorchs_cuda_code_still_checks(report: dict[str, Any]) -> None:
    assert "Expected all tensors to be on the same device" in report["two devices"]
    assert "same dtype" in report["dtypes"]
