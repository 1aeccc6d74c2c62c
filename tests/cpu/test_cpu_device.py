"""The CPU device spends a step's time on arithmetic: threads, memory, the local norm."""

import os
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F

from megatron_gvpo.megatron.cpu.device import attention_flags_kept
from megatron_gvpo.megatron.cpu.spec import LocalRMSNorm


def alone(script: str, threads: int) -> None:
    """Run a script in a fresh process, where nothing has been allocated and no thread started yet."""
    begin = "import torch; from megatron_gvpo.megatron.cpu import device; device.install()\n"
    command = [sys.executable, "-c", f"{begin}torch.set_num_threads({threads})\n{dedent(script)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.proof
def test_a_group_starts_no_threads_for_its_copies() -> None:
    """There would be more threads than cores, and libgomp would then put the computing ones to sleep."""
    alone(
        """
        import os
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        threads = lambda: len(os.listdir("/proc/self/task"))
        alone = threads()
        x = torch.ones(10**6)
        assert threads() == alone + 1  # main's own second one: threads can be seen so
        with dist._coalescing_manager(async_ops=True) as work:
            for _ in range(4):
                dist.all_gather_into_tensor(torch.empty_like(x), x)
        work.wait()
        dist.all_reduce(x)
        dist.reduce_scatter_tensor(torch.empty_like(x), x)
        assert threads() == alone + 1 and torch.get_num_threads() == 2
        """,
        threads=2,
    )


def test_one_ranks_collectives_in_place_copy_nothing() -> None:
    """The distributed optimizer of one rank exchanges whole buffers of gradients and weights with itself."""
    alone(
        """
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

        def collectives(output, source):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recording:
                for function in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor):
                    with dist._coalescing_manager(), device.cuda_means_cpu():
                        function(output, source, group=dist.group.WORLD)
            return sum("c10d" in event.name for event in recording.events())

        x, other = torch.arange(8.0), torch.empty(8)
        assert collectives(x, x[:8]) == 0
        assert collectives(other, x) >= 2 and torch.equal(other, x)
        part = torch.empty(16)[8:]
        assert collectives(part, x) >= 2 and torch.equal(part, x)
        """,
        threads=1,
    )


@pytest.mark.proof
def test_freed_memory_is_kept_until_asked_for() -> None:
    alone(
        """
        import resource
        from pathlib import Path

        def resident():
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            blocks = [torch.ones(5_000_000) for _ in range(10)]  # 20 MB each
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        # Some of the later blocks extend the heap once, as their alignment falls.
        first, later, kept = faults(), [faults() for _ in range(4)], resident()
        assert first > 40_000 and sum(later) < first, (first, later)
        torch.cuda.empty_cache()
        assert kept - resident() > 150e6
        """,
        threads=1,
    )


class Settings:
    params_dtype, sequence_parallel = torch.float32, False

    def __init__(self, zero_centered: bool = False) -> None:
        self.layernorm_zero_centered_gamma = zero_centered


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(7, 1, 16), (5, 3, 16), (4, 2, 3, 16)])
def test_norm_and_its_gradients_against_fp64(shape: tuple[int, ...], zero_centered: bool) -> None:
    torch.manual_seed(0)
    norm = LocalRMSNorm(Settings(zero_centered), 16)
    assert (norm.weight == (0 if zero_centered else 1)).all(), "the factor begins with 1"
    norm.weight.data.normal_()
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    norm(x).backward(grad)
    x64 = x.detach().double().requires_grad_()
    weight64 = norm.weight.detach().double().requires_grad_()
    expected = F.rms_norm(x64, (16,), weight64 + (1 if zero_centered else 0), 1e-6)
    expected.backward(grad.double())
    torch.testing.assert_close(norm(x).detach(), expected.detach().float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, x64.grad.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.weight.grad, weight64.grad.float(), rtol=1e-5, atol=1e-6)


def test_norm_of_bf16_is_computed_in_fp32() -> None:
    norm = LocalRMSNorm(Settings(), 16)
    x = (torch.randn(9, 16) * 100).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), F.rms_norm(x.float(), (16,), norm.weight, 1e-6).bfloat16())


def test_a_models_attention_flags_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next model in the process, or a child process, is refused for another backend's flags."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
    with attention_flags_kept():
        assert "NVTE_FUSED_ATTN" not in os.environ
        os.environ |= {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "1"}
    assert os.environ["NVTE_FUSED_ATTN"] == "1" and "NVTE_FLASH_ATTN" not in os.environ
