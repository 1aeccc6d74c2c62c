"""Compares settings with usual values: the learning rate, the engine, memory."""

from __future__ import annotations

import json
import math
import shutil
import subprocess

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.inspection.verdict import RunVerdict, failure, not_tried, ok, warning
from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.prediction import excess, least
from megatron_gvpo.settings.config import Config
from megatron_gvpo.training.ranks import free_memory, rank_memory

# The highest learning rates that published RL runs use: 1e-6 to 1e-5 for whole models of 0.5B and more, ten
# times as much for adapters; smaller models bear more.
_USUAL = ((5e8, 1e-5), (5e7, 1e-4), (0, 3e-3))
_FAR = 5.0  # multiples of the usual rate that cause a warning
_HOPELESS = 100.0  # multiples of the usual rate at which runs diverge
_FAINT = 1e-4  # share of the usual rate below which a run learns nothing in its steps
_ASK = "import importlib.metadata as m, json, sys; print(json.dumps(m.version(sys.argv[1])))"
_PATIENCE = 60.0  # seconds for an interpreter on a slow disk


def inspect_learning_rate(config: Config, card: ModelCard) -> RunVerdict:
    """Compare `optimizer.lr` with the usual learning rates for models of this size."""
    lr = config.optimizer.lr
    try:
        weights = architecture.from_config(card, f"model.path={config.model.path}").parameters
    except ConfigError:
        return not_tried("learning rate", "the planner does not know this architecture and its size")
    usual = next(rate for size, rate in _USUAL if weights >= size)
    usual *= 10 if config.model.adapter is not None else 1
    times = lr / usual
    summary = f"{lr:g} for a model of {weights / 1e6:,.1f}M parameters; up to {usual:g} is usual"
    if times >= _HOPELESS:
        return failure("learning rate", f"{summary}: the run would diverge", f"optimizer.lr={usual / 10:g}")
    if times >= _FAR:
        return warning("learning rate", summary, f"optimizer.lr={usual / 10:g} to {usual:g}")
    if times <= _FAINT:
        return warning(
            "learning rate", f"{summary}: the weights would hardly change", f"optimizer.lr={usual / 10:g}"
        )
    return ok("learning rate", summary)


def inspect_engine(config: Config) -> RunVerdict:
    """The rollout engine and its version, by the interpreter that would start it."""
    engine, servers = config.rollout.engine, config.rollout.servers
    if not config.rollout.uses_servers:
        return ok("engine", "responses are sampled in the trainer's processes: no server is needed")
    if servers.urls:
        return not_tried("engine", f"{engine}'s servers run already ({len(servers.urls)} addresses)")
    python = shutil.which(servers.python)
    if python is None:
        return failure("engine", f"rollout.servers.python={servers.python}: no such program", "name its path")
    command = [python, "-c", _ASK, engine]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return failure("engine", f"{python} does not answer: {error}", "name an interpreter that has it")
    if answer.returncode:
        return failure(
            "engine",
            f"{python} has no package {engine}",
            "name the interpreter of its environment as rollout.servers.python",
        )
    return ok("engine", f"{engine} {json.loads(answer.stdout)} of {python}")


def inspect_memory(config: Config, world: int, gpu_gib: float) -> RunVerdict:
    """The planner's memory of the fullest GPU; of a run on CPUs, that of all ranks on this machine."""
    if config.model.dtype == "float32":
        return _memory_on_cpus(config, world)
    if least(config, world) is None:
        return not_tried("memory", "the planner does not know this architecture")
    problem = excess(config, world, gpu_gib)
    if problem is None:
        return ok("memory", f"the update fits into {gpu_gib:.0f} GiB on {world} GPUs, by the planner")
    return warning("memory", problem, "`megatron-gvpo plan` lists layouts that fit")


def _memory_on_cpus(config: Config, world: int) -> RunVerdict:
    needed, free = world * rank_memory(config, world), free_memory()
    if math.isinf(needed):
        return not_tried("memory", "the planner does not know this architecture")
    ranks = f"{world} rank{'s' * (world > 1)} on CPUs"
    summary = f"{ranks} need about {needed / 2**30:.1f} GiB (predicted), of {free / 2**30:.1f} free here"
    if needed > free:
        return warning("memory", summary, "lower train.max_tokens_per_micro_batch, or take a smaller model")
    return ok("memory", summary)
