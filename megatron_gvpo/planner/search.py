"""Enumerates every legal layout, predicts its cost, and explains why the others are slower or cannot run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import push_time
from megatron_gvpo.planner.architecture import Architecture, Gpu
from megatron_gvpo.planner.memory_model import Memory, host_state, memory, shard
from megatron_gvpo.planner.prediction import USABLE
from megatron_gvpo.planner.step_time import Seconds, model_flops, rollout_seconds, seconds
from megatron_gvpo.planner.workload import NODE, Layout, PlannedTeacher, Workload
from megatron_gvpo.settings.parallel import DEEPEP_RANKS

SIZES = (1, 2, 4, 8, 16, 32, 64)
SHOWN = 4  # alternative values shown for each size of the best layout
MICRO_TOKENS = (65536, 32768, 16384, 8192, 4096, 2048)


@dataclass(frozen=True)
class Candidate:
    """A layout that can run. All numbers are predicted."""

    layout: Layout
    micro_tokens: int  # train.max_tokens_per_micro_batch, for one rank
    memory: Memory
    seconds: Seconds
    mfu: float  # model operations over the bf16 peak of the trainer's GPUs, while they train
    host_gib: float = 0.0  # host memory per node for the optimizer's states
    teacher_host_gib: float = 0.0  # host memory per node for a teacher that the trainer holds

    def to_dict(self) -> dict[str, Any]:
        return {
            "layout": self.layout.name,
            "micro_tokens": self.micro_tokens,
            "predicted_seconds": self.seconds.by_phase(),
            "predicted_gib": self.memory.in_gib(),
            "predicted_training_mfu": round(self.mfu, 3),
            **({"predicted_host_gib_of_a_node": round(self.host_gib, 1)} if self.layout.offload else {}),
            **(
                {"predicted_host_gib_of_a_node_for_the_teacher": round(self.teacher_host_gib, 1)}
                if self.teacher_host_gib
                else {}
            ),
        }


@dataclass
class Plan:
    """Result of a search."""

    best: list[Candidate]  # fastest first
    losers: list[str] = field(default_factory=list)  # cost of the alternatives to the best, one line each
    impossible: list[str] = field(default_factory=list)  # reasons why layouts cannot run, one line each
    considered: int = 0  # number of layouts


def search(
    model: Architecture,
    gpu: Gpu,
    gpus: int,
    work: Workload,
    *,
    ahead: int = 1,
    fp8: bool = False,
    offload: float = 0.0,
    colocated: bool = False,
) -> Plan:
    """Searches all layouts of `gpus` GPUs, which are not a teacher's, for the fastest step.

    `ahead`: the largest async depth to consider. `offload`: the fraction of the optimizer's states in host
    memory. `colocated`: consider servers on the trainer's GPUs alone. Raises ConfigError with the reasons if
    no layout can run.
    """
    _check_request(model, gpu, work, fp8)
    candidates: list[Candidate] = []
    reasons: Counter[str] = Counter()
    smallest: float | None = None
    with_host = False  # a layout that does not fit would fit with all optimizer states in host memory
    for placement in _placements(model, gpu, gpus, work, ahead, colocated):
        offloaded = replace(placement, offload=offload)
        for layout in _layouts(model, offloaded, fp8, reasons, work.share_prompts, work.teacher):
            if work.ep_exchange == "deepep" and layout.ep not in (1, *DEEPEP_RANKS):
                continue
            if work.responses / work.mini_batches < layout.dp:
                reasons["more data-parallel ranks than responses in a mini-batch"] += 1
                continue
            candidate, least = _fit(model, gpu, layout, work)
            if candidate is None:
                reasons[f"needs more than {USABLE:.0%} of the {gpu.memory_gib:g} GiB"] += 1
                smallest = least if smallest is None else min(smallest, least)
                if not (candidates or with_host) and offload < 1:
                    with_host = _fit(model, gpu, replace(layout, offload=1.0), work)[0] is not None
            else:
                candidates.append(candidate)
    impossible = [f"{count} layout{'s' * (count > 1)}: {reason}" for reason, count in reasons.most_common()]
    if smallest is not None:
        impossible.append(f"the smallest layout that does not fit needs {smallest:.0f} GiB a GPU")
    if not candidates:
        if with_host:
            impossible.append("some layouts fit with the optimizer's states in host memory: try --offload 1")
        raise ConfigError("no layout can run: " + "; ".join(impossible or [_no_server(model, gpu, work)]))
    candidates = _fastest_first(candidates)
    return Plan(candidates, list(_losers(candidates)), impossible, len(candidates) + reasons.total())


def _check_request(model: Architecture, gpu: Gpu, work: Workload, fp8: bool) -> None:
    """Raises ConfigError for FP8 on a GPU without it, and for texts longer than the model's positions."""
    if fp8 and gpu.fp8_tflops is None:
        raise ConfigError(f"--fp8: the GPU {gpu.name} does not support FP8")
    if model.positions and work.longest > model.positions:
        raise ConfigError(
            f"--prompt-tokens plus the longest response are {work.longest} tokens, more than the "
            f"model's max_position_embeddings={model.positions}: a prompt has {work.prompt_tokens} "
            f"(--prompt-tokens), the longest response {work.lengths.maximum} (--response-length MEAN,max=N; "
            "without max, 5 times the mean)"
        )


