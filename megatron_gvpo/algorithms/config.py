"""A method as a composition of blocks, and the checks of which blocks go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from megatron_gvpo.algorithms import advantages, custom, distillation, losses, members, shapers
from megatron_gvpo.algorithms.advantages.gae import CriticOptions
from megatron_gvpo.algorithms.base import STEP_START, TEACHER, Advantage, Block, BlockAt, Loss, Reference
from megatron_gvpo.algorithms.curriculum import batch_policy, prompts, tracker
from megatron_gvpo.algorithms.curriculum.prompts import Allocation, Equal, InOrder, PromptChoice
from megatron_gvpo.algorithms.curriculum.tracker import NoPrior, Prior, Tracker
from megatron_gvpo.algorithms.losses.aggregation import Aggregation
from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.algorithms.members.base import Member
from megatron_gvpo.algorithms.recipe import merge, read_recipe
from megatron_gvpo.algorithms.registry import choice
from megatron_gvpo.algorithms.shapers.base import Shaper
from megatron_gvpo.algorithms.shapers.filters import Keep, MaskTruncated
from megatron_gvpo.algorithms.shapers.rewards import Affine

if TYPE_CHECKING:
    AnyPrompts = PromptChoice
    AnyAllocation = Allocation
    AnyPrior = Prior
    AnyMember = Member
    AnyShaper = Shaper
    AnyBatchPolicy = batch_policy.BatchRule
    AnyEstimator = Advantage
    AnyLoss = Loss
else:  # a new block is a new file in the folder of its kind; nothing here lists it
    AnyPrompts = choice(prompts, kind=PromptChoice)
    AnyAllocation = choice(prompts, kind=Allocation)
    AnyPrior = choice(tracker, kind=Prior)
    AnyMember = choice(members, custom, kind=Member)
    AnyShaper = choice(shapers, custom, kind=Shaper)
    AnyBatchPolicy = choice(batch_policy, kind=batch_policy.BatchRule)
    AnyEstimator = choice(advantages, distillation, custom, kind=Advantage, default="group")
    AnyLoss = choice(losses, custom, kind=Loss)


_BRINGING = {
    "brings_demonstrations": "that bring solutions, such as demonstration or teacher",
    "brings_hinted": "that train responses to another prompt, as hinted with prompt=own and exemplars do",
}


class AlgorithmConfig(Block):
    """A recipe's blocks under the user's own keys: `algorithm: gpg`, or

        algorithm:
          recipe: gvpo
          loss: {beta: 0.2}

    A block given under another `name` replaces the recipe's; otherwise its keys are merged into it. A list
    replaces the recipe's list. With `recipe: null` the blocks' own defaults hold.
    """

    # The recipe whose blocks hold where no other is given; null: the blocks' own defaults.
    recipe: str | None = "gvpo"
    # Where responses come from: the policy (`engine`), the data's demonstrations (`dataset`), or its scored
    # responses (`file`).
    sampler: Literal["engine", "dataset", "file"] = "engine"
    prompts: AnyPrompts = InOrder()  # How the prompts of a step are drawn.
    allocation: AnyAllocation = Equal()  # How many responses each prompt of a batch gets.
    # Each prompt's success so far, for the blocks that read it.
    tracker: Tracker = Tracker()
    prior: AnyPrior = NoPrior()  # The reward that is expected of a prompt, for the blocks that read it.
    # Members join the groups besides the policy's own responses, in this order.
    members: tuple[AnyMember, ...] = ()
    shapers: tuple[AnyShaper, ...] = ()  # Shapers change rewards, and mask or drop responses, in this order.
    # Decides which groups form the training batch, and whether to sample more before training.
    batch_policy: AnyBatchPolicy = batch_policy.KeepAll()
    # How rewards become advantages, for losses that are weighted by advantages.
    estimator: AnyEstimator | None = None
    critic: CriticOptions | None = None  # The value model of the estimator `gae`.
    loss: AnyLoss = GVPO()  # The loss.
    # The source of the log-probs of the policy at step start, for the loss. `engine` takes those
    # that came with the responses, corrected by their mean gap a token, and saves the scoring pass.
    reference_logprobs: Literal["trainer", "engine"] = "trainer"

    @model_validator(mode="before")
    @classmethod
    def _compose(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"recipe": values}
        if not isinstance(values, Mapping):
            return values
        recipe = values.get("recipe", cls.model_fields["recipe"].default)
        return merge(read_recipe(recipe)[0], values) if isinstance(recipe, str) else values

    @model_validator(mode="after")
    def _possible(self) -> Self:
        """Refuse combinations of blocks that cannot work together."""
        if not self.samples_from_policy:
            self._without_engine()
        self._check_advantages()
        self._check_critic()
        self._check_references()
        self._check_readers()
        if (unread := self._unread_shaper()) is not None:
            raise ValueError(unread)
        if self.reference_logprobs == "engine":
            self._engine_may_be_reference()
        return self

    def _check_advantages(self) -> None:
        """Refuse an estimator that the loss does not read or whose inputs are missing, and a missing one."""
        loss, estimator = self.loss, self.estimator
        if loss.signal == "advantage" and estimator is None:
            raise ValueError(f"estimator is missing: the loss {loss.name} is weighed by its advantages")
        if loss.signal != "advantage" and estimator is not None:
            raise ValueError(
                f"estimator has no effect with the loss {loss.name}, which does not use advantages: "
                "set it to null"
            )
        readers = [entry.label for entry in self.blocks_inside() if entry.block.needs_prior]
        if readers and not self.prior.gives_prior:
            raise ValueError(
                f"prior={self.prior.name}: {readers[0]} needs an expected reward: prior=greedy, tracker or "
                "function"
            )
        if not readers and self.prior.gives_prior:
            raise ValueError(f"prior={self.prior.name}: nothing reads it; estimator.baseline=prior does")
        if estimator is not None and estimator.per_token and not loss.token_advantages:
            raise ValueError(
                f"the estimator {estimator.name} gives every token an advantage, and the loss {loss.name} "
                "takes one a response"
            )

    def _check_critic(self) -> None:
        """Refuse a critic without a reader, and a reader without a critic."""
        estimator = self.estimator
        if estimator is not None and estimator.needs_values and self.critic is None:
            raise ValueError(f"critic is missing: the estimator {estimator.name} reads its values")
        if self.critic is not None and not (estimator is not None and estimator.needs_values):
            raise ValueError(
                "critic has no effect: only the estimator gae with values=critic reads its values"
            )

    def _check_references(self) -> None:
        """Refuse two reference policies with weights of their own, and a reference that equals the policy."""
        policies = sorted({str(policy) for policy in self.reference_policies if policy.is_kept})
        if len(policies) > 1:
            raise ValueError(
                f"the references of loss, loss.divergence and estimator differ ({', '.join(policies)}): one "
                "reference policy is kept"
            )
        if (key := self._learns_from_itself()) is not None:
            raise ValueError(
                f"{key}: the policy begins as this reference, and nothing else moves it: it would learn from "
                "rounding errors. Name another reference, such as teacher, or a loss or advantage of rewards"
            )

    def _check_readers(self) -> None:
        """Refuse a tracker and members that have no effect, or whose requirements are missing."""
        loss, estimator = self.loss, self.estimator
        if not self.needs_tracker and self.tracker != Tracker():
            raise ValueError("tracker has no effect: no block reads it; prompts, allocation and prior do")
        for option, trait in loss.reads_members.items():
            if not any(getattr(member, trait) for member in self.members):
                raise ValueError(f"loss.{option} has no effect without members {_BRINGING[trait]}")
        self._check_counts()
        self._check_equal_rewards()
        if self.needs_group and any(isinstance(s, Keep) and s.which == "best" for s in self.shapers):
            raise ValueError(
                "shapers: keep with which=best leaves one response of each group, and this algorithm compares"
                " the responses of a group: nothing would be learned; loss=nll learns from the best alone"
            )
        if loss.needs_items and not (estimator is not None and estimator.finds_items):
            raise ValueError("loss.ratio=item needs the estimator rank, which finds the items")
        if early := [member.name for member in self.members[:-1] if member.adds_groups]:
            raise ValueError(
                f"members: {early[0]} adds groups of prompts that it has changed, and later members "
                "would take these for prompts of the data: put it last"
            )
        added = next((member.name for member in self.members if member.adds_groups), None)
        readers = [entry.label for entry in self.blocks_inside() if entry.block.needs_prior]
        of_estimator = next((label for label in readers if label.startswith("estimator")), None)
        if added is not None and of_estimator is not None:
            raise ValueError(
                f"members: {added} adds groups of prompts that have no expected reward, and {of_estimator} "
                "reads one: use an estimator with another baseline"
            )

    def _check_equal_rewards(self) -> None:
        """Refuse a wait for groups whose rewards differ behind a shaper that leaves equal ones."""
        keep = next((shaper for shaper in self.shapers if isinstance(shaper, Keep)), None)
        if keep is None or not self.batch_policy.drops_equal_rewards:
            return
        if keep.which == "best" or self.loss.signal == "none":
            raise ValueError(
                f"batch_policy={self.batch_policy.name} waits for groups whose rewards differ, and shapers: "
                f"keep leaves only the {keep.which} responses: all batches of a step but one would be thrown "
                "away; use batch_policy=keep_all"
            )

    def _check_counts(self) -> None:
        """Refuse options that count what no block makes or reads."""
        is_masked = any(entry.block.masks_responses for entry in self.blocks_inside())
        for entry in self.blocks_inside():
            if isinstance(entry.block, Aggregation) and entry.block.count_masked and not is_masked:
                raise ValueError(
                    f"{entry.key}.count_masked=true has no effect: no block masks responses; the shaper "
                    "mask_truncated does"
                )
        is_expectation_read = self.prior.name == "tracker" or getattr(self.prompts, "favour", "") == "unsure"
        for option in ("expected", "weight"):
            value = getattr(self.tracker, option)
            if value != getattr(Tracker(), option) and not is_expectation_read:
                raise ValueError(
                    f"tracker.{option}={value:g} has no effect: the success that the tracker expects is read "
                    "by prior=tracker and prompts.favour=unsure, and other blocks read the rate so far"
                )

    def _unread_shaper(self) -> str | None:
        """The shaper whose rewards no later block reads, with the reason; None without one.

        The walk begins at estimator and loss. A shaper that keeps or drops responses may read rewards.
        """
        reason = None if self.batch_policy.reads_rewards else self._why_rewards_are_unread()
        for number, shaper in reversed(list(enumerate(self.shapers))):
            changes_prior = isinstance(shaper, Affine) and self.prior.gives_prior
            if reason is not None and shaper.changes_rewards and not changes_prior:
                return f"shapers.{number}: {shaper.name} has no effect: {reason}"
            if shaper.replaces_rewards:
                reason = f"{shaper.name} after it computes the reward anew; give it later in the list"
            elif shaper.reads_rewards:
                reason = None
        return None

    def _why_rewards_are_unread(self) -> str | None:
        """The reason why neither estimator nor loss reads the total reward; None if one does."""
        loss, estimator = self.loss, self.estimator
        distils = isinstance(estimator, distillation.Distillation) and estimator.rewards is None
        if estimator is not None and estimator.by_components:
            reader = f"the estimator {estimator.name} reads components of the reward"
        elif estimator is not None and distils:
            reader = f"the estimator {estimator.name} reads no reward"
        elif loss.signal == "none" and not isinstance(loss, custom.CustomLoss):
            reader = f"the loss {loss.name} reads no reward"
        else:
            return None
        return (
            f"it changes the reward, and {reader}: leave it out, or make it a component (rewards.components)"
        )

    def _learns_from_itself(self) -> str | None:
        """The key of the only reference to learn from, if the policy starts equal to it; otherwise None."""
        loss, estimator = self.loss, self.estimator
        if TEACHER in self.reference_policies or loss.entropy_coef or loss.reads_members:
            return None
        if not loss.has_terms and loss.divergence is not None:
            return f"loss.divergence.reference={loss.divergence.reference}"
        if isinstance(estimator, distillation.Distillation) and estimator.rewards is None:
            return f"estimator.reference={estimator.reference}"
        return None

    def _without_engine(self) -> None:
        """Refuse blocks whose needs the samplers `dataset` and `file` cannot meet."""
        loss, sampler = self.loss, self.sampler
        if not self.has_rewards and loss.signal != "none":
            raise ValueError(
                f"sampler=dataset gives one demonstration a prompt and no rewards, but the loss {loss.name} "
                f"is weighted by each response's {loss.signal}: use the loss nll, or sampler=engine"
            )
        for entry in self.blocks_inside():
            if not self.has_rewards and entry.block.needs_rewards:
                raise ValueError(
                    f"{entry.label} compares rewards, and sampler=dataset has none: leave it out"
                )
            if isinstance(entry.block, MaskTruncated):
                raise ValueError(
                    f"{entry.label} masks responses that were cut off, and those of sampler={sampler} are "
                    "whole: leave it out"
                )
            if entry.block.needs_engine_logprobs:
                raise ValueError(
                    f"{entry.label} reads the engine's log-probs, and sampler={sampler} has none: "
                    "leave it out"
                )
        for member in self.members:
            if self.trains_on_demonstrations or member.needs_engine:
                raise ValueError(
                    f"members: {member.name} has nobody to ask, or to join, with sampler={sampler}"
                )
        if any(entry.block.needs_engine for entry in self.blocks_inside()):
            raise ValueError(f"prior=greedy and allocation ask the engine, and sampler={sampler} has none")
        for entry in self.blocks_inside():
            if entry.block.needs_tracker and getattr(entry.block, "stated_in", None) is None:
                raise ValueError(
                    f"{entry.label} counts the successes of the policy's own responses, and "
                    f"sampler={sampler} has none: leave it out, or name the field of the data that states "
                    "success rates (prompts.field)"
                )
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Refuse losses and shapers that need a longest response, which only the engine has, and lack it."""
        for entry in self.blocks_inside():
            counted = entry.key.startswith(("loss", "shapers"))
            if counted and entry.block.unset_length is not None:
                raise ValueError(
                    f"{entry.option(entry.block.unset_length)} is missing: sampler={self.sampler} has no "
                    "longest response for it"
                )

    def _engine_may_be_reference(self) -> None:
        policies = set(self.loss.reference_policies.values())
        if self.members or not self.samples_from_policy:
            problem = "compares responses that the present engine did not sample, and has no log-probs of"
        elif not policies:
            problem = "compares with no policy: there is nothing to save"
        elif not self.loss.reference_sums_only:
            problem = (
                "exponentiates differences from the policy at step start, where the engine's rounding would "
                "pass for a change of the policy: loss.importance corrects for the engine"
            )
        elif policies != {STEP_START}:
            problem = "compares with another policy than the one at step start, the only one the engine has"
        else:
            return
        raise ValueError(f"reference_logprobs=engine: the loss {self.loss.name} {problem}; use trainer")

    @property
    def samples_from_policy(self) -> bool:
        """True if the rollout engine samples the responses from the policy."""
        return self.sampler == "engine"

    @property
    def trains_on_demonstrations(self) -> bool:
        """True if each prompt's only response is its demonstration in the data."""
        return self.sampler == "dataset"

    @property
    def trains_on_scored_responses(self) -> bool:
        """True if the responses and their rewards come from the data."""
        return self.sampler == "file"

    @property
    def has_rewards(self) -> bool:
        """True if responses have rewards: all have, except demonstrations."""
        return not self.trains_on_demonstrations

    @property
    def reference_policies(self) -> tuple[Reference, ...]:
        """The policies that the loss or the estimator compares with."""
        of_estimator = () if self.estimator is None else self.estimator.reference_policies.values()
        in_head = () if self.loss.divergence is None else (self.loss.divergence.reference,)
        return (*self.loss.reference_policies.values(), *of_estimator, *in_head)

    @property
    def kept_reference(self) -> Reference | None:
        """The reference policy that the trainer keeps weights for."""
        return next((policy for policy in self.reference_policies if policy.is_kept), None)

    @property
    def needs_teacher(self) -> bool:
        """True if some block compares with the teacher (`teacher`)."""
        blocks = (entry.block for entry in self.blocks_inside())
        return TEACHER in self.reference_policies or any(block.needs_teacher for block in blocks)

    def blocks_on_components(self) -> Iterator[BlockAt]:
        """The blocks that read components of the reward."""
        return (entry for entry in self.blocks_inside() if entry.block.components_read)

    @property
    def needs_group(self) -> bool:
        """True if it compares the responses of a prompt with each other."""
        coupled = self.loss.couples_groups and self.loss.signal != "advantage"
        return coupled or (self.estimator is not None and self.estimator.needs_group)

    @property
    def compares_rewards(self) -> bool:
        """True if a group whose rewards are all equal teaches it nothing."""
        compared = self.loss.couples_groups and self.loss.signal == "reward"
        return compared or (self.estimator is not None and self.estimator.needs_group)

    @property
    def selects_right(self) -> bool:
        """True if it trains on right responses alone, whose rewards are mostly equal."""
        return any(isinstance(shaper, Keep) and shaper.which == "right" for shaper in self.shapers)

    @property
    def needs_tracker(self) -> bool:
        """True if some block reads the success rates of prompts."""
        return any(entry.block.needs_tracker for entry in self.blocks_inside())
