"""Inputs of a plan: the GPU, a step's prompts and responses, the teacher, and the layout of the GPUs."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from statistics import NormalDist
from typing import Any

from megatron_gvpo.algorithms.base import STEP_START, TEACHER
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.recipe import read_recipe
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.architecture import GIB, Architecture, Gpu, engine_room

NODE = 8  # GPUs that NVLink connects


def gpu(name: str) -> Gpu:
    """Returns the description of a GPU. Raises ConfigError, which lists the known GPUs, for another name."""
    known: dict[str, Any] = json.loads(resources.files(__package__).joinpath("gpus.json").read_text())
    del known["sources"]
    if name.lower() not in known:
        raise ConfigError(f"--gpu {name}: unknown; planner/gpus.json describes {', '.join(known)}")
    values = known[name.lower()]
    return Gpu(name.lower(), **{key: value for key, value in values.items() if key != "sources"})


@dataclass(frozen=True)
class Lengths:
    """Distribution of response lengths in tokens.

    It is log-normal with this mean and 95th percentile, and cut at `maximum`. Raises ConfigError unless
    0 < mean < p95 <= maximum.
    """

    mean: float
    p95: float
    maximum: int

    def __post_init__(self) -> None:
        if not 0 < self.mean < self.maximum or not self.mean < self.p95 <= self.maximum:
            raise ConfigError(f"--response-length {self}: expected 0 < mean < p95 <= max")

    def __str__(self) -> str:
        """Return the value in the form of --response-length."""
        return f"{self.mean:g},p95={self.p95:g},max={self.maximum}"

    @cached_property
    def _log(self) -> NormalDist:
        """The normal distribution of ln length, with mean mu and standard deviation sigma.

        ln p95 = mu + 1.645 sigma and ln mean = mu + sigma^2 / 2 give a quadratic in sigma. Its smaller root
        is used; if it has none, sigma = 1.645.
        """
        z = NormalDist().inv_cdf(0.95)
        root = z * z - 2 * math.log(self.p95 / self.mean)
        sigma = z - math.sqrt(max(0.0, root))
        return NormalDist(math.log(self.mean) - sigma * sigma / 2, sigma)

    def quantile(self, share: float) -> float:
        return min(float(self.maximum), max(1.0, math.exp(self._log.inv_cdf(share))))

    def sample(self, count: int) -> list[float]:
        """Returns `count` lengths at equal steps of probability, shortest first."""
        return [self.quantile((i + 0.5) / count) for i in range(count)]


def parse_lengths(text: str, longest: int | None = None) -> Lengths:
    """Parses `850`, `850,p95=3000` or `850,p95=3000,max=8192`. Raises ConfigError for other text.

    `longest`: the run's rollout.max_tokens, the longest response, which bounds values that the text lacks.
    """
    limit = math.inf if longest is None else longest
    first, *others = text.split(",")
    try:
        named = dict(other.split("=") for other in others)
        mean = float(first)
        p95 = float(named.pop("p95", min(2.5 * mean, limit)))
        maximum = int(named.pop("max", min(math.ceil(2 * p95), limit)))
    except (ValueError, OverflowError):
        named = {"": ""}
    if named:
        raise ConfigError(f"--response-length {text}: expected MEAN[,p95=TOKENS][,max=TOKENS]")
    if max(mean, p95, maximum) > limit:
        raise ConfigError(f"--response-length {text}: responses end at rollout.max_tokens={longest}")
    return Lengths(mean, p95, maximum)


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding of the rollouts (`rollout.speculation`)."""

    tokens: int  # tokens proposed at a time
    acceptance: float  # share of the proposed tokens that the policy accepts
    # True: the text gives proposals, at no cost. False: a layer with the model's sizes, and its head, do.
    from_text: bool = False

    @property
    def length(self) -> float:
        """Mean number of tokens that a verification gives."""
        return 1 + self.tokens * self.acceptance


