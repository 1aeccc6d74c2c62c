"""Parallel layouts by name, such as `tp2-sp`, and the layouts in which a model is compared."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from megatron_gvpo.checks.layout import check_division
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.settings.parallel import MLPS_AND_EXPERTS, ParallelConfig

MOST_RANKS = 4  # layouts with more ranks are not compared


@dataclass(frozen=True)
class ParallelLayout:
    """A parallel layout; data parallelism has the ranks that `tp`, `pp` and `cp` leave."""

    ranks: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    cp_exchange: str = "p2p"
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    stage_layers: tuple[int, ...] | None = None
    overlap: bool = False
    recompute: str = "none"
    recompute_layers: int | None = None
    recompute_modules: tuple[str, ...] = MLPS_AND_EXPERTS
    offload: float = 0.0  # share of the optimizer's states in host memory
    small: bool = False  # true in tests, which reduce sizes inside libraries

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp * self.cp)

    def __str__(self) -> str:
        names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
        parts = [f"{name}{size}" for name in names if (size := getattr(self, name)) > 1]
        parts += [self.cp_exchange] if self.cp_exchange != "p2p" else []
        parts += ["sp"] * self.sequence_parallel + ["overlap"] * self.overlap
        parts += [f"stages{'.'.join(map(str, self.stage_layers))}"] if self.stage_layers else []
        if self.recompute != "none":
            of = str(self.recompute_layers or "")
            of = "+".join(self.recompute_modules) if self.recompute == "selective" else of
            parts.append(f"recompute_{self.recompute}" + (f"_{of}" if of else ""))
        parts += [f"offload{self.offload:g}"] if self.offload else []
        parts += ["small"] * self.small
        return "-".join(parts) or "single"

    @property
    def settings(self) -> dict[str, Any]:
        """The section `parallel` of a configuration."""
        others = ("ranks", "overlap", "offload", "small")
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in others}
        return sizes | {"overlap_grad_reduce": self.overlap, "overlap_param_gather": self.overlap}


def layouts_for(model: dict[str, Any], cores: int) -> list[ParallelLayout]:
    """Return the layouts in which a model's config.json is compared on a machine with `cores` cores.

    They are each way of dividing a model alone, on two ranks; with a core for each of MOST_RANKS also two
    ways together. Layouts that training would refuse are left out.
    """
    mixture = ModelCard(model).experts > 0
    layouts = [
        ParallelLayout(1),
        ParallelLayout(1, recompute="full"),
        ParallelLayout(2),
        ParallelLayout(2, tp=2),
        ParallelLayout(2, tp=2, sequence_parallel=True),
        ParallelLayout(2, pp=2),
        ParallelLayout(2, cp=2),
    ]
    if mixture:
        layouts += [ParallelLayout(2, ep=2), ParallelLayout(2, tp=2, sequence_parallel=True, ep=2)]
    if cores >= MOST_RANKS:
        ep = 2 if mixture else 1
        layouts += [
            ParallelLayout(4, tp=2, sequence_parallel=True, pp=2, ep=ep),
            ParallelLayout(4, pp=2, ep=ep),
        ]
    return [layout for layout in layouts if _is_possible(layout, model)]


def _is_possible(layout: ParallelLayout, model: dict[str, Any]) -> bool:
    try:
        check_division(ParallelConfig(**layout.settings), model)
    except ConfigError:
        return False
    return True
