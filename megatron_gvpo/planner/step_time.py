"""Predicts the seconds of a step, phase by phase.

Training time is the operations over the GPU's reachable rate, plus the communication that Megatron does not
hide, plus the pipeline bubble. Rollout time comes from a simulation of continuous batching over the
response-length distribution, one decoding step after another. The simulation includes the end of a rollout,
when only a few long responses still run.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from megatron_gvpo.planner import push_time
from megatron_gvpo.planner.architecture import Architecture, Gpu, engine_room
from megatron_gvpo.planner.memory_model import shard, trained_shard
from megatron_gvpo.planner.traffic import layer_backward, layer_forward, on_the_wire, optimizer_bytes
from megatron_gvpo.planner.workload import NODE, Layout, Speculation, Workload

if TYPE_CHECKING:
    from megatron_gvpo.planner.workload import PlannedTeacher

DECODE_OVERHEAD = 3e-3  # seconds per decoding step for scheduling and sampling
# Seconds per proposed token, for its sampling and the draft's bookkeeping: chosen so that Qwen3.5-9B's
# rollouts gain what SkyRL's docs/examples/spec_decode reports, 2.03 times with 3 tokens and 77 % accepted.
DRAFT_OVERHEAD = 1.7e-3
# Seconds for kernel starts in a CUDA graph, per attention or MLP of a decoding step. Tensor parallelism
# doubles it.
LAYER_OVERHEAD = 8e-6
# Seconds that an all-reduce of a decoding step takes longer for every doubling of the engine's nodes.
# DeepSeek-R1 in FP8 on 2 x 8 H100s takes 23.1 ms a token for one response (SGLang over InfiniBand:
# tt-inference-server issue 356). The rest of this model accounts for 6.2 ms; the remainder is divided by
# 2 x 61 all-reduces. The latency grows as in NCCL's trees (its src/graph/tuning.cc).
NODE_LATENCY = 0.14e-3
# Prefill over training, as fractions of the peak: prefill has no backward pass and large batches.
PREFILL_FRACTION = 1.1
# The same ratio of mixture-of-experts to dense layers: their GEMMs are small and unequal, and tokens are
# permuted.
MIXTURE_FRACTION = 0.6
# DeepEP's kernels over the links' rates: the lowest of its published figures, 153 GB/s of an H800's 200 and,
# on two machines, 43 GB/s of 50 (README of release 1.2.1). This package has not measured them.
DEEPEP_NVLINK_FRACTION = 153 / 200
DEEPEP_NETWORK_FRACTION = 43 / 50
STEP_OVERHEAD = 2.0  # seconds per step for bookkeeping and for the first and last micro-batches
WAKE_SECONDS = 4.0  # colocated: seconds to move weights and caches to and from host memory


@dataclass(frozen=True)
class Seconds:
    """Seconds of each phase of a step."""

    rollout: float
    scoring: float
    training: float
    optimizer: float
    sync: float
    waiting: float  # overlapped: the trainer waits for rollouts; else: step overhead and moving GPU memory
    overlapped: bool  # servers generate rollouts while the trainer trains
    teacher: float = 0.0  # passes of a teacher that the trainer holds, or the wait for one on servers

    @property
    def step(self) -> float:
        train = self.scoring + self.teacher + self.training + self.optimizer
        if self.overlapped:
            return max(self.rollout, train) + self.sync
        return self.rollout + train + self.sync + self.waiting

    def by_phase(self) -> dict[str, float]:
        phases = {name: value for name, value in asdict(self).items() if name != "overlapped"}
        return {name: round(value, 2) for name, value in (phases | {"step": self.step}).items()}


def seconds(model: Architecture, gpu: Gpu, layout: Layout, work: Workload, micro_tokens: float) -> Seconds:
    """Predicts the seconds of each phase of a step. `micro_tokens`: tokens of a micro-batch."""
    forward, backward, again = _passes(model, gpu, layout, work)
    epochs, updates = work.batch_epochs, work.updates
    micro_batches = max(1.0, work.tokens / (layout.dp * micro_tokens * work.mini_batches))
    bubble = _bubble(model, layout, micro_batches)
    rollout = rollout_seconds(model, gpu, layout.engines, layout.rollout_tp, work)
    training = epochs * (forward + again + backward) * bubble
    scoring = forward * work.scoring * bubble
    optimizer = updates * _optimizer(model, gpu, layout)
    if work.critic:  # the critic computes values before the updates, then is updated itself
        work = replace(work, share_prompts=False)
        forward, backward, again = _passes(model, gpu, layout, work, critic=True)
        training += epochs * (forward + again + backward) * bubble
        scoring += forward * bubble
        optimizer += updates * _optimizer(model, gpu, layout, critic=True)
    sync = push_time.predicted(model, gpu, layout).seconds
    taught = 0.0
    if (teacher := work.teacher) is not None:
        if teacher.is_on_trainer:
            taught = _trainer_teacher(teacher, model, gpu, layout, work, micro_batches)
        else:  # a served teacher answers while the trainer scores
            taught = max(0.0, served_seconds(teacher, gpu, work) - scoring)
    overlapped = layout.rollout_gpus > 0 and layout.async_steps > 0
    if overlapped:
        waiting = max(0.0, rollout - training - scoring - taught - optimizer)
    else:
        waiting = STEP_OVERHEAD + (0.0 if layout.rollout_gpus else WAKE_SECONDS)
    return Seconds(rollout, scoring, training, optimizer, sync, waiting, overlapped, taught)


def _trainer_teacher(
    teacher: PlannedTeacher,
    policy: Architecture,
    gpu: Gpu,
    layout: Layout,
    work: Workload,
    micro_batches: float,
) -> float:
    """Returns the seconds of a teacher that the trainer holds.

    It computes log-probs once a step, and hidden states before every update whose head compares
    distributions. That head computes the teacher's logits, and the policy's log-probs once more, forward and
    backward, where the loss has other terms. Every mini-batch's pass moves the weights to the GPU and back.
    """
    forward, _, _ = _passes(teacher.model, gpu, layout, work)
    took = teacher.passes * forward * _bubble(teacher.model, layout, micro_batches)
    moves = teacher.passes * work.mini_batches
    if teacher.divergence:
        # A pass for hidden states has no head, and the update's head computes the same product.
        took += work.batch_epochs * forward * _bubble(teacher.model, layout, micro_batches)
        moves += work.updates
        if teacher.beside:
            again = 3 * policy.head_flops(work.responses * work.lengths.mean)
            took += work.batch_epochs * again / (layout.gpus * gpu.flops(layout.fp8))
    parameters = max(shard(teacher.model, layout, stage).total for stage in range(layout.pp))
    return took + moves * 2 * 2 * parameters / (gpu.pcie_gb_per_s * gpu.network_fraction * 1e9)


def served_seconds(teacher: PlannedTeacher, gpu: Gpu, work: Workload) -> float:
    """Returns the seconds until a teacher's servers have scored a step's responses, each with its prompt.

    The servers decode nothing: every token passes the layers and the head once.
    """
    model, plain = teacher.model, replace(work, share_prompts=False, teacher=None)
    flops = model.layer_flops(plain.tokens, plain.pairs / plain.tokens) + model.head_flops(plain.tokens)
    fraction = PREFILL_FRACTION * (MIXTURE_FRACTION if model.moe_layers else 1.0)
    return flops / (teacher.gpus * gpu.flops(False) * fraction)


def _bubble(model: Architecture, layout: Layout, micro_batches: float) -> float:
    """Returns a pass's seconds divided by its work's: the pipeline's bubble and its fullest stage."""
    stage = max(layout.stage_layers(model.layers)) * layout.pp / model.layers  # fullest stage over mean stage
    return stage * (1 + (layout.pp - 1) / (layout.vpp * micro_batches))


