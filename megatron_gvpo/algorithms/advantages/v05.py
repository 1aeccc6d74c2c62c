"""V_0.5: shrink the group mean towards a prior (arXiv 2603.10848)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from megatron_gvpo.algorithms.advantages.estimator import prior
from megatron_gvpo.algorithms.base import Advantage, Metrics
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class ShrunkEstimator(Advantage):
    """A_i = r_i - [w mean + (1 - w) V], w = D / (D + 1/k), D = max(0, (mean - V)^2 - 1/k); fp32 [n].

    V is the expected reward of the prompt (`algorithm.prior`), rewards are -1 or 1, so that 1/k bounds the
    variance of the mean: where prior and mean agree within that, the prior is the baseline. Use k >= 3: the
    paper reports divergence at k <= 2.
    """

    needs_prior: ClassVar[bool] = True

    name: Literal["shrunk"] = "shrunk"

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        reward_n, prior_n = rows.reward_n.double(), prior(rows)
        index_n, size_g = rows.groups
        noise_n = 1 / size_g[index_n].double()
        mean_n = rows.group_mean(reward_n)
        apart_n = ((mean_n - prior_n) ** 2 - noise_n).clamp(min=0)
        trust_n = apart_n / (apart_n + noise_n)
        baseline_n = trust_n * mean_n + (1 - trust_n) * prior_n
        return (reward_n - baseline_n).float(), {"trust_in_group": trust_n.mean()}
