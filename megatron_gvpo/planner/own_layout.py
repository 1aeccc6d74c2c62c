"""Predicts for a configuration's layout whether it fits, which change helps first, and the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.planner import architecture, push_time, step_time
from megatron_gvpo.planner.architecture import Architecture, Gpu, engine_room, served_bytes
from megatron_gvpo.planner.prediction import has_sleeping_server, layout_of, least, predict, usable_gib
from megatron_gvpo.planner.workload import NODE, Lengths, Workload, method_of
from megatron_gvpo.settings.config import Config

FEWEST_TOKENS = 1024  # smallest micro-batch that is proposed, in tokens


@dataclass(frozen=True)
class LayoutChange:
    """A change of settings, and the GiB on the fullest GPU after it."""

    settings: str
    gib: float
    fits: bool


@dataclass(frozen=True)
class LayoutAnswer:
    """The memory of the trainer's fullest GPU and of a rollout server, and the changes that would help.

    All numbers are predicted.
    """

    gpus: int
    gpu: str
    parts_gib: dict[str, float]  # without activations if the planner does not know them
    needed_gib: float
    is_lower_bound: bool  # the GiB are a minimum: stored activations take more
    usable_gib: float
    server: str | None  # the reason why no rollout server fits; None if one fits, or the run has none
    # Changes that make the layout fit, the cheapest first; empty if it fits.
    changes: tuple[LayoutChange, ...]
    seconds: dict[str, float] | None  # a step's seconds by phase; None if `step_seconds` cannot predict them
    response_tokens: float  # the mean length of a response, for which `seconds` are computed

    @property
    def fits(self) -> bool:
        return self.needed_gib <= self.usable_gib and self.server is None

    def to_dict(self) -> dict[str, Any]:
        """The answer in plain types, for --json."""
        return {"predicted": True, "fits": self.fits} | asdict(self)


def answer(config: Config, world: int, gpu: Gpu, lengths: Lengths, prompt_tokens: int) -> LayoutAnswer:
    """The answer for `world` GPUs of the trainer. Raises ConfigError for an impossible layout or model.

    `lengths`, `prompt_tokens`: of responses, and of a prompt on average, for the time of a step.
    """
    cards = check_layout(config, world)
    model = architecture.load(config.model.path, "model.path")
    if config.model.dtype != "bfloat16":
        raise ConfigError(
            f"model.dtype={config.model.dtype}: the planner counts bfloat16 alone; megatron-gvpo rehearse "
            "shows the memory of others"
        )
    needed, parts = least(config, world), predict(config, world)
    if needed is None or parts is None:
        raise ConfigError(f"model.path={config.model.path}: the planner does not know this architecture")
    usable = usable_gib(gpu.memory_gib, has_sleeping_server(config))
    changes = () if needed <= usable else tuple(_changes(config, world, usable, model))
    return LayoutAnswer(
        world,
        gpu.name,
        {name: gib for name, gib in parts.items() if name != "total"},
        needed,
        "total" not in parts,
        usable,
        _server_problem(config, cards, model, gpu),
        tuple(sorted(changes, key=lambda change: not change.fits)),
        step_seconds(config, world, gpu, lengths, prompt_tokens),
        lengths.mean,
    )


def step_seconds(
    config: Config, world: int, gpu: Gpu, lengths: Lengths, prompt_tokens: int
) -> dict[str, float] | None:
    """Seconds of a step by phase, with the servers that the configuration starts, colocated or `count`.

    None where the planner lacks a part: other servers or engines, speculation, a teacher, a method that does
    not sample from the policy, servers that are too small.
    """
    rollout, train, servers = config.rollout, config.train, config.rollout.servers
    if not (config.algorithm.samples_from_policy and rollout.uses_servers) or servers.urls:
        return None
    if rollout.speculation is not None or config.teacher is not None:
        return None
    rank = 0 if config.model.adapter is None else config.model.adapter.rank
    model = replace(architecture.load(config.model.path, "model.path"), adapter_rank=rank)
    asks = method_of(config.algorithm, train.mini_batches)
    work = Workload(
        train.prompts_per_step,
        rollout.n,
        prompt_tokens,
        lengths,
        train.mini_batches,
        asks.scoring,
        asks.critic,
        train.batch_epochs,
        train.share_prompts is True,
        ep_exchange=config.parallel.ep_exchange,
    )
    layout = replace(
        layout_of(config, world),
        rollout_gpus=0 if servers.colocated else servers.count * servers.tp,
        rollout_tp=servers.tp,
        async_steps=rollout.async_steps,
    )
    if layout.engines == 0 or not step_time.fits(model, gpu, servers.tp, work):
        return None
    named = rollout.weights.transport
    possible = push_time.possible(model, layout)
    layout = replace(layout, transport=named if named in possible else possible[0])
    of_rank = work.tokens / work.mini_batches / layout.dp
    tokens = min(train.max_tokens_per_micro_batch * config.parallel.cp, of_rank)
    return step_time.seconds(model, gpu, layout, work, tokens).by_phase()


def _server_problem(config: Config, cards: ModelCards, model: Architecture, gpu: Gpu) -> str | None:
    """Why a started rollout server cannot hold the weights and the longest response; None if it can."""
    servers = config.rollout.servers
    if not config.rollout.uses_servers or servers.urls:
        return None
    fp8 = servers.model_path is not None  # a checkpoint that is not on this machine is assumed to be in FP8
    if fp8 and Path(cards.served_path).is_dir():
        fp8 = "quantization_config" in cards.served
    if engine_room(model, servers.tp, gpu.memory_gib, fp8) > 0:
        return None
    weights = served_bytes(model, fp8) / architecture.GIB
    enough = next((tp for tp in (2, 4, 8, 16, 32) if engine_room(model, tp, gpu.memory_gib, fp8) > 0), None)
    remedy = "use larger GPUs" if enough is None else f"set rollout.servers.tp={enough}"
    return (
        f"a rollout server of rollout.servers.tp={servers.tp} cannot hold the {weights:.0f} GiB of "
        f"{'FP8' if fp8 else 'bf16'} weights beside its cache: {remedy}"
    )


def _changes(config: Config, world: int, usable: float, model: Architecture) -> Iterator[LayoutChange]:
    """Changes that would lower the memory, the cheapest first, such as the largest micro-batch that fits."""

    def change(settings: str, changed: Config, gpus: int = world) -> LayoutChange | None:
        parallel = changed.parallel
        if gpus % (parallel.tp * parallel.pp * parallel.cp) or gpus % (parallel.pp * parallel.ep):
            return None
        gib = least(changed, gpus)
        return None if gib is None else LayoutChange(settings, gib, gib <= usable)

    before = least(config, world) or 0.0
    proposals = [
        _fewer_tokens(config, change),
        change("parallel.recompute=full", _with(config, "parallel", recompute="full", recompute_layers=None)),
    ]
    can_offload = config.optimizer.muon is None
    if can_offload:
        offloaded = _with(config, "optimizer", offload_fraction=1.0)
        proposals.append(change("optimizer.offload_fraction=1", offloaded))
    parallel = config.parallel
    if 2 * parallel.tp <= NODE and model.divisible(2 * parallel.tp, parallel.cp):
        divided = _with(config, "parallel", tp=2 * parallel.tp, sequence_parallel=True)
        proposals.append(change(f"parallel.tp={2 * parallel.tp} parallel.sequence_parallel=true", divided))
    if parallel.stage_layers is None and 2 * parallel.pp <= model.layers:
        divided = _with(config, "parallel", pp=2 * parallel.pp)
        proposals.append(change(f"parallel.pp={2 * parallel.pp}", divided))
    proposals.append(change(f"{2 * world} GPUs in place of {world}", config, 2 * world))
    if not any(one is not None and one.fits for one in proposals):
        saving = _with(config, "parallel", recompute="full", recompute_layers=None)
        proposals.append(_fewer_tokens(saving, change, "parallel.recompute=full "))
        if can_offload:
            saving = _with(saving, "optimizer", offload_fraction=1.0)
            more = "parallel.recompute=full optimizer.offload_fraction=1 "
            proposals.append(_fewer_tokens(saving, change, more))
    yield from (one for one in proposals if one is not None and one.gib < before - 0.05)


def _fewer_tokens(
    config: Config, change: Callable[[str, Config], LayoutChange | None], others: str = ""
) -> LayoutChange | None:
    """The largest micro-batch that fits, or the smallest that is proposed; `others`: other changes."""
    tokens = config.train.max_tokens_per_micro_batch
    best: LayoutChange | None = None
    while tokens >= 2 * FEWEST_TOKENS and (best is None or not best.fits):
        tokens = tokens // 2 // FEWEST_TOKENS * FEWEST_TOKENS
        fewer = _with(config, "train", max_tokens_per_micro_batch=tokens)
        best = change(f"{others}train.max_tokens_per_micro_batch={tokens}", fewer)
        if best is None:
            return None
    return best


def _with(config: Config, section: str, **values: Any) -> Config:
    """The configuration with other values in one section.

    The copy is not validated, because no run uses it.
    """
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
