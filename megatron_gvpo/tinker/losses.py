"""The losses of the server: those of the Tinker API, and this package's GVPO and GPG.

The API's losses are sums over all positions of a request's sequences, never means: the gradients of several
requests add up. Sources: the API's documentation of its losses (tinker 0.38); PPO arXiv 1707.06347, CISPO
arXiv 2506.13585, DRO arXiv 2405.19107, GSPO-token arXiv 2507.18071 (section 4.3). GVPO and GPG are those of
`algorithms/losses`, means over a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.algorithms.losses.pg import PolicyGradient
from megatron_gvpo.tinker.wire import Datum, Refusal
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

LossOptions = Mapping[str, float | str]
TARGETS = "target_tokens"
GROUP, REWARD = "group", "reward"  # GVPO's inputs: one number for a sequence
RATIO_MASK = "sequence_ratio_mask"  # GSPO's input: not 0 for tokens that count in their sequence's ratio
UNPUBLISHED = (
    "the formula of stable_reinforce is not published; give the recipe loss_fn=importance_sampling or cispo"
)
LARGEST_GROUP = 2**53  # a float64 holds every integer up to this one


@dataclass(frozen=True)
class Columns:
    """The inputs of a loss for some sequences, in flat columns as in TrainBatch: one value a position."""

    data: Sequence[Datum]

    def __getitem__(self, name: str) -> Tensor:
        """The column `name`, fp32 [r]."""
        parts = [np.asarray(datum.inputs[name], np.float32) for datum in self.data]
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0)

    def of_sequences(self, name: str) -> Tensor:
        """The input `name` that has one number for each sequence, fp64 [n]."""
        return torch.tensor([float(datum.inputs[name][0]) for datum in self.data], dtype=torch.float64)

    def trained(self) -> tuple[Tensor, list[list[int]]]:
        """int64 indices of the trained positions (`weights` is not 0), and the targets of each sequence."""
        index_r = self["weights"].nonzero().flatten()
        targets = [datum.inputs[TARGETS][datum.inputs["weights"] != 0].tolist() for datum in self.data]
        return index_r, targets


Formula = Callable[[Tensor, Columns, LossOptions, BatchTotals], Tensor]


@dataclass(frozen=True)
class ServerLoss:
    """A loss that clients request by name."""

    inputs: tuple[str, ...]  # inputs that each datum must have beside `target_tokens`
    options: Mapping[str, float | str]  # keys of loss_fn_config, with their defaults
    formula: Formula  # (log-probs [r], inputs, options, totals of the request) -> scalar
    couples_groups: bool = False  # the sequences of a group must be in one call of the formula
    # true for a mean over the request's trained tokens or groups, of which there must be some
    is_mean: bool = False


def _cross_entropy(logp_r: Tensor, c: Columns, _: LossOptions, __: BatchTotals) -> Tensor:
    return -(logp_r * c["weights"]).sum()


def _ratio(logp_r: Tensor, c: Columns) -> Tensor:
    """The policy's probability of each token over that of the policy that sampled it."""
    return (logp_r - c["logprobs"]).exp()


def _importance_sampling(logp_r: Tensor, c: Columns, _: LossOptions, __: BatchTotals) -> Tensor:
    return -(_ratio(logp_r, c) * c["advantages"]).sum()


def _clipped(ratio_r: Tensor, config: LossOptions) -> Tensor:
    return ratio_r.clamp(float(config["clip_low_threshold"]), float(config["clip_high_threshold"]))


def _ppo(logp_r: Tensor, c: Columns, config: LossOptions, _: BatchTotals) -> Tensor:
    return _clipped_surrogate(_ratio(logp_r, c), c["advantages"], config)


def _clipped_surrogate(ratio_r: Tensor, advantage_r: Tensor, config: LossOptions) -> Tensor:
    return -torch.minimum(ratio_r * advantage_r, _clipped(ratio_r, config) * advantage_r).sum()


def _gspo(logp_r: Tensor, c: Columns, config: LossOptions, _: BatchTotals) -> Tensor:
    """Every token has its sequence's ratio as the value, and its own log-prob's gradient."""
    log_ratio_r, is_counted_r = logp_r.detach() - c["logprobs"], c[RATIO_MASK] != 0
    lengths = [len(datum.tokens) for datum in c.data]
    parts = zip(log_ratio_r.split(lengths), is_counted_r.split(lengths), strict=True)
    mean_r = torch.cat([part[is_counted].mean().expand(len(part)) for part, is_counted in parts])
    return _clipped_surrogate((mean_r + logp_r - logp_r.detach()).exp(), c["advantages"], config)