def model_flops(model: Architecture, work: Workload) -> float:
    """Counts the operations of training one step without recomputation, as MFU is defined."""
    passes = (1 + _backward_work(model, critic=False)) * forward_flops(model, work)
    passes += image_flops(model, work, work.responses)
    if work.critic:
        passes += 3 * forward_flops(model, replace(work, share_prompts=False), critic=True)
    return work.batch_epochs * passes


def forward_flops(model: Architecture, work: Workload, critic: bool = False) -> float:
    """Counts the operations of the forward pass over a step's tokens."""
    head = 0.0 if critic else model.head_flops(work.responses * work.lengths.mean)
    return model.layer_flops(work.tokens, work.pairs / work.tokens) + head


def image_flops(model: Architecture, work: Workload, prompts: float) -> float:
    """Counts the operations of encoding the images of prompts, at the workload's image tokens each."""
    if model.vision is None:
        return 0.0
    patches = work.image_tokens * model.vision.merge
    return model.vision.flops(prompts * work.image_tokens, patches)


def _passes(
    model: Architecture, gpu: Gpu, layout: Layout, work: Workload, critic: bool = False
) -> tuple[float, float, float]:
    """Returns the seconds of the forward, the backward, and the recomputation over a step's tokens.

    The seconds include the communication that does not run behind computation. `traffic` gives
    the bytes of tensor parallelism; tests compare them with counts in real runs.
    """
    fraction = MIXTURE_FRACTION if model.moe_layers else 1.0
    reach = gpu.flops(layout.fp8) * fraction
    compute = forward_flops(model, work, critic) / (layout.gpus * reach)
    # The first stage alone encodes images, and the others wait for it. A frozen tower has no backward pass.
    ranks = layout.gpus / layout.pp / (1 if model.vision is None or model.vision.split else layout.tp)
    encoding = image_flops(model, work, work.responses) / (ranks * reach)
    state = round(2 * model.hidden * work.tokens / (layout.dp * layout.cp))  # bytes of hidden states, bf16
    network = gpu.network_gb_per_s * gpu.network_fraction * 1e9
    nvlink = gpu.nvlink_gb_per_s * gpu.network_fraction * 1e9
    link = nvlink if layout.tp <= NODE else network
    split = []
    for sent in (layer_forward(layout.tp, state, True), layer_backward(layout.tp, state, True)):
        wire = sum(on_the_wire(operation, size, layout.tp) for (operation, _), size in sent.items())
        split.append(model.layers / layout.pp * wire / link)
    routed = _routed_seconds(model, gpu, layout, state, work.ep_exchange)
    forward = encoding + compute + split[0] + routed
    backward = _backward_work(model, critic) * compute + split[1] + routed
    if layout.recompute:
        return forward, backward, forward
    again = recomputed_flops(model, work, layout.recompute_modules) / (layout.gpus * reach)
    if "mlp" in layout.recompute_modules:  # half of a dense layer's communication is its MLP's
        again += split[0] / 2 * (1 - model.moe_layers / model.layers)
    if "moe" in layout.recompute_modules:
        again += routed
    return forward, backward, again