def parse_speculation(text: str) -> Speculation:
    """Parses `3,acceptance=0.77` or `3,acceptance=0.3,draft=text`. Raises ConfigError for other text."""
    first, *others = text.split(",")
    try:
        named = dict(other.split("=") for other in others)
        draft = {"head": False, "text": True}[named.pop("draft", "head")]
        speculation = Speculation(int(first), float(named.pop("acceptance")), draft)
    except (ValueError, KeyError):
        named = {"": ""}
    if named or not 1 <= speculation.tokens <= 64 or not 0 <= speculation.acceptance <= 1:
        raise ConfigError(
            f"--speculate {text}: expected TOKENS,acceptance=SHARE[,draft=text], with 1 to 64 tokens and a "
            "share from 0 to 1"
        )
    return speculation


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
        """Returns the reason why a layout that the policy fits cannot hold the teacher; None if it can."""
        model = self.model
        if not model.divisible(tp, cp):
            return f"tp={tp}, cp={cp} do not divide the teacher's attention heads or MLP"
        # A policy that the stages do not divide evenly needs stage_layers, whose sum must be the policy's
        # layers.
        if model.layers % (pp * vpp) if policy.layers % pp == 0 else model.layers != policy.layers:
            return f"pp={pp}, vpp={vpp} do not divide the teacher's {model.layers} layers as the policy's"
        if ep > 1 and (not model.experts or model.experts % ep):
            return f"ep={ep} does not divide the teacher's experts"
        if cp > 1 and model.window:
            return f"cp={cp} cuts sequences, and the teacher has a sliding window"
        return None


@dataclass(frozen=True)
class Workload:
    """One training step."""

    prompts: int
    k: int  # responses per prompt
    prompt_tokens: int  # mean length of a prompt
    lengths: Lengths
    mini_batches: int = 1
    scoring: float = 0.0  # forward passes of the policy before the first update
    critic: bool = False
    batch_epochs: int = 1  # passes of updates over the mini-batches
    share_prompts: bool = False  # a group's prompt is computed once (train.share_prompts)
    speculation: Speculation | None = None
    image_tokens: int = 0  # the number of `prompt_tokens` that stand for images
    teacher: PlannedTeacher | None = None
    ep_exchange: str = "a2a"  # `a2a` or `deepep` (parallel.ep_exchange)

    @property
    def updates(self) -> int:
        """Optimizer updates per step."""
        return self.mini_batches * self.batch_epochs

    @property
    def responses(self) -> int:
        return self.prompts * self.k

    @property
    def tokens(self) -> float:
        """Mean number of tokens, of prompts and responses, in one pass over the step's batch."""
        return self.prompts * self.group_tokens

    @property
    def group_tokens(self) -> float:
        """Mean number of tokens of a prompt's responses, with the prompt once or before each of them."""
        return self._copies * self.prompt_tokens + self.k * self.lengths.mean

    @property
    def pairs(self) -> float:
        """Mean number of pairs of tokens that attend to each other in one pass over the step's batch."""
        prompt, lengths = self.prompt_tokens, self.lengths.sample(200)
        response = sum(prompt * n + n * n / 2 for n in lengths) / len(lengths)
        return self.prompts * (self._copies * prompt**2 / 2 + self.k * response)

    @property
    def _copies(self) -> int:
        return 1 if self.share_prompts else self.k

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.lengths.maximum


