"""Predicts the memory of a layout's fullest GPU, part by part, in bytes.

Parameters and optimizer state follow Megatron's distributed optimizer (its guide "dist_optimizer"). Each bf16
weight takes 2 bytes, its gradient 4, and its fp32 copy and Adam's two moments take 12 / dp. Weights under
adapters take 2 bytes, and the adapters take the other bytes. Optimizer state on the host takes 16 / dp there,
because an update also copies the gradients. activations.py counts the activations.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from megatron_gvpo.planner.activations import STASH_BYTES, TILE_BYTES, Activations, tower_bytes
from megatron_gvpo.planner.architecture import GIB, RUNTIME_BYTES, Architecture
from megatron_gvpo.planner.workload import Layout

if TYPE_CHECKING:
    from megatron_gvpo.planner.workload import PlannedTeacher


HEAD_BYTES = 800e6  # memory of the fused head's tiles in a pass without a gradient


@dataclass(frozen=True)
class Shard:
    """Number of parameters on one rank of a pipeline stage."""

    dense: float  # parameters whose gradients are reduced over dp x cp ranks
    experts: float = 0.0  # parameters whose gradients are reduced over the ranks with the same experts

    @property
    def total(self) -> float:
        return self.dense + self.experts


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, by part."""

    parameters: float
    gradients: float
    optimizer: float
    critic: float  # parameters, gradients and optimizer state of the critic
    activations: float
    head: float
    workspaces: float  # workspaces of Transformer Engine and cuBLAS
    teacher: float  # a teacher on the trainer: weights and a layer's activations, or its head
    runtime: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    def in_gib(self) -> dict[str, float]:
        return {name: round(value / GIB, 2) for name, value in (asdict(self) | {"total": self.total}).items()}


def shard(model: Architecture, layout: Layout, stage: int, critic: bool = False) -> Shard:
    """Counts the parameters that a rank of pipeline stage `stage` holds.

    `critic`: count the same model with an output layer of one number per token, which is not split among
    ranks.
    """
    here, mixtures = stage_layers(model, layout, stage)
    dense = (
        here * (model.attention / layout.tp + model.replicated)
        + (here - mixtures) * model.mlp / layout.tp
        + mixtures * (model.shared / layout.tp + model.router)
    )
    first, last = stage == 0, stage == layout.pp - 1
    tables = first + (last and not critic and not (model.tied and first))
    dense += tables * model.embedding / layout.tp + last * model.hidden
    dense += last * critic * (model.hidden + 1)
    dense += first * _tower(model, layout)
    return Shard(dense, mixtures * model.experts * model.expert / (layout.ep * layout.etp))