def recomputed_flops(model: Architecture, work: Workload, modules: Sequence[str]) -> float:
    """Counts the operations of these modules of all layers (`parallel.recompute_modules`) in a forward pass.

    Norms and activations have no matrix products, and are not counted.
    """
    dense, mixtures = model.layers - model.moe_layers, model.moe_layers
    products = {
        "mlp": dense * model.mlp,
        "moe": mixtures * (model.experts_per_token * model.expert + model.shared + model.router),
        "shared_experts": 0 if "moe" in modules else mixtures * model.shared,
    }
    if (latent := model.latent) is not None:
        widths = latent.q_rank * (latent.nope_dim + latent.rope_dim)
        widths += latent.kv_rank * (latent.nope_dim + latent.v_dim)
        products["mla_up_proj"] = model.layers * model.heads * widths
    flops = 2 * work.tokens * sum(products.get(module, 0) for module in modules)
    if "core_attn" in modules:
        flops += model.layer_flops(work.tokens, work.pairs / work.tokens) - model.layer_flops(work.tokens, 0)
    return flops


def _routed_seconds(model: Architecture, gpu: Gpu, layout: Layout, state: int, exchange: str) -> float:
    """Returns the seconds in which tokens of `state` bytes go to their experts and back, in one direction.

    NVLink and the network work at the same time, so the slower of the two counts.
    """
    if not model.moe_layers or layout.ep == 1:
        return 0.0
    nvlink, network = gpu.nvlink_gb_per_s * 1e9, gpu.network_gb_per_s * 1e9
    if exchange == "deepep":
        nvlink, network = nvlink * DEEPEP_NVLINK_FRACTION, network * DEEPEP_NETWORK_FRACTION
    else:
        nvlink, network = nvlink * gpu.network_fraction, network * gpu.network_fraction
    near, far = exchanged_copies(model, layout.ep, exchange)
    sent = 2 * model.moe_layers / layout.pp * state / layout.tp
    return max(sent * near / nvlink, sent * far / network)


