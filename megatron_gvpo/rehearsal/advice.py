"""Says what to change where a rank runs out of memory, and what bounds a phase other than arithmetic."""

from __future__ import annotations

from typing import Any

from megatron_gvpo.planner.architecture import Gpu
from megatron_gvpo.settings.config import Config

LAUNCH_SECONDS = 5e-6  # host time to launch a kernel through PyTorch and Megatron (an assumption)


def remedy(config: Config, parts: dict[str, float], phase: str) -> str:
    """Changes that would make the rank fit, the cheapest first. `parts`: GiB, up to `phase`."""
    parallel, changes = config.parallel, list[str]()
    tokens = config.train.max_tokens_per_micro_batch
    if phase == "build":
        changes.append(
            "divide weights and optimizer among more GPUs (parallel.tp, pp or ep, or a larger --world)"
        )
        if not config.optimizer.offload_fraction:
            changes.append("keep the optimizer's states on the host (optimizer.offload_fraction=1)")
        return "; ".join(changes)
    if parallel.tp > 1 and not parallel.sequence_parallel:
        changes.append("parallel.sequence_parallel=true, at no cost")
    if parallel.recompute == "none":
        changes.append("parallel.recompute=selective")
    elif parallel.recompute == "selective" and not {"mlp", "moe"} & {*parallel.recompute_modules}:
        changes.append("parallel.recompute_modules=[mlp, moe]")
    changes.append(
        f"train.max_tokens_per_micro_batch={max(1024, tokens // 2048 * 1024)} in place of {tokens}"
    )
    if parallel.recompute != "full":
        changes.append("parallel.recompute=full")
    if parts.get("optimizer", 0) > 8 and not config.optimizer.offload_fraction:
        changes.append("optimizer.offload_fraction=0.5")
    return "; or ".join(changes)


def bounds(phase: dict[str, Any], gpu: Gpu) -> str | None:
    """A line where launches alone take longer than the matrix products; None where they do not."""
    counts = phase["counts"]
    launches = counts.get("kernel_launches", 0) + counts.get("copies_on_device", 0)
    fp8 = counts.get("matrix_flops_fp8", 0)
    products = (counts.get("matrix_flops", 0) - fp8) / gpu.flops(fp8=False) + fp8 / gpu.flops(fp8=True)
    launching = launches * LAUNCH_SECONDS
    if not products or launching < products:
        return None
    return (
        f"{phase['name']}: {launches:,} launches and copies take the host about {launching:.1f} s, and the "
        f"matrix products {products:.1f} s: the host bounds it"
    )
