"""`megatron-gvpo doctor --cluster`: checks a whole allocation before a run, on every rank under torchrun.

Every check is a collective. It compares the ranks with each other and names the rank and node that differ.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_gvpo.cluster.doctor import find_version
from megatron_gvpo.core.collectives import all_gather_msgpack
from megatron_gvpo.core.gpus import driver_version
from megatron_gvpo.core.versions import COMPONENTS
from megatron_gvpo.planner.architecture import Gpu
from megatron_gvpo.servers.launch.supervise import is_healthy

PATIENCE = 60.0  # seconds until all ranks must have met and must see each other's files
SKEW = 2.0  # seconds that clocks may differ
SLOW = 0.5  # a link below this fraction of the median rate, or of the GPU's described rate, is a problem
REPEATS = 8  # repetitions of an exchange; the fastest counts
ROUNDS = 7  # partners that each rank's links are tried with, at most
BYTES = {"gloo": 4 << 20, "nccl": 256 << 20}  # message size by backend


def checkup(directory: Path, urls: Sequence[str] = (), gpu: Gpu | None = None) -> tuple[list[str], list[str]]:
    """Runs all checks and returns the measurements and the problems, the same on every rank.

    The process group must be initialized. `directory` is on the file system that the nodes share. `urls` are
    the rollout servers'. `gpu` gives the bandwidth that the links should reach.
    """
    names = [str(name) for name in all_gather_msgpack(_name())]
    measured: list[str] = []
    problems = [*_versions(names), *_clocks(names), *_files(names, directory), *_engines(names, urls)]
    for check in (_pairs, _all_reduce):
        lines, new_problems = check(names, gpu)
        measured += lines
        problems += new_problems
    return measured, problems


def _name() -> str:
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    return f"rank {dist.get_rank()} on {node}"


def _versions(names: list[str]) -> list[str]:
    """Names ranks whose software versions differ from those of most ranks."""
    local = {component.name: find_version(component.name) for component in COMPONENTS}
    local |= {"python": platform.python_version(), "NVIDIA driver": driver_version()}
    everyone = all_gather_msgpack(local)
    problems = []
    for package in local:
        counts = Counter(versions[package] for versions in everyone)
        usual = counts.most_common(1)[0][0]
        problems += [
            f"{name} has {package} {versions[package]}, most have {usual}"
            for name, versions in zip(names, everyone, strict=True)
            if versions[package] != usual
        ]
    return problems


def _clocks(names: list[str]) -> list[str]:
    """Names ranks whose clock differs from the median. Logs and checkpoints are compared by time of day."""
    dist.barrier()
    now = all_gather_msgpack(time.time())
    usual = statistics.median(now)
    return [
        f"{name}: its clock is {moment - usual:+.1f} s from the others'"
        for name, moment in zip(names, now, strict=True)
        if abs(moment - usual) > SKEW
    ]


def _files(names: list[str], directory: Path) -> list[str]:
    """Names ranks that cannot write to `directory`, or that do not see the files of other ranks there.

    Every rank writes a file under another name and renames it, as checkpoints are written.
    """
    run = str(all_gather_msgpack(uuid.uuid4().hex)[0])
    files = [directory / f".doctor-{run}-{rank}" for rank in range(dist.get_world_size())]
    own_file, problem = files[dist.get_rank()], None
    try:
        aside = own_file.with_suffix(".partial")
        aside.write_text(run)
        aside.rename(own_file)
    except OSError as error:
        problem = f"cannot write to {directory}: {error.strerror}"
    problems = all_gather_msgpack(problem)
    deadline = time.monotonic() + PATIENCE
    written = [file for file, failed in zip(files, problems, strict=True) if failed is None]
    while (missing := [file for file in written if not file.exists()]) and time.monotonic() < deadline:
        with suppress(OSError):
            os.listdir(directory)  # makes NFS refresh its cache of the directory
        time.sleep(0.1)
    unseen = [names[files.index(file)] for file in missing]
    seen = all_gather_msgpack(
        f"does not see in {directory} what {', '.join(unseen)} wrote" if unseen else None
    )
    with suppress(OSError):
        own_file.unlink()
    return [problem for rank_problems in (problems, seen) for problem in _whose(names, rank_problems)]


def _engines(names: list[str], urls: Sequence[str]) -> list[str]:
    """Names ranks that cannot reach a rollout server."""
    lost = [url for url in urls if not is_healthy(url, 5.0)]
    problem = f"gets no healthy answer from {', '.join(lost)}" if lost else None
    return _whose(names, all_gather_msgpack(problem))


def _whose(names: list[str], problems: list[str | None]) -> list[str]:
    """Put the rank's name before each problem; a problem of all ranks is listed once."""
    if len(names) > 1 and problems[0] and len({*problems}) == 1:
        return [f"every rank {problems[0]}"]
    return [f"{name} {problem}" for name, problem in zip(names, problems, strict=True) if problem]


