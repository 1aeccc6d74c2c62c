"""Chooses the number of ranks of a run on a machine without a GPU, where no --nproc names it.

A rank of several threads waits at a barrier for each of them after every product, so it slows down with the
slowest core. Ranks of one thread meet only where they exchange gradients. docs/explanation/cpu_speed.md has
the times.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import psutil

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.gpus import list_gpus
from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.memory_model import activation_bytes, state
from megatron_gvpo.planner.prediction import critic_of
from megatron_gvpo.planner.workload import Layout
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.reward_servers import TeacherConfig

MOST = 8  # ranks on one machine: their exchange of gradients takes the memory's speed from the products
LIBRARIES = 0.7 * 2**30  # bytes of a process with torch and the other libraries
ROOM = 0.9  # share of the free memory that ranks may take
CGROUP = Path("/sys/fs/cgroup")


class Choice(NamedTuple):
    """The number of ranks, and a line that says why; the line is empty where there is nothing to choose."""

    ranks: int
    reason: str


def choose_ranks(config: Config) -> Choice:
    """The ranks for this machine: one for each core, as far as the layout, the prompts and memory allow.

    The choice is one rank, without a reason, if the machine has a GPU or a single core, if OMP_NUM_THREADS
    has already divided the cores, or if rollout servers need cores, too.
    """
    cores = usable_cores()
    if cores == 1 or "OMP_NUM_THREADS" in os.environ or _has_gpu():
        return Choice(1, "")
    if config.samples_responses and config.rollout.uses_servers:
        return Choice(1, "")
    free = ROOM * free_memory()
    too_large = ""
    for count in range(min(cores, MOST, config.train.prompts_per_step), 1, -1):
        try:
            check_layout(config, count)
        except ConfigError:
            continue
        needed = count * rank_memory(config, count)
        if needed <= free:
            threads = cores // count
            return Choice(count, f"{count} ranks of {_threads(threads)}: {cores} cores, no GPU (see --nproc)")
        too_large = f"{count} ranks would need {_gib(needed)} of {_gib(free)} GiB"
    return Choice(1, f"1 rank of {_threads(cores)}: {too_large}" if too_large else "")


def check_ranks(ranks: int) -> None:
    """Raises ConfigError where the libraries of so many processes need more memory than the machine has free.

    Otherwise the machine would become slow, and the kernel would then kill processes.
    """
    free = free_memory()
    if ranks > 1 and ranks * LIBRARIES > free:
        raise ConfigError(
            f"--nproc {ranks}: the libraries of so many processes need {_gib(ranks * LIBRARIES)} GiB, and "
            f"{_gib(free)} GiB are free: start at most {max(1, int(free // LIBRARIES))}"
        )


def warning(config: Config, ranks: int) -> str:
    """A warning if a machine without a GPU lacks cores or (predicted) memory for the ranks; else empty."""
    if ranks == 1 or _has_gpu():
        return ""
    problems = []
    if ranks > (cores := usable_cores()):
        problems.append(f"{ranks} ranks share {cores} cores, which is slower than {cores} ranks")
    needed, free = ranks * rank_memory(config, ranks), free_memory()
    if free < needed < float("inf"):
        problems.append(f"{ranks} ranks need about {_gib(needed)} of {_gib(free)} GiB (predicted)")
    return "; ".join(problems)


def rank_memory(config: Config, ranks: int) -> float:
    """Predict the bytes of one rank on a CPU, in fp32; infinite for a model that the planner lacks."""
    try:
        model = architecture.load(str(Path(config.model.path)), "model.path")
        second = critic_of(config, model)
    except ConfigError:
        return float("inf")
    parallel, train = config.parallel, config.train
    muon = config.optimizer.muon is not None
    layout = Layout(ranks, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, ep=parallel.ep, muon=muon)
    width = 2 if config.model.dtype == "float32" else 1  # the planner counts activations in bf16
    weights, gradients, optimizer = state(model, layout, 0, bytes_each=2 * width)
    copies = int(config.samples_responses) + (config.algorithm.kept_reference is not None)
    critic = sum(state(second, layout, 0, 2 * width, critic=True)) if second is not None else 0.0
    tokens = train.max_tokens_per_micro_batch
    layers = max(layout.stage_layers(model.layers))
    activations = width * layers * activation_bytes(model, layout, tokens)
    stash = min(train.head_stash_bytes, 2.0 * width * model.vocab * tokens)
    state_bytes = (1 + copies) * weights + gradients + optimizer + critic
    return state_bytes + _teacher_bytes(config.teacher, layout) + activations + stash + LIBRARIES


def _teacher_bytes(teacher: TeacherConfig | None, layout: Layout) -> float:
    """The weights of a teacher that the ranks hold beside the policy."""
    if teacher is None or teacher.server is not None:
        return 0.0
    model = architecture.load(str(teacher.path), "teacher.path")
    return state(model, layout, 0, bytes_each=4)[0]


def usable_cores() -> int:
    """The cores that this process may use: its affinity, and the limit of its container."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def free_memory() -> int:
    """Bytes that new processes may take: the machine's free memory, up to the limit of its container."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):
        limit, used = ((CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        if limit != "max":
            free = min(free, max(0, int(limit) - int(used)))
    return free


def _has_gpu() -> bool:
    """True if torch will find a GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or version("torch").endswith("+cpu"):
        return False
    return bool(list_gpus())


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"
