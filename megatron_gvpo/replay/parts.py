"""The parts into which a run divided an update: responses, groups, micro-batches, ranks.

The gradient is a sum over the parts, and so is the recorded sum of each tensor's elements. So if a run
counted a part not at all or twice, the sums of this part explain the difference between the run and the
replay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from megatron_gvpo.megatron.microbatch import plan
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.observe.step_records import Sums
from megatron_gvpo.settings.config import Config
from megatron_gvpo.types import TrainBatch

_MOST_ROWS = 512  # responses whose gradients are computed one by one
_UNEXPLAINED = 0.05  # a part explains a difference if at most this share of it remains


@dataclass(frozen=True)
class Parts:
    """The rows of each part, by the part's name, small parts first."""

    rows: dict[str, frozenset[int]]

    @staticmethod
    def of(rows: TrainBatch, original: Config, data_parallel: int, policy: Policy) -> Parts:
        """Divide the rows as the trainer did, for `data_parallel` ranks and the run's own token budget."""
        assert rows.place_n is not None
        positions = rows.place_n.tolist()
        named = {f"response {position}": frozenset([i]) for i, position in enumerate(positions)}
        groups: dict[int, set[int]] = {}
        for i, group in enumerate(rows.group_n.tolist()):
            groups.setdefault(group, set()).add(i)
        named |= {f"the group of response {positions[min(own)]}": frozenset(own) for own in groups.values()}
        budget = original.train.max_tokens_per_micro_batch * original.parallel.cp
        if all(tokens <= budget or len(rows.segments(i)) == 1 for i, tokens in enumerate(rows.tokens)):
            shared = policy.model.shares_prompts_of(rows)
            hidden, multiple = policy.model.config.hidden_size, original.parallel.pp
            coupled = original.algorithm.loss.couples_groups or shared
            multiple = multiple if original.parallel.vpp > 1 else 1
            divided = plan(rows, data_parallel, budget, hidden, coupled, multiple, shared).micro_batches
            for rank, own_batches in enumerate(divided):
                for number, own in enumerate(own_batches):
                    named[f"micro-batch {number} of data-parallel rank {rank}"] = frozenset(own)
            for rank, own_batches in enumerate(divided):
                named[f"data-parallel rank {rank}"] = frozenset(i for own in own_batches for i in own)
        named["all responses"] = frozenset(range(len(rows)))
        return Parts(named)

    def __iter__(self) -> Iterator[tuple[str, frozenset[int]]]:
        """Yield each set of rows once, with all names of the parts that consist of it."""
        names: dict[frozenset[int], list[str]] = {}
        for name, own in self.rows.items():
            names.setdefault(own, []).append(name)
        for own, synonyms in names.items():
            if own:
                yield ", which is ".join(synonyms), own

    def around(self, rows: Collection[int]) -> str | None:
        """Return the smallest part that contains these rows; None if it consists of all responses."""
        wanted = frozenset(rows)
        around = [(len(own), name) for name, own in self if wanted <= own and len(own) > 1]
        _, name = min(around, default=(0, "all responses"))
        return None if "all responses" in name else name

    def rank_of(self, rows: Collection[int]) -> str | None:
        """Return the data-parallel rank with all these rows; None without it, or if there is one rank."""
        ranks = {name: own for name, own in self.rows.items() if name.startswith("data-parallel rank")}
        return next((name for name, own in ranks.items() if len(ranks) > 1 and own.issuperset(rows)), None)


def counted_otherwise(policy: Policy, rows: TrainBatch, recorded: Sums, parts: Parts) -> str | None:
    """Return a sentence on the part that the recorded gradient does not count exactly once, or None.

    `rows` have `weight_r`. The policy has the weights before the update, and they do not change.
    """
    if len(rows) > _MOST_ROWS:
        return None
    sums = [policy.gradients(rows.select([i])) for i in range(len(rows))]
    names = sorted(recorded)
    scale = torch.tensor([max(recorded[n][1], 1e-30) * max(recorded[n][2], 1.0) ** 0.5 for n in names])
    own = torch.tensor([[each[name].total for name in names] for each in sums], dtype=torch.float64) / scale
    run = torch.tensor([recorded[name][0] for name in names], dtype=torch.float64) / scale
    difference = run - own.sum(0)
    fitting: list[tuple[float, str, float]] = []
    for name, members in parts:
        part = own[sorted(members)].sum(0)
        size = float(part @ part)
        if not size:
            continue
        factor = float(part @ difference) / size
        remainder = float((difference - factor * part).norm() / difference.norm())
        if remainder < _UNEXPLAINED:
            fitting.append((remainder, name, round(1 + factor, 4) + 0.0))
    if not fitting:
        return None
    # Parts that differ only by responses without a gradient explain the difference equally well.
    least = min(remainder for remainder, _, _ in fitting)
    equal = [(name, count) for remainder, name, count in fitting if remainder <= 1.01 * least + 1e-4]
    listed = " or ".join(name for name, _ in equal)
    return f"{listed} counts {equal[0][1]:.3g} times in the run's"