def stage_layers(model: Architecture, layout: Layout, stage: int) -> tuple[int, int]:
    """Returns the layers of a pipeline stage, and how many of them are mixtures of experts.

    These come last in the model, as in all models known here. With virtual stages a stage has several chunks
    of layers, spread over the model.
    """
    if layout.stages is not None:
        sizes = list(layout.stages)
    elif model.layers % (layout.pp * layout.vpp) == 0:
        sizes = [model.layers // (layout.pp * layout.vpp)] * (layout.pp * layout.vpp)
    else:
        sizes = list(layout.stage_layers(model.layers))
    dense = model.layers - model.moe_layers
    mixtures = 0
    for chunk in range(stage, len(sizes), layout.pp):
        before = sum(sizes[:chunk])
        mixtures += min(sizes[chunk], max(0, before + sizes[chunk] - dense))
    return sum(sizes[stage :: layout.pp]), mixtures


def _tower(model: Architecture, layout: Layout) -> float:
    """Parameters of the vision tower on a rank of the first stage."""
    tower = model.vision
    return 0.0 if tower is None else tower.parameters / (layout.tp if tower.split else 1)


def trained_shard(model: Architecture, layout: Layout, stage: int, critic: bool = False) -> Shard:
    """Counts the parameters on a rank that train: all but a frozen vision tower's, or the adapters'."""
    if not model.adapter_rank or critic:
        stage_shard = shard(model, layout, stage, critic)
        frozen = 0.0 if stage or model.trains_vision else _tower(model, layout)
        return replace(stage_shard, dense=stage_shard.dense - frozen)
    here, mixtures = stage_layers(model, layout, stage)
    dense = here * model.attention_adapters + (here - mixtures) * model.mlp_adapters(model.ffn)
    routed = mixtures * model.experts * model.mlp_adapters(model.expert_ffn)
    return Shard(dense / layout.tp, routed / (layout.ep * layout.etp))


def state(
    model: Architecture, layout: Layout, stage: int, bytes_each: int = 2, critic: bool = False
) -> tuple[float, float, float]:
    """Returns the bytes of parameters, gradients and optimizer state on the GPU.

    `bytes_each`: bytes of a weight, 2 in bf16 and 4 in fp32. In fp32 the optimizer needs no copy of the
    weights.
    """
    stage_shard, trained = shard(model, layout, stage, critic), trained_shard(model, layout, stage, critic)
    copies = layout.dp * layout.cp
    expert_copies = layout.gpus // (layout.pp * layout.ep * layout.etp)
    own = 12 if bytes_each == 2 else 8
    second = 4 * matrices(model, layout, stage, critic) if layout.muon else 0.0  # Muon has one moment
    added = trained.total if model.adapter_rank and not critic else 0.0
    return (
        bytes_each * (stage_shard.total + added),
        4 * trained.total,
        (1 - layout.offload) * own * (trained.dense / copies + trained.experts / expert_copies) - second,
    )


def matrices(model: Architecture, layout: Layout, stage: int, critic: bool = False) -> float:
    """Counts the parameters that Muon updates on a rank: the trained ones without embeddings and heads.

    Norms and biases are counted, too, because they are less than a thousandth.
    """
    trained = trained_shard(model, layout, stage, critic)
    copies = layout.dp * layout.cp
    expert_copies = layout.gpus // (layout.pp * layout.ep * layout.etp)
    vectors = 0.0
    if critic or not model.adapter_rank:
        first, last = stage == 0, stage == layout.pp - 1
        tables = first + (last and not critic and not (model.tied and first))
        vectors = tables * model.embedding / layout.tp + last * model.hidden * (1 + critic)
    return (trained.dense - vectors) / copies + trained.experts / expert_copies


def host_state(model: Architecture, layout: Layout, stage: int, critic: bool = False) -> float:
    """Returns the bytes of host memory for one rank's optimizer.

    Each offloaded parameter takes an fp32 master weight, two moments and a gradient: 16 bytes.
    """
    trained = trained_shard(model, layout, stage, critic)
    updated = trained.dense / (layout.dp * layout.cp) + trained.experts / (
        layout.gpus // (layout.pp * layout.ep * layout.etp)
    )
    return 16 * layout.offload * updated


def activation_bytes(model: Architecture, layout: Layout, tokens: float) -> float:
    """Returns the bytes that one layer keeps for the backward pass of `tokens` tokens; the mean of layers."""
    activations = Activations(model, layout, tokens)
    if layout.recompute:
        return activations.stream
    dense = model.layers - model.moe_layers
    saved = dense * activations.layer(False).saved + model.moe_layers * activations.layer(True).saved
    return saved / model.layers


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Counts the micro-batches whose activations a stage keeps at once under 1F1B (arXiv 2104.04473)."""
    waiting = min(layout.pp - stage, micro_batches)
    if layout.vpp > 1 and micro_batches >= layout.pp:
        return waiting * (1 + (layout.pp - 1) / (layout.pp * layout.vpp))
    return waiting


def teacher_pass(teacher: PlannedTeacher, layout: Layout, stage: int, tokens: float) -> float:
    """Returns the bytes of a trainer's teacher in its pass over a micro-batch, which keeps no activations.

    They are its weights, the layer that is being computed, and on the last stage the head's tile or a copy
    of the output weight.
    """
    model, plain = teacher.model, replace(layout, recompute=False)
    weights = 2 * shard(model, layout, stage).total + activation_bytes(model, plain, tokens)
    if stage < layout.pp - 1:
        return weights
    return weights + max(
        HEAD_BYTES if teacher.passes else 0.0,
        2 * model.embedding / layout.tp if teacher.divergence else 0.0,
    )


def teacher_in_head(teacher: PlannedTeacher, layout: Layout, tokens: float) -> float:
    """Returns the bytes of a divergence on the last stage, beside the head's own, in the policy's update.

    They are the teacher's output weight, its hidden states of a micro-batch and a tile of its logits.
    """
    model = teacher.model
    return 2 * model.embedding / layout.tp + 2 * model.hidden * tokens / layout.cp + TILE_BYTES


def memory(
    model: Architecture,
    layout: Layout,
    tokens: float,
    micro_batches: int,
    critic: Architecture | None = None,
    teacher: PlannedTeacher | None = None,
    responses: float | None = None,
    stage: int | None = None,
    weights_first: bool | None = None,
    image_tokens: float = 0.0,
    share_prompts: bool = False,
    stash_bytes: float = STASH_BYTES,
) -> Memory:
    """Predicts the memory of a GPU of a pipeline stage, with `tokens` tokens per micro-batch.

    `responses`: how many of them have a label; default: all. `stage`: default: the fullest one.
    `weights_first`: whether the tokens' weights are known before the forward; default: the fuller case.
    `image_tokens`: tokens of a micro-batch that stand for images. `share_prompts`: `tokens` has the prompt of
    a group once. `stash_bytes`: train.head_stash_mb in bytes.

    A critic is trained after the policy, and a teacher that the trainer holds has its pass before it: of
    these moments the fullest counts.
    """
    activations = Activations(model, layout, tokens, responses, weights_first, share_prompts, stash_bytes)
    stages = stages_of_a_kind(layout, model.layers) if stage is None else [stage]
    return max(
        (
            _of_stage(model, layout, i, activations, micro_batches, critic, teacher, image_tokens)
            for i in stages
        ),
        key=lambda m: m.total,
    )


def stages_of_a_kind(layout: Layout, layers: int) -> list[int]:
    """Returns the first, the fullest and the last pipeline stage."""
    sizes = layout.stage_layers(layers)
    middle = max(range(layout.pp), key=lambda stage: (sizes[stage], 0 < stage < layout.pp - 1))
    return sorted({0, middle, layout.pp - 1})


def _of_stage(
    model: Architecture,
    layout: Layout,
    stage: int,
    activations: Activations,
    micro_batches: int,
    critic: Architecture | None,
    teacher: PlannedTeacher | None,
    image_tokens: float,
) -> Memory:
    is_last = stage == layout.pp - 1
    second = 0.0 if critic is None else sum(state(critic, layout, stage, critic=True))
    state_here = (*state(model, layout, stage), second)
    layers, mixtures = stage_layers(model, layout, stage)
    waiting = in_flight(layout, stage, micro_batches)
    saved, head = activations.stage(layers - mixtures, mixtures, is_last, waiting)
    saved += 0.0 if stage else waiting * tower_bytes(model, layout, image_tokens)
    if critic is not None:
        its_layers, its_mixtures = stage_layers(critic, layout, stage)
        of_critic = Activations(critic, layout, activations.tokens)
        alone, _ = of_critic.stage(its_layers - its_mixtures, its_mixtures, is_last, waiting, has_head=False)
        saved, head = max((saved, head), (alone, 0.0), key=sum)
    beside = own = 0.0
    if teacher is not None and teacher.is_on_trainer:
        own = teacher_pass(teacher, layout, stage, activations.tokens)
        if teacher.divergence and is_last:
            beside = teacher_in_head(teacher, layout, activations.tokens)
    if own > saved + head + beside:  # the teacher's pass, before the policy's
        saved, head, beside = 0.0, 0.0, own
    workspaces = activations.workspaces(layers - mixtures, mixtures, is_last)
    return Memory(*state_here, saved, head, workspaces, beside, RUNTIME_BYTES)