@dataclass(frozen=True)
class Layout:
    """Division of the trainer's GPUs, and placement of the rollout servers."""

    gpus: int  # the trainer's GPUs
    tp: int = 1
    pp: int = 1
    vpp: int = 1  # chunks of layers on every pipeline stage
    cp: int = 1
    ep: int = 1
    etp: int = 1  # tensor-parallel ranks of the experts
    sequence_parallel: bool = True  # with tp > 1
    recompute: bool = False  # recompute all activations
    recompute_modules: tuple[str, ...] = ()  # recompute these parts of every layer
    stages: tuple[int, ...] | None = None  # layers of the pp x vpp stages; None: as equal as possible
    fp8: bool = False
    offload: float = 0.0  # fraction of the optimizer's states in host memory
    muon: bool = False  # train by Muon, with which matrices have one moment
    rollout_gpus: int = 0  # the servers' own GPUs; 0: colocated with the trainer
    rollout_tp: int = 1
    async_steps: int = 0
    transport: str = "broadcast"  # how weights reach the servers (rollout.weights.transport)

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    def stage_layers(self, layers: int) -> tuple[int, ...]:
        """Returns the number of layers of every pipeline stage, the sum of its chunks.

        If the stages cannot be equal, the first and last have fewer: they also hold the embedding and head.
        """
        if self.stages is not None:
            return tuple(sum(self.stages[stage :: self.pp]) for stage in range(self.pp))
        each, more = divmod(layers, self.pp)
        fewer = [self.pp - 1, 0, *range(self.pp - 2, 0, -1)][: self.pp - more]
        return tuple(each + (stage not in fewer) for stage in range(self.pp))

    @property
    def engines(self) -> int:
        return (self.rollout_gpus or self.gpus) // self.rollout_tp

    @property
    def name(self) -> str:
        parts = [
            f"{key}{getattr(self, key)}" for key in ("tp", "pp", "vpp", "cp", "ep") if getattr(self, key) > 1
        ]
        parts += [f"dp{self.dp}"] + ["recompute"] * self.recompute + ["fp8"] * self.fp8
        parts += [f"offload{self.offload:g}"] if self.offload else []
        if self.rollout_gpus:
            where = f"split {self.gpus}+{self.rollout_gpus}, {self.async_steps} ahead"
        else:
            where = "colocated"
        sent = f", {self.transport}" if self.rollout_gpus and self.transport != Layout.transport else ""
        return f"{' '.join(parts)}, {where}, rollout tp{self.rollout_tp}{sent}"


@dataclass(frozen=True)
class Method:
    """Work of a training method beside its updates."""

    scoring: float  # the policy's own forward passes over a step's tokens before the first update
    critic: bool = False
    compares: bool = False  # compares the responses to a prompt with each other
    teacher_passes: int = 0  # passes of a teacher over a step's responses, for their log-probs
    teacher_divergence: bool = False  # every update compares whole distributions with a teacher's
    loss_terms: bool = True  # the loss has other terms than that divergence


def method(recipe: str, mini_batches: int) -> Method:
    """Returns the work of a recipe, by the same columns and frozen references as in the Trainer.

    `mini_batches`: mini-batches per step. Raises ConfigError if the recipe does not exist, or if the policy
    does not sample its responses.
    """
    try:
        read_recipe(recipe)
    except ValueError as error:
        raise ConfigError(f"--recipe {recipe}: {error}") from None
    algorithm = AlgorithmConfig.model_validate(recipe)
    if not algorithm.samples_from_policy:
        raise ConfigError(
            f"--recipe {recipe}: a plan needs a method that samples responses from the policy; the responses "
            f"of this one come from a {algorithm.sampler}"
        )
    return method_of(algorithm, mini_batches)


def method_of(algorithm: AlgorithmConfig, mini_batches: int) -> Method:
    """Returns the work of an algorithm that samples from the policy, as `method` counts it."""
    of_estimator = {} if algorithm.estimator is None else algorithm.estimator.reference_policies
    of_loss = algorithm.loss.reference_policies.values()
    others = [*of_estimator.values(), *(reference for reference in of_loss if reference != STEP_START)]
    of_teacher, divergence = others.count(TEACHER), algorithm.loss.divergence
    scoring = float(len(others) - of_teacher)
    if STEP_START in of_loss and "old" not in of_estimator and algorithm.reference_logprobs == "trainer":
        # The first mini-batch needs no scoring pass: the policy has not changed since the step began.
        scoring += (mini_batches - 1) / mini_batches
    compares = algorithm.needs_group and not algorithm.members
    return Method(
        scoring,
        algorithm.critic is not None,
        compares,
        of_teacher,
        divergence is not None and divergence.needs_teacher,
        algorithm.loss.has_terms,
    )


def planned_teacher(options: Namespace, asks: Method, gpu: Gpu, longest: int) -> PlannedTeacher | None:
    """Reads the options `--teacher` and `--teacher-gpus`. `longest`: tokens of the longest sequence.

    Raises ConfigError for a teacher without a use or a method without its teacher, for servers that do not
    give the values that the method reads, and for a teacher that is too large for its servers or has too few
    positions.
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