def _fastest_first(candidates: list[Candidate]) -> list[Candidate]:
    """The candidates by their time, but first the simplest of those within 1 % of the fastest.

    Predictions are not accurate to 1 %.
    """
    ordered = sorted(candidates, key=_order)
    limit = 1.01 * ordered[0].seconds.step
    simplest = min((each for each in ordered if each.seconds.step <= limit), key=_divisions)
    ordered.insert(0, ordered.pop(ordered.index(simplest)))
    return ordered


def _placements(
    model: Architecture, gpu: Gpu, gpus: int, work: Workload, ahead: int, colocated: bool
) -> Iterator[Layout]:
    """Yields each placement of the rollout servers: on the trainer's GPUs, or on nodes of their own."""
    yield from _with_engines(model, gpu, Layout(gpus), work)
    nodes = 0 if colocated else gpus // NODE
    shares = (0.25, 0.375, 0.5, 0.625, 0.75)
    for rollout_nodes in sorted({round(nodes * share) for share in shares} - {0, nodes}):
        for depth in range(ahead + 1):
            trainer_gpus, rollout_gpus = (nodes - rollout_nodes) * NODE, rollout_nodes * NODE
            placement = Layout(trainer_gpus, rollout_gpus=rollout_gpus, async_steps=depth)
            yield from _with_engines(model, gpu, placement, work)


