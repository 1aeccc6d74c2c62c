"""A user's loss that reads the order of a group's responses, which must not depend on the machine."""

from __future__ import annotations

import torch

from megatron_gvpo.types import LossInputs


def later_counts_more(inputs: LossInputs) -> torch.Tensor:
    """Return minus the mean over groups of sum_i i l_i, i = 1, 2, ... in the order of the group's rows."""
    seen: dict[int, int] = {}
    number_n = []
    for group in inputs.rows.group_n.tolist():
        seen[group] = seen.get(group, 0) + 1
        number_n.append(float(seen[group]))
    return -(torch.tensor(number_n, device=inputs.logp_n.device) * inputs.logp_n).sum() / inputs.totals.groups
