"""The teacher of a plan: another model, which judges the responses (section `teacher`)."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.architecture import GIB, Architecture, Gpu, engine_room

if TYPE_CHECKING:
    from megatron_gvpo.planner.workload import Method


@dataclass(frozen=True)
class PlannedTeacher:
    """A teacher that the trainer holds, or one on servers with GPUs of their own."""

    model: Architecture
    passes: int  # passes over a step's responses, for their log-probs
    divergence: bool = False  # every update compares whole distributions in the head
    beside: bool = False  # the loss has other terms than that divergence
    gpus: int = 0  # GPUs of its servers; 0: the trainer holds it, in host memory between its passes
    tp: int = 1  # GPUs of one server

    @property
    def is_on_trainer(self) -> bool:
        return not self.gpus

    def misfit(self, policy: Architecture, tp: int, pp: int, vpp: int, cp: int, ep: int) -> str | None:
        """Returns why the trainer cannot hold it in a layout that the policy fits; None if it can."""
        model = self.model
        if not model.divisible(tp):
            return f"tp={tp} does not divide the teacher's attention heads or MLP"
        # A policy that the stages do not divide evenly needs stage_layers, which name a sum.
        if model.layers % (pp * vpp) if policy.layers % pp == 0 else model.layers != policy.layers:
            return f"pp={pp}, vpp={vpp} do not divide the teacher's {model.layers} layers as the policy's"
        if ep > 1 and (not model.experts or model.experts % ep):
            return f"ep={ep} does not divide the teacher's experts"
        if cp > 1 and model.window:
            return f"cp={cp} cuts sequences, and the teacher has a sliding window"
        return None


def teacher(options: Namespace, asks: Method, gpu: Gpu, longest: int) -> PlannedTeacher | None:
    """Reads the options `--teacher` and `--teacher-gpus`. `longest`: tokens of the longest sequence.

    Raises ConfigError for a teacher without a use or a method without its teacher, where servers do not give
    what the method reads, and for one that is too large for its servers or has too few positions.
    """
    named, gpus, recipe = options.teacher, options.teacher_gpus, f"--recipe {options.recipe}"
    wanted = asks.teacher_passes > 0 or asks.teacher_divergence
    if named is None:
        if gpus:
            raise ConfigError(f"--teacher-gpus {gpus}: name the model of the servers, --teacher")
        if wanted:
            raise ConfigError(f"{recipe}: name the model that it compares with, --teacher")
        return None
    if not wanted:
        raise ConfigError(f"--teacher {named}: {recipe} compares with no teacher; try --recipe opd")
    if gpus and asks.teacher_divergence:
        raise ConfigError(
            f"--teacher-gpus {gpus}: {recipe} needs the teacher's hidden states, and servers give log-probs; "
            "leave it out"
        )
    model = architecture.load(named, "--teacher")
    if model.positions and longest > model.positions:
        raise ConfigError(
            f"--teacher {named}: --prompt-tokens plus the longest response are {longest} tokens, more than "
            f"its max_position_embeddings={model.positions}"
        )
    if options.share_prompts and not gpus and (model.latent or model.window):
        what = "latent attention" if model.latent else "a sliding window"
        raise ConfigError(f"--share-prompts: a teacher with {what} cannot share prompts; leave it out")
    tp = _server_size(model, gpu, gpus, longest) if gpus else 1
    kind = (asks.teacher_passes, asks.teacher_divergence, asks.loss_terms)
    return PlannedTeacher(model, *kind, gpus=gpus, tp=tp)


def _server_size(model: Architecture, gpu: Gpu, gpus: int, longest: int) -> int:
    """Returns the fewest GPUs of a server that hold the weights and the longest sequence's cache.

    `gpus`: of all servers. Raises ConfigError if no server on one machine does.
    """
    for tp in (1, 2, 4, 8):
        cache = 2.0 * model.cache_per_token(tp) * longest
        if not (gpus % tp or model.heads % tp) and engine_room(model, tp, gpu.memory_gib) >= cache:
            return tp
    raise ConfigError(
        f"--teacher-gpus {gpus}: no server on a part of them holds the teacher's "
        f"{2 * model.parameters / GIB:.0f} GiB of weights and the cache of {longest} tokens; a server "
        "has 1, 2, 4 or 8 GPUs"
    )