def _with_engines(model: Architecture, gpu: Gpu, layout: Layout, work: Workload) -> Iterator[Layout]:
    """Yields the layout with its fastest size of rollout engine, or nothing if no size fits.

    A server has GPUs of one node, or whole nodes of its own (`rollout.servers.nodes`).
    """
    gpus = layout.rollout_gpus or layout.gpus
    timed = [
        (rollout_seconds(model, gpu, gpus // tp, tp, work), tp)
        for tp in _engine_sizes(model)
        if gpus % tp == 0 and (tp <= NODE or layout.rollout_gpus)
    ]
    if timed and min(timed)[0] < float("inf"):
        yield replace(layout, rollout_tp=min(timed)[1])


def _engine_sizes(model: Architecture) -> list[int]:
    """Returns the numbers of GPUs over which an engine can divide the model's heads and experts."""
    return [tp for tp in SIZES if model.heads % tp == 0 and model.expert_ffn % tp == 0]


def _no_server(model: Architecture, gpu: Gpu, work: Workload) -> str:
    """Return the error that no rollout server fits on the GPUs, and the GPUs that would suffice."""
    fits = [tp for tp in _engine_sizes(model) if rollout_seconds(model, gpu, 1, tp, work) < float("inf")]
    weights = f"the {2 * model.parameters / 2**30:.0f} GiB of bf16 weights and the longest response's cache"
    if not fits:
        return f"no rollout server of at most {max(SIZES)} of these GPUs can hold {weights}"
    nodes = f", on {fits[0] // NODE} nodes that do not train" if fits[0] > NODE else ""
    return f"a rollout server needs {fits[0]} GPUs{nodes}, to hold {weights}"


def _layouts(
    model: Architecture,
    placement: Layout,
    fp8: bool,
    reasons: Counter[str],
    share_prompts: bool = False,
    teacher: PlannedTeacher | None = None,
) -> Iterator[Layout]:
    """Yields every division of the trainer's GPUs that Megatron supports for this model, and its teacher."""
    gpus, trainer_teacher = placement.gpus, teacher if teacher and teacher.is_on_trainer else None
    # Runs refuse cp > 1 for images and for shared prompts. They allow it for sliding windows if
    # parallel.cp_exchange is a2a (`checks.layout`); the planner, whose plans have the default p2p, does not.
    has_cp = not (model.window or share_prompts or model.vision is not None)
    cp_sizes, ep_sizes = SIZES[: 4 if has_cp else 1], SIZES if model.experts else (1,)
    for tp, pp in _tensor_and_pipeline_sizes(model, gpus, reasons):
        for cp, ep, vpp in product(cp_sizes, ep_sizes, (1, 2, 4)):
            if gpus % (tp * pp * cp) or gpus % (pp * ep) or model.experts % ep:
                continue
            if not model.divisible(tp, cp):
                reasons[f"tp={tp}, cp={cp} do not divide the heads of gated delta nets"] += 1
                continue
            if vpp > 1 and (pp == 1 or model.layers % (pp * vpp) or model.vision is not None):
                continue
            if trainer_teacher and (reason := trainer_teacher.misfit(model, tp, pp, vpp, cp, ep)):
                reasons[reason] += 1
                continue
            for recompute in (False, True):
                yield replace(placement, tp=tp, pp=pp, cp=cp, ep=ep, vpp=vpp, recompute=recompute, fp8=fp8)


def _tensor_and_pipeline_sizes(
    model: Architecture, gpus: int, reasons: Counter[str]
) -> Iterator[tuple[int, int]]:
    """Yields the pairs of tp and pp that divide the GPUs and the model; counts the reasons for the others."""
    for tp in (size for size in SIZES if size <= min(NODE, gpus)):
        if not model.divisible(tp):
            what = "norm over all heads" if model.wide_qk_norm else "attention heads or the MLP"
            reasons[f"tp={tp} does not divide the {what}"] += 1
            continue
        if model.adapter_rank % tp:
            reasons[f"tp={tp} does not divide the adapters' rank"] += 1
            continue
        if model.vision is not None and model.vocab % tp:
            reasons[
                f"tp={tp} does not divide the vocabulary, which is not padded for a model with images"
            ] += 1
            continue
        for pp in (size for size in range(1, gpus + 1) if gpus % (tp * size) == 0 and size <= model.layers):
            if model.vision is not None and model.vision.deep > model.layers // pp:
                reasons[f"pp={pp} leaves the first stage fewer layers than the vision tower feeds"] += 1
                continue
            yield tp, pp


def _fit(model: Architecture, gpu: Gpu, layout: Layout, work: Workload) -> tuple[Candidate | None, float]:
    """Returns the layout with its fastest micro-batch that fits (or None), and its least memory in GiB."""
    best: Candidate | None = None
    least = float("inf")
    share = work.tokens / work.mini_batches / layout.dp
    for rank_tokens in MICRO_TOKENS:
        tokens = rank_tokens * layout.cp  # context-parallel ranks share a micro-batch
        # A prompt is shared by the responses in a micro-batch: it has room for a whole group.
        least_tokens = max(work.longest, work.group_tokens) if work.share_prompts else work.longest
        if tokens < least_tokens and rank_tokens != max(MICRO_TOKENS):
            break
        batches = max(1, int(share // tokens))
        in_pack = min(tokens, share)
        responses = in_pack * work.responses * work.lengths.mean / work.tokens
        used = memory(
            model,
            layout,
            in_pack,
            batches,
            model if work.critic else None,
            work.teacher,
            responses,
            share_prompts=work.share_prompts,
        )
        least = min(least, used.total / 2**30)
        if used.total / 2**30 > USABLE * gpu.memory_gib:
            continue
        if best is None:
            layout = replace(layout, transport=push_time.fastest(model, gpu, layout))
        predicted = seconds(model, gpu, layout, work, in_pack)
        if best is None or predicted.step < best.seconds.step:
            best = Candidate(
                layout,
                rank_tokens,
                used,
                predicted,
                mfu=model_flops(model, work) / (predicted.training * layout.gpus * gpu.bf16_tflops * 1e12),
                host_gib=_host_gib(model, layout, work.critic),
                teacher_host_gib=_teacher_host_gib(work.teacher, layout),
            )
    return best, least


def _host_gib(model: Architecture, layout: Layout, critic: bool) -> float:
    """Returns the GiB of host memory for optimizer states on a node."""
    if not layout.offload:
        return 0.0
    return _fuller_node(
        layout,
        lambda stage: (
            host_state(model, layout, stage) + critic * host_state(model, layout, stage, critic=True)
        ),
    )


def _teacher_host_gib(teacher: PlannedTeacher | None, layout: Layout) -> float:
    """Returns the GiB of host memory for the weights of a teacher that the trainer holds, on a node."""
    if teacher is None or not teacher.is_on_trainer:
        return 0.0
    return _fuller_node(layout, lambda stage: 2 * shard(teacher.model, layout, stage).total)


def _fuller_node(layout: Layout, of_stage: Callable[[int], float]) -> float:
    """Returns the GiB on the fuller of the first and the last node, given a rank's bytes by its stage.

    The ranks of these two nodes hold the ends of the pipeline.
    """
    ranks, last = layout.gpus // layout.pp, max(0, layout.gpus - NODE)
    nodes = (range(first, min(first + NODE, layout.gpus)) for first in (0, last))
    return max(sum(of_stage(rank // ranks) for rank in node) for node in nodes) / 2**30


def _order(candidate: Candidate) -> tuple[float, float, float]:
    """Sort key: step time, then training time, then memory.

    If the rollouts limit the step, the layout that trains fastest beside them comes first.
    """
    phases = candidate.seconds
    training = phases.scoring + phases.teacher + phases.training + phases.optimizer
    return round(phases.step, 2), training, candidate.memory.total


def _divisions(candidate: Candidate) -> int:
    """Counts the ways in which the model or its work is divided, beside data parallelism."""
    layout = candidate.layout
    sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.async_steps)
    return sum(size > 1 for size in sizes) + layout.recompute


def _losers(candidates: list[Candidate]) -> Iterator[str]:
    """Yields, for other values of each size, the best layout's cost and the phase that it slows most."""
    best = candidates[0]
    ways = {
        "tp": lambda c: c.layout.tp,
        "pp": lambda c: c.layout.pp,
        "cp": lambda c: c.layout.cp,
        "ep": lambda c: c.layout.ep,
        "recompute": lambda c: c.layout.recompute,
        "rollout GPUs": lambda c: c.layout.rollout_gpus,
        "async steps": lambda c: c.layout.async_steps,
    }
    for name, way in ways.items():
        others: dict[Any, Candidate] = {}  # the best of each value: the first, because `candidates` is sorted
        for candidate in candidates:
            if way(candidate) != way(best):
                others.setdefault(way(candidate), candidate)
        for value in sorted(list(others)[:SHOWN]):
            other = others[value]
            best_seconds, other_seconds = best.seconds.by_phase(), other.seconds.by_phase()
            slower_by = {phase: other_seconds[phase] - best_seconds[phase] for phase in best_seconds}
            slower = slower_by.pop("step")
            slower_by.pop("waiting", None)
            phase = max(slower_by, key=slower_by.__getitem__)
            cost = f"{slower:+.1f} s a step" if slower >= 0.05 else "no slower a step"
            yield f"{name}={value}: {cost}; {phase} {slower_by[phase]:+.1f} s"