def _pairs(names: list[str], gpu: Gpu | None) -> tuple[list[str], list[str]]:
    """Measures the bandwidth between pairs of ranks.

    Each rank is paired with several others, so that a slow rank stands out.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        return [], []
    data, reached = _buffer(), []
    for partners in _rounds(world)[:ROUNDS]:
        dist.barrier()
        partner = partners.get(rank)
        if partner is None:
            continue
        best = float("inf")
        for _ in range(REPEATS):  # the first one also sets up the connection
            begin = time.perf_counter()
            if rank < partner:
                dist.send(data, partner)
                dist.recv(data, partner)
            else:
                dist.recv(data, partner)
                dist.send(data, partner)
            _finish()
            best = min(best, time.perf_counter() - begin)
        reached.append(2 * data.nbytes / best / 1e9)
    rates = [float(rate) for rate in all_gather_msgpack(statistics.median(reached) if reached else 0.0)]
    usual = statistics.median(rates)
    problems = [
        f"{name}: {rate:.2f} GB/s with other ranks; the median rank reaches {usual:.2f}"
        for name, rate in zip(names, rates, strict=True)
        if rate < SLOW * usual
    ]
    # The network between nodes is the slowest kind of link, so even those pairs should reach its rate.
    if gpu is not None and usual < SLOW * gpu.network_gb_per_s * gpu.network_fraction:
        expected = gpu.network_gb_per_s * gpu.network_fraction
        problems.append(
            f"pairs of ranks reach {usual:.2f} GB/s, less than the {expected:.0f} expected of {gpu.name}"
        )
    return [f"between pairs of ranks: {usual:.2f} GB/s"], problems


def _rounds(world: int) -> list[dict[int, int]]:
    """Pairs every rank with every other one, in rounds (the circle method of round-robin tournaments).

    Each round maps a rank to its partner. With an odd number of ranks, one rank has no partner in a round.
    """
    seats: list[int | None] = [*range(world), *([None] if world % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(
            {a: b for x, y in pairs if x is not None and y is not None for a, b in ((x, y), (y, x))}
        )
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _all_reduce(names: list[str], gpu: Gpu | None) -> tuple[list[str], list[str]]:
    """Measures the bus bandwidth of an all-reduce over all n ranks.

    Each rank's link carries 2 (n - 1) / n of the data.
    """
    world = dist.get_world_size()
    data = _buffer()
    best = float("inf")
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(data)
        _finish()
        best = min(best, time.perf_counter() - begin)
    seconds = max(float(s) for s in all_gather_msgpack(best))
    rate = 2 * (world - 1) / world * data.nbytes / seconds / 1e9
    problems = []
    if gpu is not None and world > 1 and rate < SLOW * (reach := gpu.network_gb_per_s * gpu.network_fraction):
        problems.append(
            f"an all-reduce reaches {rate:.2f} GB/s, less than the {reach:.0f} expected of {gpu.name}"
        )
    return [f"all-reduce over {world} ranks: {rate:.2f} GB/s"], problems


def _buffer() -> torch.Tensor:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return torch.zeros(BYTES["nccl" if on_gpu else "gloo"], dtype=torch.uint8, device=device)


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(directory: str, urls: Sequence[str], gpu: Gpu | None) -> int:
    """Runs the checkup under torchrun. Returns 0 if it finds no problem, else 1. Rank 0 prints the report."""
    try:
        _join()
        measured, problems = checkup(Path(directory), urls, gpu)
    except (RuntimeError, ValueError) as error:  # torch.distributed's errors are subclasses of these
        print(f"error: {_described(error)}", file=sys.stderr, flush=True)
        os._exit(1)  # an orderly end of the process group would wait for ranks that have ended
    if dist.get_rank() == 0:
        print("\n".join([*measured, *(f"problem: {problem}" for problem in problems)]))
        verdict = (
            "Not ready: see the problems above." if problems else "Ready: no rank differs from the others."
        )
        print(f"{dist.get_world_size()} ranks. {verdict}", flush=True)
    dist.destroy_process_group()
    return 1 if problems else 0


def _join() -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=PATIENCE)))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=5 * PATIENCE),
    )


def _described(error: Exception) -> str:
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    rank = f"rank {os.environ['RANK']} on {node}"
    words = str(error).strip().splitlines()[0]
    if dist.is_initialized():
        return f"{rank}: {words} (a rank that fails stops all; the first of these lines gives the cause)"
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return f"{rank} cannot meet the {os.environ['WORLD_SIZE']} ranks at {where}: {words}"
