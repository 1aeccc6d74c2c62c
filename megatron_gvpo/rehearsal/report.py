"""Prints a rehearsal: memory by phase and by part, calls to the device, and changes that would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_gvpo.planner.architecture import Gpu
from megatron_gvpo.settings.config import Config

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30


def show(result: dict[str, Any]) -> None:
    """Print the result of the command, as `command.run` makes it."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if Console().is_terminal else 160)
    usable = result["usable_gib"]
    reserves = ", ".join(f"{size:.2g} for {name}" for name, size in result["reserves_gib"].items())
    console.print(
        f"{result['world']} x {result['gpu']}: PyTorch can have {usable:.1f} GiB of "
        f"{result['memory_gib']:.1f} (less {reserves}; assumed). Rehearsed: no value was computed."
    )
    for rank in result["ranks"]:
        _rank(console, rank)
    if len(result["ranks"]) > 1:
        console.print(f"\nfullest: rank {result['fullest']}")
    for line in result["bounds"]:
        console.print(f"\n{line}")
    console.print(f"\n{result['verdict']}")


def _rank(console: Any, rank: dict[str, Any]) -> None:
    role = " ".join(f"{name}{index}" for name, index in rank["role"].items())
    compiling = sum(phase["compile_seconds"] for phase in rank["phases"])
    seconds = rank["import_seconds"] + compiling + sum(phase["seconds"] for phase in rank["phases"])
    console.print(
        f"\nrank {rank['rank']} ({role}): {seconds:.0f} s, {rank['host_gib']:.1f} GiB of host memory"
    )
    if pack := rank["pack"]:
        console.print(
            f"an update: {pack['micro_batches']} of {pack['micro_batches_of_run']} micro-batches of a rank, "
            f"each {pack['prompts_of_a_pack']} x {pack['prompt']} + {pack['rows_of_a_pack']} x "
            f"{pack['response']} = {pack['tokens']:,} tokens"
        )
    if saved := rank["rollouts"]:
        console.print(
            f"an update: {saved['responses']:,} responses of {saved['groups']:,} groups of {saved['file']}; "
            f"{saved['micro_batches']} micro-batches of a rank, the fullest of {saved['fullest']:,} tokens"
        )
    console.print(_phases(rank["phases"]))
    if compiling >= LEAST_SECONDS:
        console.print(f"host s is without {compiling:.0f} s of torch.compile and Triton, once for a run")
    if rank["parts"]:
        _parts(console, rank, rank["predicted"] or {})
    _collectives(console, rank)


LEAST_SECONDS = 0.5  # time of compilers from which on it is worth a line
_COLUMNS = "peak GiB", "reserved", "host s", "launches", "waits", "copies in/out/within", "TFLOP", "sent GiB"


def _phases(phases: Sequence[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("phase")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for phase in phases:
        counts = phase["counts"]
        copies = "/".join(
            f"{counts.get(f'copies_{way}', 0):,}" for way in ("to_device", "to_host", "on_device")
        )
        sent = sum(one["bytes"] for group in phase["collectives"].values() for one in group.values())
        table.add_row(
            phase["name"],
            f"{phase['peak']:.2f}",
            f"{phase['reserved']:.2f}",
            f"{phase['seconds']:.1f}",
            f"{counts.get('kernel_launches', 0):,}",
            f"{counts.get('host_waits', 0):,}",
            copies,
            f"{counts.get('matrix_flops', 0) / 1e12:.0f}",
            f"{sent / GIB:.1f}",
        )
    return table


def _parts(console: Any, rank: dict[str, Any], predicted: dict[str, float]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column, justify in (("part, GiB", "left"), ("rehearsed", "right"), ("planner", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    names = ("weights", "gradients", "optimizer", "critic", "activations", "head", "workspaces", "teacher")
    for name in (*names, "runtime"):
        if name in rank["parts"] or name in predicted:
            table.add_row(name, _number(rank["parts"].get(name)), _number(predicted.get(name)))
    highest = max(phase["peak"] for phase in rank["phases"])
    table.add_row("peak; total", _number(highest), _number(predicted.get("total")))
    console.print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _collectives(console: Any, rank: dict[str, Any]) -> None:
    """The collectives of the last rehearsed update."""
    updates = [phase for phase in rank["phases"] if phase["name"].endswith("update")]
    if not updates or not updates[-1]["collectives"]:
        return
    console.print(f"collectives of the {updates[-1]['name']}:")
    for group, operations in updates[-1]["collectives"].items():
        parts = [f"{one['calls']:,} {name} {one['bytes'] / GIB:.2f} GiB" for name, one in operations.items()]
        console.print(f"  {group}: {', '.join(parts)}")


LAUNCH_SECONDS = 5e-6  # host time to launch a kernel through PyTorch and Megatron (an assumption)
# Time in which the device is idle at a wait of the host: its queue is empty until the host has returned from
# the wait and has launched the next kernels, three or four (an assumption).
WAIT_SECONDS = 20e-6
IDLE = 0.05  # share of the matrix products' time from which on waits are worth a line


def remedy(config: Config, parts: dict[str, float], phase: str) -> str:
    """Return changes that would make the rank fit, the cheapest first.

    `parts`: GiB of each part, in the phases up to `phase`.
    """
    parallel, changes = config.parallel, list[str]()
    tokens = config.train.max_tokens_per_micro_batch
    if phase == "build":
        changes.append(
            "divide weights and optimizer among more GPUs (parallel.tp, pp or ep, or a larger --world)"
        )
        if not config.optimizer.offload_fraction and config.optimizer.muon is None:
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
    can_offload = not config.optimizer.offload_fraction and config.optimizer.muon is None
    if parts.get("optimizer", 0) > 8 and can_offload:
        changes.append("optimizer.offload_fraction=0.5")
    return "; or ".join(changes)


def bounds(phase: dict[str, Any], gpu: Gpu) -> list[str]:
    """Return a line if launches take longer than matrix products, and one if waits leave the device idle."""
    counts, lines = phase["counts"], list[str]()
    launches = counts.get("kernel_launches", 0) + counts.get("copies_on_device", 0)
    fp8, waits = counts.get("matrix_flops_fp8", 0), counts.get("host_waits", 0)
    products = (counts.get("matrix_flops", 0) - fp8) / gpu.flops(fp8=False) + fp8 / gpu.flops(fp8=True)
    launching, idle = launches * LAUNCH_SECONDS, waits * WAIT_SECONDS
    if products and launching >= products:
        lines.append(
            f"{phase['name']}: {launches:,} launches and copies take the host about {launching:.1f} s, and "
            f"the matrix products {products:.1f} s: the host bounds it"
        )
    if products and idle >= IDLE * products:
        lines.append(
            f"{phase['name']}: the host waits {waits:,} times for the device, which is idle then, in all "
            f"for about {idle * 1e3:.0f} ms, {idle / products:.0%} of the matrix products' time"
        )
    return lines
