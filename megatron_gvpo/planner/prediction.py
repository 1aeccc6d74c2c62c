"""The planner's prediction for a configuration: its sizes, its memory, and whether that fits into a GPU.

Commands use it to warn before a run, and rehearsals are compared with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.architecture import CONTEXT_BYTES, NCCL_BYTES, Architecture
from megatron_gvpo.planner.memory_model import memory
from megatron_gvpo.planner.workload import Layout, PlannedTeacher, method_of
from megatron_gvpo.settings.config import Config

USABLE = 0.94  # fraction of a GPU's memory that a layout may fill
SERVER_GIB = 4.0  # the context and the CUDA graphs of a colocated server that sleeps
_ALONE = 0.98  # usable share of a GPU beside a sleeping server; the driver takes the rest
COMMON_GIB = 79.6  # memory of an "80 GB" H100 or H800, assumed for the GPUs of a Slurm job
TEXT = 32  # tokens of a prompt beside its image
PROMPT = 512  # tokens of a prompt, unless data.max_prompt_tokens is less

# The planner's parts of memory, and the names of a rehearsal for them.
_PARTS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
}
_PARTS |= {name: name for name in ("critic", "head", "workspaces", "teacher", "runtime", "total")}


def predict(
    config: Config, world: int, micro_batches: int | None = None, stage: int | None = None
) -> dict[str, float] | None:
    """GiB by part as `plan` would have them; None for a model that the planner lacks, and in float32.

    `stage`: a pipeline stage; default: the fullest. With options that it does not count, the result lacks
    activations and the total.
    """
    predicted = _parts(config, layout_of(config, world), micro_batches, stage)
    if predicted is None or _knows_activations(config):
        return predicted
    return {name: size for name, size in predicted.items() if name not in ("activations", "head", "total")}


def least(config: Config, world: int) -> float | None:
    """The total in GiB, or a lower bound if `predict` cannot tell; None for other models.

    The bound assumes that all activations are recomputed, which keeps the least on the GPU.
    """
    layout = layout_of(config, world)
    if not _knows_activations(config):
        layout = replace(layout, recompute=True)
    predicted = _parts(config, layout, None, None)
    return None if predicted is None else predicted["total"]


def layout_of(config: Config, world: int) -> Layout:
    """The configuration's layout, as the planner has it."""
    parallel = config.parallel
    return Layout(
        gpus=world,
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        sequence_parallel=parallel.sequence_parallel,
        recompute=parallel.recompute == "full" and parallel.recompute_layers is None,
        recompute_modules=parallel.recompute_modules if parallel.recompute == "selective" else (),
        stages=parallel.stage_layers,
        fp8=config.model.fp8 is not None,
        offload=config.optimizer.offload_fraction,
        muon=config.optimizer.muon is not None,
    )


def _parts(
    config: Config, layout: Layout, micro_batches: int | None, stage: int | None
) -> dict[str, float] | None:
    if config.model.dtype != "bfloat16":  # all sizes are those of bfloat16
        return None
    try:
        model = _architecture(config.model.path)
        critic = critic_of(config, model)
        teacher = teacher_of(config)
    except ConfigError:
        return None
    if config.model.adapter is not None:
        model = replace(model, adapter_rank=config.model.adapter.rank)
    model = replace(model, trains_vision=config.model.train_vision)
    size = size_of(config, layout.dp, micro_batches)
    images = size.prompts_of_a_pack * largest_image(size.prompt) if model.vision is not None else 0
    work = size.tokens_of_a_pack, size.micro_batches, critic, teacher
    responses = size.rows_of_a_pack * size.response
    has_bonus = config.algorithm.loss.wants_entropy or config.algorithm.loss.divergence is not None
    weights_first = size.divides_groups and not has_bonus  # a bonus has separate gradients
    predicted = memory(
        model,
        layout,
        *work,
        responses=responses,
        stage=stage,
        weights_first=weights_first,
        image_tokens=images,
        share_prompts=config.train.requires_shared_prompts,
        stash_bytes=config.train.head_stash_bytes,
    )
    return {_PARTS[name]: gib for name, gib in predicted.in_gib().items() if gib}


def _architecture(directory: str) -> Architecture:
    return architecture.load(str(Path(directory) / "config.json"))


def critic_of(config: Config, policy: Architecture) -> Architecture | None:
    """The critic's architecture; None without one. Raises ConfigError for one that the planner lacks."""
    if (critic := config.algorithm.critic) is None:
        return None
    return policy if critic.path is None else _architecture(critic.path)


def teacher_of(config: Config) -> PlannedTeacher | None:
    """The teacher that the trainer holds; None without one. Raises ConfigError as `critic_of`."""
    if config.teacher is None or config.teacher.server is not None:
        return None
    asks = method_of(config.algorithm, config.train.mini_batches)
    passes, compares = asks.teacher_passes, asks.teacher_divergence
    return PlannedTeacher(_architecture(config.teacher.path), passes, compares, asks.loss_terms)


def _knows_activations(config: Config) -> bool:
    parallel = config.parallel
    return not (parallel.recompute_layers or parallel.offload_layers or parallel.offload_modules)