def _cispo(logp_r: Tensor, c: Columns, config: LossOptions, _: BatchTotals) -> Tensor:
    return -(_clipped(_ratio(logp_r, c), config).detach() * c["advantages"] * logp_r).sum()


def _dro(logp_r: Tensor, c: Columns, config: LossOptions, _: BatchTotals) -> Tensor:
    quadratic_r = 0.5 * float(config["beta"]) * (logp_r - c["logprobs"]) ** 2
    return -(logp_r * c["advantages"] - quadratic_r).sum()


def _gpg(logp_r: Tensor, c: Columns, _: LossOptions, totals: BatchTotals) -> Tensor:
    index_r, targets = c.trained()
    rows = _rows(targets, c).with_columns(advantage_r=c["advantages"][index_r])
    value, _metrics = PolicyGradient()(LossInputs(rows, logp_r[index_r], totals))
    return value


def _gvpo(logp_r: Tensor, c: Columns, config: LossOptions, totals: BatchTotals) -> Tensor:
    index_r, targets = c.trained()
    rows = _rows(targets, c).with_columns(ref_logp_r=c["logprobs"][index_r])
    value, _metrics = gvpo(config)(LossInputs(rows, logp_r[index_r], totals))
    return value


def gvpo(config: LossOptions) -> GVPO:
    """GVPO's block with the options of a request. Raises Refusal."""
    try:
        return GVPO.model_validate({"name": "gvpo", **config})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Refusal(f"loss_fn_config[{'.'.join(map(str, first['loc']))!r}]: {first['msg']}") from None


def _rows(targets: list[list[int]], c: Columns) -> TrainBatch:
    """The trained tokens of the sequences, as the package's own losses take them."""
    has_groups = all(GROUP in datum.inputs and REWARD in datum.inputs for datum in c.data)
    group_n = c.of_sequences(GROUP) if has_groups else torch.arange(len(targets))
    reward_n = c.of_sequences(REWARD) if has_groups else torch.zeros(len(targets))
    return TrainBatch(
        prompt_ids=[()] * len(targets),
        response_ids=list(targets),
        group_n=group_n.to(torch.int64),
        reward_n=reward_n.to(torch.float32),
        truncated_n=torch.zeros(len(targets), dtype=torch.bool),
    )


_CLIP: dict[str, float | str] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": ServerLoss(("weights",), {}, _cross_entropy),
    "importance_sampling": ServerLoss(_SAMPLED, {}, _importance_sampling),
    "ppo": ServerLoss(_SAMPLED, _CLIP, _ppo),
    "gspo": ServerLoss((*_SAMPLED, RATIO_MASK), _CLIP, _gspo),
    "cispo": ServerLoss(_SAMPLED, _CLIP, _cispo),
    "dro": ServerLoss(_SAMPLED, {"beta": 0.05}, _dro),
    "gpg": ServerLoss(("weights", "advantages"), {}, _gpg, is_mean=True),
    "gvpo": ServerLoss(
        ("weights", "logprobs", GROUP, REWARD),
        {"beta": 0.1, "norm": "k-1"},
        _gvpo,
        couples_groups=True,
        is_mean=True,
    ),
}