def exchanged_copies(model: Architecture, ep: int, exchange: str) -> tuple[float, float]:
    """Returns the mean numbers of copies of a token over NVLink and over the network.

    All sets of experts are equally likely.

    All-to-all sends a token once for each expert of another rank. DeepEP sends it once over the network for
    each other node that has some of its experts, and once over NVLink for each rank that has some, but not
    for the rank on each node that received it.
    """
    here = min(ep, NODE)  # ranks of the expert group on one node: tp does not split experts
    chosen = model.experts_per_token
    if exchange == "a2a":
        return chosen * (here - 1) / ep, chosen * (ep - here) / ep

    def reached(ranks: int) -> float:
        """The probability that a token chooses at least one expert on this many ranks."""
        others = model.experts - model.experts * ranks // ep
        return 1 - math.comb(others, chosen) / math.comb(model.experts, chosen)

    return reached(1) * ep * (here - 1) / here, reached(here) * (ep // here - 1)


def _backward_work(model: Architecture, critic: bool) -> int:
    """Returns the operations of the backward pass divided by those of the forward pass.

    Weights under adapters need no gradients of their own, only the gradients of their inputs.
    """
    return 1 if model.adapter_rank and not critic else 2


def _optimizer(model: Architecture, gpu: Gpu, layout: Layout, critic: bool = False) -> float:
    """Returns the seconds of one optimizer update.

    Data-parallel ranks reduce gradients in fp32 and gather weights in bf16; neither is overlapped. Adam reads
    and writes its states: 30 bytes of GPU memory an element. An element on the host takes 40 bytes of host
    memory traffic, and 6 bytes over the link at the same time for its gradient and weight.
    """
    trained = trained_shard(model, layout, 0, critic)
    # By number of ranks: elements that so many ranks hold alike, and of which each rank updates a part.
    copies = {layout.dp * layout.cp: trained.dense}
    experts_on = layout.gpus // (layout.pp * layout.ep * layout.etp)
    copies[experts_on] = copies.get(experts_on, 0.0) + trained.experts
    link = gpu.nvlink_gb_per_s if layout.gpus // layout.pp <= NODE else gpu.network_gb_per_s
    wire = own = 0.0
    for ranks, elements in copies.items():
        sent = optimizer_bytes([round(elements)], ranks, 2)
        wire += sum(on_the_wire(operation, size, ranks) for (operation, _), size in sent.items())
        own += elements / ranks
    moved = wire / (link * gpu.network_fraction * 1e9)
    on_host = layout.offload * own
    on_gpu = own - on_host
    device = 30 * on_gpu / (gpu.memory_gb_per_s * gpu.memory_fraction * 1e9)
    link = gpu.pcie_gb_per_s * gpu.network_fraction * 1e9
    return moved + max(
        device, 40 * on_host / (gpu.host_gb_per_s * gpu.memory_fraction * 1e9), 6 * on_host / link
    )


@cache
def rollout_seconds(model: Architecture, gpu: Gpu, engines: int, tp: int, work: Workload) -> float:
    """Returns the seconds until the step's last response ends; infinite if the longest response does not fit.

    `engines` engines of `tp` GPUs each share the prompts.
    """
    if not fits(model, gpu, tp, work):
        return math.inf
    here = math.ceil(work.responses / engines)
    lengths = work.lengths.sample(here)
    random.Random(0).shuffle(lengths)
    prefill = prefill_seconds(model, gpu, tp, here / work.k * work.prompt_tokens, work.prompt_tokens)
    prefill += image_flops(model, work, here / work.k) / prefill_rate(model, gpu, tp)
    responses = [(float(work.prompt_tokens), length) for length in reversed(lengths)]
    return prefill + decoded(model, gpu, tp, work, responses).seconds[-1]


def fits(model: Architecture, gpu: Gpu, tp: int, work: Workload) -> bool:
    """Returns True if an engine of `tp` GPUs has room for the longest response."""
    return engine_room(model, tp, gpu.memory_gib) >= 2.0 * model.cache_per_token(tp) * work.longest


def prefill_rate(model: Architecture, gpu: Gpu, tp: int) -> float:
    """Returns operations a second of an engine of `tp` GPUs that reads prompts."""
    return tp * gpu.flops(False) * (MIXTURE_FRACTION if model.moe_layers else 1.0) * PREFILL_FRACTION


def prefill_seconds(model: Architecture, gpu: Gpu, tp: int, tokens: float, length: float) -> float:
    """Returns the seconds of an engine that reads `tokens` tokens, in texts of `length` tokens."""
    return model.layer_flops(tokens, length / 2) / prefill_rate(model, gpu, tp)


@dataclass
class Decoding:
    """When the responses of an engine begin and end.

    The clock counts the tokens that a running response has got.
    """

    begins: list[float]  # the clock at the beginning of each response, in the order of the argument
    ends: list[float]  # the seconds after which each response ended
    clocks: list[float]  # the clock at the ends of responses, ascending
    seconds: list[float]  # the seconds at these ends

    def clock_at(self, seconds: float) -> float:
        return float(np.interp(seconds, [0.0, *self.seconds], [0.0, *self.clocks]))


def decoded(
    model: Architecture, gpu: Gpu, tp: int, work: Workload, responses: Sequence[tuple[float, float]]
) -> Decoding:
    """Simulates an engine of `tp` GPUs that decodes responses, each (tokens read before, tokens to come).

    They begin in their order, as soon as the cache has room. The simulation steps from the end of one
    response to the end of the next; a decoding step gives every running response `per_step` tokens.
    """
    room = engine_room(model, tp, gpu.memory_gib) / (2.0 * model.cache_per_token(tp))  # in tokens
    step = DecodeStep(model, gpu, tp)
    per_step = 1.0 if work.speculation is None else work.speculation.length
    # `cached` counts the tokens in the cache now, `reserved` those that running responses will have there.
    clock = elapsed = reserved = cached = 0.0
    running: list[tuple[float, int]] = []  # heap: (clock at the end, number of the response)
    result = Decoding([0.0] * len(responses), [0.0] * len(responses), [], [])
    waiting = deque(range(len(responses)))
    while waiting or running:
        while waiting and (not running or reserved + sum(responses[waiting[0]]) <= room):
            before, length = responses[i := waiting.popleft()]
            result.begins[i] = clock
            heapq.heappush(running, (clock + length, i))
            reserved += before + length
            cached += before
        stride = running[0][0] - clock
        took = step.seconds(len(running), cached + stride / 2 * len(running), work.speculation)
        elapsed += stride / per_step * took
        cached += stride * len(running)
        clock = running[0][0]
        result.clocks.append(clock)
        result.seconds.append(elapsed)
        while running and running[0][0] <= clock:
            _, i = heapq.heappop(running)
            result.ends[i] = elapsed
            reserved -= sum(responses[i])
            cached -= sum(responses[i])
    return result


class DecodeStep:
    """Cost of one decoding step, which gives tokens to each response of a batch.

    The larger of memory traffic and operations limits a pass; communication and overhead are added.
    """

    def __init__(self, model: Architecture, gpu: Gpu, tp: int) -> None:
        self._model, self._tp = model, tp
        self._bandwidth = gpu.memory_gb_per_s * gpu.memory_fraction * 1e9 * tp
        self._reach = gpu.flops(False) * tp
        link = gpu.nvlink_gb_per_s if self._tp <= NODE else gpu.network_gb_per_s
        self._link = link * gpu.network_fraction * 1e9
        hops = 2 if self._tp > 1 else 1
        doublings = math.log2(max(1.0, self._tp / NODE))
        self._layer_overhead = 2 * (LAYER_OVERHEAD * hops + NODE_LATENCY * doublings)

    def seconds(self, batch: int, context: float, speculation: Speculation | None = None) -> float:
        """Returns the seconds of a step. `context`: tokens in the caches of the whole batch.

        With speculation a step proposes tokens, one after the other, and verifies them in one pass, which
        computes each response's last token and the proposed ones.
        """
        if speculation is None:
            return DECODE_OVERHEAD + self._pass(1.0, batch, context)
        drafting = speculation.tokens * DRAFT_OVERHEAD
        if not speculation.from_text:
            drafting += speculation.tokens * self._pass(1 / self._model.layers, batch, context)
        verifying = self._pass(1.0, batch * (1 + speculation.tokens), context)
        return DECODE_OVERHEAD + drafting + verifying

    def _pass(self, layers: float, tokens: int, context: float) -> float:
        """Returns the seconds of a forward pass of `tokens` tokens through a fraction of the layers."""
        model = self._model
        weights = model.layers * (model.attention + model.replicated)
        weights += (model.layers - model.moe_layers) * model.mlp
        if model.moe_layers:  # the step reads the experts that at least one token of the batch has chosen
            touched = 1 - (1 - model.experts_per_token / model.experts) ** tokens
            weights += model.moe_layers * (model.shared + touched * model.experts * model.expert)
        cache = model.cache_per_token(self._tp) * context
        moved = 2.0 * (layers * (weights + cache) + model.embedding)
        read = moved / self._bandwidth
        compute = (layers * model.layer_flops(tokens, 0) + model.head_flops(tokens)) / self._reach
        exchanged = 0.0
        if self._tp > 1:
            exchanged = layers * 4 * model.layers * 2 * model.hidden * tokens / self._link
        return max(read, compute) + exchanged + layers * model.layers * self._layer_overhead
