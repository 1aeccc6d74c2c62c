"""Blocks that call users' own losses, estimators, members and shapers; see docs/howto/own_method.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron_gvpo.algorithms.base import (
    STEP_START,
    Advantage,
    Loss,
    Metrics,
    Reference,
    References,
    WithFunction,
    only_with,
)
from megatron_gvpo.algorithms.members.base import Member, MemberContext
from megatron_gvpo.algorithms.shapers.base import Shaper, rewarded
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.core.metric_names import OF_EVERY_LOSS, check_name, own_names
from megatron_gvpo.core.plain_values import NoNumberError, real_number
from megatron_gvpo.core.user_functions import call_function, refused
from megatron_gvpo.groups import Group, Rollout
from megatron_gvpo.types import LossInputs, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


_TAKEN = own_names("train/<metric>", OF_EVERY_LOSS) | {f"head/{name}" for name in own_names("head/<metric>")}


class CustomLoss(WithFunction, Loss):
    """`function(inputs: LossInputs, **options)` -> share, or (share, metrics).

    `reads` names the columns that the trainer must fill in: reward or advantage, old and ref log-probs. Set
    `groups` if a response's weight depends on the others of its group: then the function gets whole groups.
    """

    arguments: ClassVar[tuple[str, ...]] = ("inputs",)

    name: Literal["custom"] = "custom"
    reads: tuple[Literal["reward", "advantage", "old", "ref"], ...] = ("advantage",)
    groups: bool = False
    reference: Reference = Reference(name="fixed")

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(reference=("ref" in self.reads, "ref in its reads"))

    @property
    def signal(self) -> Literal["reward", "advantage", "none"]:  # type: ignore[override]
        if "advantage" in self.reads:
            return "advantage"
        return "reward" if "reward" in self.reads else "none"

    @property
    def couples_groups(self) -> bool:  # type: ignore[override]
        return self.groups

    @property
    def reference_policies(self) -> References:
        policies: dict[Literal["old", "ref"], Reference] = {"old": STEP_START, "ref": self.reference}
        return {column: policy for column, policy in policies.items() if column in self.reads}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        if not len(inputs.rows):  # a rank may have no rows of a mini-batch
            return 0 * inputs.logp_r.sum(), {}
        where = ("loss.function", self.function)
        result = call_function(*where, inputs, **self.options)
        share, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(share, torch.Tensor) or share.shape != () or not share.is_floating_point():
            raise refused(*where, f"expected a scalar tensor, it returned {_shown(share)}")
        if share.device != inputs.logp_r.device:
            raise refused(*where, f"it returned a tensor on {share.device}, expected {inputs.logp_r.device}")
        if inputs.logp_r.requires_grad and not share.requires_grad:
            raise refused(
                *where,
                "it does not depend on inputs.logp_r, so nothing would be trained; where there is nothing to "
                "learn, return 0 * inputs.logp_r.sum()",
            )
        if not isinstance(metrics, Mapping):
            raise refused(*where, f"expected metrics as {{name: number}}, it returned {_shown(metrics)}")
        if wrong := [item for item in metrics.items() if not _is_metric(item)]:
            name, value = wrong[0]
            raise refused(*where, f"expected metrics as {{name: number}}, and {name!r} is {_shown(value)}")
        for name in metrics:
            try:
                check_name(name, _TAKEN)
            except ValueError as problem:
                raise refused(*where, f"a metric with {problem}") from None
        return share, dict(metrics)


class CustomEstimator(WithFunction, Advantage):
    """`function(rows: TrainBatch, **options)` -> advantages [n], of all rows of an optimizer step.

    `compares`: true if it compares the responses of a prompt; then rollout.n = 1 is refused.
    """

    makes_rewards: ClassVar[bool] = True
    arguments: ClassVar[tuple[str, ...]] = ("rows",)

    name: Literal["custom"] = "custom"
    compares: bool = True

    @property
    def needs_group(self) -> bool:
        return self.compares

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        where = ("estimator.function", self.function)
        value = call_function(*where, rows, **self.options)
        if not isinstance(value, torch.Tensor) or value.shape != (len(rows),) or value.is_complex():
            raise refused(
                *where,
                f"expected a tensor of shape ({len(rows)},), one advantage a response; it returned "
                f"{_shown(value)}",
            )
        advantage_n = value.detach().to(rows.reward_n.device, torch.float32)
        if wrong := (~advantage_n.isfinite()).nonzero().flatten().tolist():
            raise refused(
                *where,
                f"it returned {advantage_n[wrong[0]]:g} for response {wrong[0]} of the batch, and no finite "
                f"number for {len(wrong)} of {len(rows)}; where there is nothing to learn, return 0",
            )
        return advantage_n, {}


class CustomMember(WithFunction, Member):
    """`function(groups, sampling, **options)` -> the groups, with the responses that join them.

    `sampling.ask(prompts, n)` asks the engine for n scored responses to each prompt; `MemberContext` in
    algorithms/members/base.py lists the rest. Every rank calls the function with the same groups, and it must
    make the same calls and give the same groups on each.
    """

    arguments: ClassVar[tuple[str, ...]] = ("groups", "sampling")
    masks_responses: ClassVar[bool] = True
    brings_demonstrations: ClassVar[bool] = True
    brings_hinted: ClassVar[bool] = True

    name: Literal["custom"] = "custom"

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        where = ("member function", self.function)
        # Counted before the call, which may change these groups in place.
        is_lacking = any(_lacks_logprobs(rollout) for group in groups for rollout in group.rollouts)
        joined = call_function(*where, groups, context, **self.options)
        if not isinstance(joined, Sequence) or not all(isinstance(g, Group) and g.rollouts for g in joined):
            raise refused(
                *where,
                "expected a list of groups with one response or more each; it returned " + _shown(joined),
            )
        rollouts = [rollout for group in joined for rollout in group.rollouts]
        has_logprobs = not is_lacking and any(rollout.logprobs for rollout in rollouts)
        for rollout in rollouts:
            try:
                rollout.reward = real_number(rollout.reward)
            except NoNumberError as error:
                raise refused(*where, f"expected responses with rewards, it returned {error}") from None
            if has_logprobs and _lacks_logprobs(rollout):
                raise refused(
                    *where,
                    'it returned a response with source="policy", the default, and without log-probs, which '
                    "makes the engine's unknown in all of its batch; a response that the engine did not "
                    'sample has source="demonstration"',
                )
        return list(joined)

    def check_components(self, groups: Sequence[Group], names: Set[str]) -> None:
        """Refuse responses without the reward's components `names`, which would count as 0.

        Raises UserFunctionError.
        """
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            if lacking := sorted(names - rollout.rewards.keys()):
                raise refused(
                    "member function",
                    self.function,
                    f"it returned a response without {', '.join(lacking)} in its `rewards`, and blocks of the"
                    " algorithm read components of the reward: call sampling.score, or set `rewards`",
                )


class CustomShaper(WithFunction, Shaper):
    """`function(group: Group, **options)` -> the group's new rewards, one a response."""

    outside: ClassVar[bool] = True
    makes_rewards: ClassVar[bool] = True
    arguments: ClassVar[tuple[str, ...]] = ("group",)

    name: Literal["custom"] = "custom"

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        where = ("shaper function", self.function)
        shaped = []
        for group in groups:
            result = call_function(*where, group, **self.options)
            try:
                rewards = [real_number(reward) for reward in result]
            except (TypeError, NoNumberError) as error:
                raise refused(*where, f"expected a list of numbers: {error}") from None
            if len(rewards) != len(group.rollouts):
                counts = f"{len(group.rollouts)} responses, and it returned {len(rewards)} rewards"
                raise refused(*where, counts)
            shaped.append(rewarded(group, rewards))
        return shaped


def _lacks_logprobs(rollout: Rollout) -> bool:
    """True for a response for which `TrainBatch.engine_logp_r` would be None (`types.py`)."""
    return rollout.source == "policy" and bool(rollout.token_ids) and not rollout.logprobs


def _is_metric(item: tuple[Any, Any]) -> bool:
    name, value = item
    if isinstance(value, torch.Tensor):
        return isinstance(name, str) and value.numel() == 1 and not value.is_complex()
    try:
        return isinstance(name, str) and float(value) is not None
    except (TypeError, ValueError, OverflowError):
        return False


def _shown(value: Any) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