@dataclass(frozen=True)
class RequestedLoss:
    """A loss with the options and the inputs of one request."""

    name: str
    config: LossOptions
    data: Sequence[Datum]

    @staticmethod
    def of(name: str, config: LossOptions, data: Sequence[Datum]) -> RequestedLoss:
        """A request's loss. Raises Refusal for a name, an option or inputs that the server does not know."""
        if name == "stable_reinforce":
            raise Refusal(f"loss_fn={name!r}: {UNPUBLISHED}")
        if (loss := LOSSES.get(name)) is None:
            raise Refusal(f"loss_fn={name!r}: this server has {', '.join(LOSSES)}")
        if unknown := sorted(config.keys() - loss.options.keys()):
            known = ", ".join(loss.options) or "none"
            raise Refusal(f"loss_fn_config[{unknown[0]!r}]: {name} has no such option; its options: {known}")
        requested = RequestedLoss(name, {**loss.options, **config}, data)
        if name == "gvpo":
            gvpo(requested.config)
        else:
            _check_options(requested.config)
        wanted = {TARGETS, *loss.inputs}
        for i, datum in enumerate(data):
            _check_inputs(f"data[{i}].loss_fn_inputs", name, wanted, datum)
        if data and loss.is_mean and not any(datum.inputs["weights"].any() for datum in data):
            raise Refusal(
                f"loss_fn_inputs['weights']: all are 0, so no token is trained, and {name} is a mean"
            )
        if data and loss.couples_groups:
            _check_groups(name, data)
        return requested

    @property
    def couples_groups(self) -> bool:
        return LOSSES[self.name].couples_groups

    @cached_property
    def totals(self) -> BatchTotals:
        """The sizes by which GVPO and GPG normalise: those of the whole request's trained tokens."""
        if "weights" not in LOSSES[self.name].inputs:
            return BatchTotals(1, len(self.data), sum(len(datum.tokens) for datum in self.data))
        columns = Columns(self.data)
        return BatchTotals.of(_rows(columns.trained()[1], columns))

    def known_weights(self) -> Tensor | None:
        """dL/dlogp, fp32 [r] of all sequences, if it depends on no log-prob; else None."""
        return -Columns(self.data)["weights"] if self.name == "cross_entropy" else None

    def __call__(self, logp_r: Tensor, sequences: Sequence[int] | None = None) -> Tensor:
        """Return the part of the loss that comes from the sequences at these indices (default: all)."""
        data = self.data if sequences is None else [self.data[i] for i in sequences]
        return LOSSES[self.name].formula(logp_r, Columns(data), self.config, self.totals)

    def weights(self, logp_r: Tensor, sequences: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """dL/dlogp at `logp_r`, fp32 [r] on its device, and the part of the loss as in `__call__`."""
        if not len(logp_r):  # a data-parallel rank may have no sequence
            return logp_r.detach(), logp_r.new_zeros(())
        leaf_r = logp_r.detach().cpu().requires_grad_()
        with torch.enable_grad():
            value = self(leaf_r, sequences)
            (weight_r,) = torch.autograd.grad(value, leaf_r)
        return weight_r.to(logp_r.device), value.detach()


def _check_options(config: LossOptions) -> None:
    """Raises Refusal for an option that is not a number, or bounds of the ratio that cross."""
    for option, value in config.items():
        if isinstance(value, str) or not value >= 0:
            raise Refusal(f"loss_fn_config[{option!r}]: {value!r} is not a number of at least 0")
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    if low is not None and high is not None and float(low) > float(high):
        raise Refusal(
            f"loss_fn_config: clip_low_threshold={low} exceeds clip_high_threshold={high}: they bound the "
            "ratio itself, as 0.8 and 1.2"
        )


def _check_inputs(where: str, loss: str, wanted: set[str], datum: Datum) -> None:
    if missing := sorted(wanted - datum.inputs.keys()):
        raise Refusal(f"{where}: {missing[0]} is missing; {loss} needs {', '.join(sorted(wanted))}")
    if unknown := sorted(datum.inputs.keys() - wanted):
        raise Refusal(
            f"{where}: {loss} does not read {unknown[0]}; its inputs are {', '.join(sorted(wanted))}"
        )
    for name in sorted(wanted):
        values, length = datum.inputs[name], 1 if name in (GROUP, REWARD) else len(datum.tokens)
        if len(values) != length:
            raise Refusal(f"{where}[{name!r}] has {len(values)} numbers: want {length}")
        if name == TARGETS and values.dtype.kind != "i":
            raise Refusal(f"{where}[{name!r}] is of {values.dtype}: tokens are int64")
        if not np.isfinite(values).all():
            raise Refusal(f"{where}[{name!r}] has a number that is not finite")
        if name == RATIO_MASK and not values.any():
            raise Refusal(f"{where}[{name!r}] is 0 everywhere: want 1 for the tokens that were sampled")


def _check_groups(loss: str, data: Sequence[Datum]) -> None:
    """Raises Refusal for group numbers that are not integers, and if no group has two sequences."""
    numbers = [float(datum.inputs[GROUP][0]) for datum in data]
    for i, number in enumerate(numbers):
        if not number.is_integer() or abs(number) > LARGEST_GROUP:
            raise Refusal(
                f"data[{i}].loss_fn_inputs[{GROUP!r}] is {number:g}: want an integer, {LARGEST_GROUP} at most"
            )
    if len(set(numbers)) == len(numbers):
        raise Refusal(
            f"loss_fn_inputs[{GROUP!r}]: each of the {len(data)} sequences is alone in its group, and {loss} "
            "compares those of a group: all of them must be in one request"
        )
