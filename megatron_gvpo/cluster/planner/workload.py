"""What a plan is for: the step's prompts and responses, the GPUs, and how the two may be laid out."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from statistics import NormalDist
from typing import Any

from megatron_gvpo.config.schema import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU and its links; bandwidths in one direction. `gpus.json` has the sources."""

    name: str
    memory_gib: float
    memory_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float | None
    nvlink_gb_per_s: float
    network_gb_per_s: float  # to other nodes, of one GPU's adapter
    pcie_gb_per_s: float  # to the host
    host_gb_per_s: float  # of the host's memory, one GPU's share
    compute_fraction: float  # of the peak, that training reaches where nothing else limits it
    memory_fraction: float
    network_fraction: float  # also of NVLink

    def flops(self, fp8: bool) -> float:
        """Reachable operations a second. FP8 is for the layers' GEMMs, and gains 1.4 in practice, not 2."""
        return self.bf16_tflops * 1e12 * self.compute_fraction * (1.4 if fp8 else 1.0)


def gpu(name: str) -> Gpu:
    """Raises ConfigError, which lists the known ones."""
    known: dict[str, Any] = json.loads(resources.files(__package__).joinpath("gpus.json").read_text())
    del known["sources"]
    if name.lower() not in known:
        raise ConfigError(f"--gpu {name}: unknown; {', '.join(known)} are described in planner/gpus.json")
    values = known[name.lower()]
    return Gpu(name.lower(), **{key: value for key, value in values.items() if key != "sources"})


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens: log-normal with this mean and 95th percentile, cut at `maximum`."""

    mean: float
    p95: float
    maximum: int

    def __post_init__(self) -> None:
        if not 0 < self.mean < self.maximum or not self.mean < self.p95 <= self.maximum:
            raise ConfigError(
                f"--response-length {self.mean:g},p95={self.p95:g},max={self.maximum}: expected "
                "0 < mean < p95 <= max"
            )

    @cached_property
    def _log(self) -> NormalDist:
        """ln p95 = mu + 1.645 sigma and ln mean = mu + sigma^2 / 2; the smaller root, where there is one."""
        z = NormalDist().inv_cdf(0.95)
        root = z * z - 2 * math.log(self.p95 / self.mean)
        sigma = z - math.sqrt(max(0.0, root))
        return NormalDist(math.log(self.mean) - sigma * sigma / 2, sigma)

    def quantile(self, share: float) -> float:
        return min(float(self.maximum), max(1.0, math.exp(self._log.inv_cdf(share))))

    def sample(self, count: int) -> list[float]:
        """`count` lengths at equal steps of probability, shortest first."""
        return [self.quantile((i + 0.5) / count) for i in range(count)]


def parse_lengths(text: str) -> Lengths:
    """`850`, `850,p95=3000` or `850,p95=3000,max=8192`. Raises ConfigError."""
    first, *others = text.split(",")
    try:
        named = dict(other.split("=") for other in others)
        mean = float(first)
        p95 = float(named.pop("p95", 2.5 * mean))
        maximum = int(named.pop("max", math.ceil(2 * p95)))
    except (ValueError, OverflowError):
        named = {"": ""}
    if named:
        raise ConfigError(f"--response-length {text}: expected MEAN[,p95=TOKENS][,max=TOKENS]")
    return Lengths(mean, p95, maximum)


@dataclass(frozen=True)
class Workload:
    """One training step."""

    prompts: int
    k: int  # responses to each
    prompt_tokens: int
    lengths: Lengths
    mini_batches: int = 1
    scoring: float = 0.0  # forward passes of the policy before the first update
    critic: bool = False
    batch_epochs: int = 1  # passes of updates over the mini-batches

    @property
    def updates(self) -> int:
        """Of the optimizer."""
        return self.mini_batches * self.batch_epochs

    @property
    def responses(self) -> int:
        return self.prompts * self.k

    @property
    def tokens(self) -> float:
        """That are trained on in each pass, prompts and responses."""
        return self.responses * (self.prompt_tokens + self.lengths.mean)

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.lengths.maximum


@dataclass(frozen=True)
class Layout:
    """How the trainer's GPUs are divided, and where the rollouts are."""

    gpus: int  # of the trainer
    tp: int = 1
    pp: int = 1
    vpp: int = 1  # chunks of layers on every pipeline stage
    cp: int = 1
    ep: int = 1
    recompute: bool = False  # all activations
    fp8: bool = False
    offload: float = 0.0  # of the optimizer's states, in host memory
    rollout_gpus: int = 0  # of their own; 0: colocated, on the trainer's
    rollout_tp: int = 1
    async_steps: int = 0

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    def stage_layers(self, layers: int) -> tuple[int, ...]:
        """Of every pipeline stage. Where they cannot be equal the ends, which have the tables, have fewer."""
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
        return f"{' '.join(parts)}, {where}, rollout tp{self.rollout_tp}"
