"""A method as a composition of blocks: every block there is, and which go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from megatron_gvpo.algorithms.advantages.bnpo import BNPO
from megatron_gvpo.algorithms.advantages.care import ConfidenceEstimator
from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.advantages.fgrpo import LagrangianEstimator
from megatron_gvpo.algorithms.advantages.gae import GAE, Critic
from megatron_gvpo.algorithms.advantages.gdpo import ComponentEstimator
from megatron_gvpo.algorithms.advantages.grao import ReferenceAnswerEstimator
from megatron_gvpo.algorithms.advantages.m_grpo import RoleEstimator
from megatron_gvpo.algorithms.advantages.mc_grpo import MedianEstimator
from megatron_gvpo.algorithms.advantages.ngrpo import VirtualEstimator
from megatron_gvpo.algorithms.advantages.rank_grpo import RankEstimator
from megatron_gvpo.algorithms.advantages.stratified import StratifiedEstimator
from megatron_gvpo.algorithms.advantages.tempo import PrefixTreeEstimator
from megatron_gvpo.algorithms.advantages.v05 import ShrunkEstimator
from megatron_gvpo.algorithms.advantages.xrpo import NoveltyEstimator
from megatron_gvpo.algorithms.base import STEP_START, Block, Reference
from megatron_gvpo.algorithms.curriculum.batch_policy import Accumulate, KeepAll
from megatron_gvpo.algorithms.curriculum.blocks import (
    Equal,
    FunctionPrior,
    GreedyPrior,
    InOrder,
    Knapsack,
    NoPrior,
    SuccessRate,
    TrackedPrior,
    Tracker,
)
from megatron_gvpo.algorithms.custom import CustomEstimator, CustomLoss, CustomShaper
from megatron_gvpo.algorithms.losses.cispo import CISPO
from megatron_gvpo.algorithms.losses.disco import DisCO
from megatron_gvpo.algorithms.losses.dpo import DPO
from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.algorithms.losses.nll import NLL
from megatron_gvpo.algorithms.losses.pg import PolicyGradient
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.algorithms.losses.reg_grpo import RegGRPO
from megatron_gvpo.algorithms.members.arise import Skills
from megatron_gvpo.algorithms.members.base import Demonstration, Hinted, Replay
from megatron_gvpo.algorithms.members.exemplars import Exemplars
from megatron_gvpo.algorithms.members.guests import Exits, Teacher
from megatron_gvpo.algorithms.members.hill import LearnedHint
from megatron_gvpo.algorithms.members.masa import Foresight
from megatron_gvpo.algorithms.members.osla import OneMore
from megatron_gvpo.algorithms.members.rounds import Rounds
from megatron_gvpo.algorithms.recipe import merge, read_recipe
from megatron_gvpo.algorithms.shapers.consistency import InformationConsistency
from megatron_gvpo.algorithms.shapers.filters import Drop, Keep, MaskTruncated
from megatron_gvpo.algorithms.shapers.judged import GroupSimilarity, WinRate
from megatron_gvpo.algorithms.shapers.rewards import (
    Affine,
    FormatLength,
    Gate,
    LengthCurriculum,
    Overlong,
    SerialDecay,
    ShortRight,
    SoftLog,
    Staged,
    Unlikeliness,
)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _group_by_default(value: Any) -> Any:
    value = _named(value)
    return {"name": "group", **value} if isinstance(value, Mapping) else value


AnyPrompts = Annotated[InOrder | SuccessRate, Field(discriminator="name"), BeforeValidator(_named)]
AnyAllocation = Annotated[Equal | Knapsack, Field(discriminator="name"), BeforeValidator(_named)]
AnyPrior = Annotated[
    NoPrior | GreedyPrior | TrackedPrior | FunctionPrior, Field(discriminator="name"), BeforeValidator(_named)
]
AnyMember = Annotated[
    Replay
    | Demonstration
    | Hinted
    | Exits
    | Teacher
    | LearnedHint
    | Skills
    | Foresight
    | OneMore
    | Exemplars
    | Rounds,
    Field(discriminator="name"),
    BeforeValidator(_named),
]
AnyShaper = Annotated[
    Affine
    | Overlong
    | Unlikeliness
    | ShortRight
    | LengthCurriculum
    | FormatLength
    | Gate
    | Staged
    | SoftLog
    | SerialDecay
    | Keep
    | Drop
    | MaskTruncated
    | WinRate
    | GroupSimilarity
    | InformationConsistency
    | CustomShaper,
    Field(discriminator="name"),
    BeforeValidator(_named),
]
AnyBatchPolicy = Annotated[KeepAll | Accumulate, Field(discriminator="name"), BeforeValidator(_named)]
AnyEstimator = Annotated[
    Estimator
    | BNPO
    | MedianEstimator
    | VirtualEstimator
    | ComponentEstimator
    | StratifiedEstimator
    | PrefixTreeEstimator
    | NoveltyEstimator
    | ShrunkEstimator
    | ReferenceAnswerEstimator
    | RankEstimator
    | LagrangianEstimator
    | ConfidenceEstimator
    | RoleEstimator
    | GAE
    | CustomEstimator,
    Field(discriminator="name"),
    BeforeValidator(_group_by_default),
]
AnyLoss = Annotated[
    GVPO | PolicyGradient | PPO | CISPO | NLL | DPO | DisCO | RegGRPO | CustomLoss,
    Field(discriminator="name"),
    BeforeValidator(_named),
]


class AlgorithmConfig(Block):
    """A recipe's blocks under the user's own keys: `algorithm: gpg`, or

        algorithm:
          recipe: gvpo
          loss: {beta: 0.2}

    A block given under another `name` replaces the recipe's; otherwise its keys are merged into it. A list
    replaces the recipe's list. With `recipe: null` the blocks' own defaults hold.
    """

    recipe: str | None = "gvpo"
    # Responses come from the policy, are the data set's demonstrations, or its scored responses.
    sampler: Literal["engine", "dataset", "file"] = "engine"
    prompts: AnyPrompts = InOrder()  # which are drawn
    allocation: AnyAllocation = Equal()  # of responses to the prompts of a batch
    tracker: Tracker = Tracker()  # of prompts' success, for the blocks that want it
    prior: AnyPrior = NoPrior()  # the reward that is expected of a prompt
    members: tuple[AnyMember, ...] = ()  # what joins the groups, in this order
    shapers: tuple[AnyShaper, ...] = ()  # what changes rewards, masks and drops, in this order
    batch_policy: AnyBatchPolicy = KeepAll()
    estimator: AnyEstimator | None = None  # for losses that are weighed by advantages
    critic: Critic | None = None  # for the estimator gae
    loss: AnyLoss = GVPO()
    # Who computes the log-probs of the policy at step start that the loss compares with: "engine" takes those
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
        """Combinations of blocks that mean nothing."""
        loss = self.loss
        if self.sampler != "engine":
            self._without_engine()
        if loss.signal == "advantage" and self.estimator is None:
            raise ValueError(f"estimator is missing: the loss {loss.name} is weighed by its advantages")
        if loss.signal != "advantage" and self.estimator is not None:
            raise ValueError(
                f"estimator has no effect with the loss {loss.name}, which does not use advantages: "
                "set it to null"
            )
        estimator = self.estimator
        readers = [f"the estimator {e.name}" for e in (estimator,) if e is not None and e.needs_prior]
        readers += [f"members: {member.name}" for member in self.members if member.name == "one_more"]
        if readers and self.prior.name == "none":
            raise ValueError(
                f"prior=none: {readers[0]} needs an expected reward: prior=greedy, tracker or function"
            )
        if not readers and self.prior.name != "none":
            raise ValueError(f"prior={self.prior.name}: nothing reads it; estimator.baseline=prior does")
        if estimator is not None and estimator.per_token and not loss.token_advantages:
            raise ValueError(
                f"the estimator {estimator.name} gives every token an advantage, and the loss {loss.name} "
                "takes one a response"
            )
        if (estimator is not None and estimator.needs_values) != (self.critic is not None):
            raise ValueError(
                "critic has no effect: only the estimator gae with values=critic reads its values"
                if self.critic is not None
                else f"critic is missing: the estimator {getattr(estimator, 'name', None)} reads its values"
            )
        references = {a for a in self.anchors if a != STEP_START}
        if len(references) > 1:
            raise ValueError("loss.reference and estimator.reference differ: one reference policy is kept")
        if getattr(loss, "ratio", None) == "item" and not isinstance(estimator, RankEstimator):
            raise ValueError("loss.ratio=item needs the estimator rank, which finds the items")
        if self.reference_logprobs == "engine":
            self._engine_may_be_reference()
        return self

    def _without_engine(self) -> None:
        """What the samplers `dataset` and `file` cannot do."""
        loss, sampler = self.loss, self.sampler
        if sampler == "dataset" and loss.signal != "none":
            raise ValueError(
                f"sampler=dataset gives one demonstration a prompt and no rewards, but the loss {loss.name} "
                f"is weighed by each response's {loss.signal}: use the loss nll, or sampler=engine"
            )
        if sampler == "dataset" and self.batch_policy.name != "keep_all":
            raise ValueError(
                f"batch_policy={self.batch_policy.name} compares rewards, and sampler=dataset has none: "
                "use keep_all"
            )
        if sampler == "dataset" and self.shapers:
            raise ValueError("shapers work on rewards, and sampler=dataset has none: leave them out")
        compares = ["loss.importance"] if getattr(loss, "importance", None) is not None else []
        compares += ["estimator=novelty"] if isinstance(self.estimator, NoveltyEstimator) else []
        if compares:
            raise ValueError(
                f"{compares[0]} reads the engine's log-probs, and sampler={sampler} has none: leave it out"
            )
        if self.prior.name == "greedy" or self.allocation.name != "equal":
            raise ValueError(f"prior=greedy and allocation ask the engine, and sampler={sampler} has none")
        if others := [m.name for m in self.members if sampler == "dataset" or m.name != "demonstration"]:
            raise ValueError(f"members: {others[0]} has nobody to ask, or to join, with sampler={sampler}")
        missing = [f"shapers: {block.name}: max_tokens" for block in self.shapers if block.sized(1) != block]
        if loss.sized(1) != loss:
            missing = [f"loss.{'aggregation.constant' if hasattr(loss, 'aggregation') else 'max_tokens'}"]
        if missing:
            raise ValueError(f"{missing[0]} is missing: sampler={sampler} has no longest response for it")

    def _engine_may_be_reference(self) -> None:
        anchors = set(self.loss.anchors.values())
        if self.members or self.sampler != "engine":
            problem = "compares responses that the present engine did not sample, and has no log-probs of"
        elif not anchors:
            problem = "compares with no policy: there is nothing to save"
        elif not self.loss.sums_anchors:
            problem = (
                "exponentiates differences from the policy at step start, where the engine's rounding would "
                "pass for a change of the policy: loss.importance corrects for the engine"
            )
        elif anchors != {STEP_START}:
            problem = "compares with another policy than the one at step start, the only one the engine has"
        else:
            return
        raise ValueError(f"reference_logprobs=engine: the loss {self.loss.name} {problem}; use trainer")

    @property
    def anchors(self) -> tuple[Reference, ...]:
        """The policies that loss or estimator compare with."""
        of_estimator = () if self.estimator is None else self.estimator.anchors.values()
        return (*self.loss.anchors.values(), *of_estimator)

    def blocks_on_components(self) -> Iterator[tuple[str, Block]]:
        """The blocks that read components of the reward, with their keys."""
        placed: list[tuple[str, Block]] = [(f"shapers.{i}", block) for i, block in enumerate(self.shapers)]
        placed.append(("batch_policy", self.batch_policy))
        placed += [("estimator", self.estimator)] if self.estimator is not None else []
        for key, block in placed:
            if block.components_read:
                yield f"algorithm.{key}", block

    @property
    def needs_group(self) -> bool:
        """Whether it compares the responses of a prompt with each other."""
        coupled = self.loss.couples_groups and self.loss.signal != "advantage"
        return coupled or (self.estimator is not None and self.estimator.needs_group)

    @property
    def needs_tracker(self) -> bool:
        """Whether some block asks what earlier responses to a prompt came to."""
        return (
            self.prior.name == "tracker"
            or self.prompts.name == "success_rate"
            or self.allocation.name == "knapsack"
        )

    def sized(self, max_tokens: int) -> Self:
        """For responses of at most `max_tokens` tokens, which some blocks count with."""
        changes: dict[str, Any] = {
            "loss": self.loss.sized(max_tokens),
            "shapers": tuple(shaper.sized(max_tokens) for shaper in self.shapers),
            "members": tuple(
                member.sized(max_tokens) if isinstance(member, Demonstration) else member
                for member in self.members
            ),
        }
        return self.model_copy(update=changes)