@dataclass(frozen=True)
class Size:
    """An update's rows: `micro_batches` packs on every data-parallel rank, of `rows_of_a_pack` rows each."""

    rows_of_a_pack: int
    prompts_of_a_pack: int  # prompts that are computed: one a row, or one a group that shares it
    prompt: int  # tokens of a prompt
    response: int
    micro_batches: int
    micro_batches_of_run: int  # micro-batches of an update in the run; the memory peak is the same
    divides_groups: bool  # a loss over groups then knows its weights before the forward

    @property
    def tokens_of_a_pack(self) -> int:
        return self.prompts_of_a_pack * self.prompt + self.rows_of_a_pack * self.response


def size_of(config: Config, data_parallel: int, micro_batches: int | None = None) -> Size:
    """Sizes of the rows of an update on `data_parallel` ranks; `micro_batches`: default enough for the peak.

    Packs are filled to train.max_tokens_per_micro_batch with rows of one length, at most the longest. Where
    whole groups fit into a pack and stay together, a pack has whole groups; with train.share_prompts each has
    its prompt once.
    """
    train, rollout, parallel = config.train, config.rollout, config.parallel
    budget = train.max_tokens_per_micro_batch * parallel.cp
    prompt = min(PROMPT, config.data.max_prompt_tokens or PROMPT)
    longest = prompt + rollout.max_tokens
    rows = math.ceil(train.prompts_per_step * rollout.n / train.mini_batches / data_parallel)
    together = config.algorithm.loss.couples_groups or train.requires_shared_prompts
    shared = prompt + rollout.n * rollout.max_tokens  # tokens of a group that shares its prompt
    shares = train.requires_shared_prompts and shared <= budget
    unit = rollout.n if together and (shares or rollout.n * longest <= budget) else 1
    largest = shared if shares else unit * longest
    fitting = max(1, math.ceil(budget / largest)) * unit if longest <= budget else 1
    of_a_pack = min(fitting, rows)
    of_a_prompt = min(rollout.n, of_a_pack) if shares else 1  # responses that follow a prompt
    prompts = math.ceil(of_a_pack / of_a_prompt)
    limit = prompt + of_a_prompt * rollout.max_tokens
    length = min(limit, budget // prompts) if longest <= budget else longest
    response = min(rollout.max_tokens, max(length - prompt, length // 2) // of_a_prompt)
    in_run = math.ceil(rows / of_a_pack)
    in_run += -in_run % parallel.pp if parallel.vpp > 1 else 0
    enough = parallel.pp * (2 if parallel.vpp > 1 else 1) + (parallel.vpp == 1)
    count = micro_batches or min(in_run, max(2, enough))
    is_divided = (together and unit == 1) or longest > budget
    own_prompt = min(prompt, length - of_a_prompt * response)
    return Size(of_a_pack, prompts, own_prompt, response, count, in_run, is_divided)


def largest_image(prompt: int) -> int:
    """Tokens of the largest square image that fits into a prompt of `prompt` tokens, beside some text."""
    return math.isqrt(max(0, prompt - TEXT)) ** 2


def usable_gib(gpu_gib: float, colocated: bool) -> float:
    """GiB of a GPU with `gpu_gib` that the trainer may fill: 74.0 of 79.6 where servers sleep beside it."""
    usable = USABLE * gpu_gib
    return min(usable, _ALONE * gpu_gib - SERVER_GIB) if colocated else usable


def reservable_gib(gpu_gib: float, colocated: bool) -> float:
    """GiB of these that PyTorch may reserve: all but the parts of CUDA's context and of NCCL.

    A plan compares the sum of its parts with `usable_gib`, and a rehearsal compares PyTorch's reservation
    with this. The two differ by fragmentation alone, which a plan assumes and a rehearsal measures.
    """
    return usable_gib(gpu_gib, colocated) - (CONTEXT_BYTES + NCCL_BYTES) / architecture.GIB


def smallest_gpu_gib(reserved: float, colocated: bool) -> float:
    """GiB of the smallest GPU on which PyTorch may reserve `reserved` GiB."""
    used = reserved + (CONTEXT_BYTES + NCCL_BYTES) / architecture.GIB
    alone = used / USABLE
    return max(alone, (used + SERVER_GIB) / _ALONE) if colocated else alone


def has_sleeping_server(config: Config) -> bool:
    """True if rollout servers sleep beside the trainer on its GPUs."""
    return config.rollout.uses_servers and config.rollout.servers.colocated


def excess(config: Config, world: int, gpu_gib: float) -> str | None:
    """One line for a configuration that needs more than a GPU of `gpu_gib` GiB has; None if it fits.

    `world`: the trainer's ranks. Callers only warn, because it is a prediction. None as well for models
    that the planner does not know, and for layouts that other checks refuse.
    """
    parallel = config.parallel
    if world % (parallel.tp * parallel.pp * parallel.cp) or world % (parallel.pp * parallel.ep):
        return None
    needed = least(config, world)
    colocated = has_sleeping_server(config)
    limit = usable_gib(gpu_gib, colocated)
    if needed is None or needed <= limit:
        return None
    beside = " beside a sleeping server" if colocated else ""
    return (
        f"the update needs about {needed:.0f} GiB on the fullest of {world} GPUs (predicted), and "
        f"{limit:.0f} of {gpu_gib:.0f} GiB are usable{beside}: lower train.max_tokens_per_micro_batch="
        f"{config.train.max_tokens_per_micro_batch}, set parallel.recompute, or divide the model among more "
        f"GPUs; `megatron-gvpo rehearse CONFIG.yaml --world {world}` shows the memory by part"
    )
