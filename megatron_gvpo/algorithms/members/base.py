"""Responses that join a group, whoever gave them: GVPO's freedom of sampler (arXiv 2504.19599)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, Protocol, Self, runtime_checkable

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.algorithms.curriculum.batch_policy import rollout_of
from megatron_gvpo.types import Group, Prompt, Rollout


class Sampling(Protocol):
    """What a member may ask of the run. Every rank calls with the same arguments and gets the same groups."""

    step: int
    seed: int  # of this batch

    @property
    def longest_prompt(self) -> int:
        """In tokens, that may be asked."""

    def ask(self, prompts: Sequence[Prompt], n: int) -> list[Group]:
        """`n` scored responses of the engine to each prompt."""

    def extended(self, prompt: Prompt, text: str, *, before: bool = False) -> Prompt | None:
        """The prompt with `text` after what the user says, or `before` it, in the same chat template.

        None where it is then too long.
        """

    def encode(self, text: str) -> list[int]:
        """Token ids, without special ones of the tokenizer's."""

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a response, end token included."""

    def texts(
        self, function: str, groups: Sequence[Group], n: int, options: Mapping[str, Any]
    ) -> list[list[str]]:
        """What a user's function says, called on one rank: `n` texts for each group."""

    def score(self, groups: list[Group]) -> None:
        """Fill in the rewards."""

    def mean_logp(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """The mean log-prob of each response's tokens behind its prompt, under the policy at step start."""


Member = Callable[[Sequence[Group], Sampling], list[Group]]


@runtime_checkable
class Stateful(Protocol):
    """What a member or an estimator of a run remembers from step to step: JSON values, for checkpoints."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Replay(Block):
    """`count` earlier responses to the same prompt join each group, the newest first.

    A prompt that was not seen before has none: its group is smaller. Rewards are stored with the response;
    its log-probs under the reference are computed anew, as GVPO needs them. `keep`: how many responses a
    prompt are held, and written into checkpoints.
    """

    name: Literal["replay"] = "replay"
    count: PositiveInt = 1
    keep: PositiveInt | None = None  # null: count

    def build(self) -> History:
        return History(self.count, max(self.count, self.keep or self.count))


class History:
    """The newest responses to every prompt, as the fields of their `Rollout`: what a checkpoint writes."""

    def __init__(self, count: int, keep: int) -> None:
        self._count, self._keep = count, keep
        self._held: dict[str, tuple[dict[str, Any], ...]] = {}

    def __call__(self, groups: Sequence[Group], sampling: Sampling) -> list[Group]:
        joined = []
        for group in groups:
            held = self._held.get(group.prompt.id, ())
            own = [r for r in group.rollouts if r.source == "policy"]
            new = tuple(asdict(replace(r, source="replay", routing=None)) for r in own)
            self._held[group.prompt.id] = (*held, *new)[-self._keep :]
            earlier = [rollout_of(fields) for fields in held[-self._count :]]
            joined.append(replace(group, rollouts=[*group.rollouts, *earlier]))
        return joined

    def state_dict(self) -> dict[str, Any]:
        return dict(self._held)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held = {prompt: tuple(held) for prompt, held in state.items()}


class Demonstration(Block):
    """The data set's own solution joins the group with `reward`, or takes the place of a response.

    when   always, or all_wrong: where no response is better than `right` (GCPO, arXiv 2510.07790)
    place  add, or replace, which leaves the group its size, the response at `slot`: a random one, the
           longest, or the first truncated one (a random one without any)
    A solution longer than `max_tokens` (null: rollout.max_tokens) stays out.
    """

    name: Literal["demonstration"] = "demonstration"
    when: Literal["always", "all_wrong"] = "always"
    place: Literal["add", "replace"] = "add"
    slot: Literal["random", "longest", "truncated"] = "random"
    reward: float = 1.0
    right: float = 0.0
    max_tokens: PositiveInt | None = None

    def sized(self, max_tokens: int) -> Self:
        return self if self.max_tokens is not None else self.model_copy(update={"max_tokens": max_tokens})

    def build(self) -> Member:
        return self

    def __call__(self, groups: Sequence[Group], sampling: Sampling) -> list[Group]:
        return [self._joined(group, sampling.seed + i) for i, group in enumerate(groups)]

    def _joined(self, group: Group, seed: int) -> Group:
        solution = group.prompt.demonstration
        too_long = solution is not None and self.max_tokens is not None and len(solution) > self.max_tokens
        needless = self.when == "all_wrong" and any(r > self.right for r in group.rewards)
        if solution is None or too_long or needless:
            return group
        given = Rollout(
            list(solution), [], "", "stop", -1, reward=self.reward, source="demonstration"
        )  # of no weight version
        rollouts = list(group.rollouts)
        if self.place == "add":
            return replace(group, rollouts=[*rollouts, given])
        rollouts[self._slot(rollouts, seed)] = given
        return replace(group, rollouts=rollouts)

    def _slot(self, rollouts: Sequence[Rollout], seed: int) -> int:
        if self.slot == "longest":
            return max(range(len(rollouts)), key=lambda i: len(rollouts[i].token_ids))
        truncated = [i for i, r in enumerate(rollouts) if r.finish_reason == "length"]
        if self.slot == "truncated" and truncated:
            return truncated[0]
        return random.Random(seed).randrange(len(rollouts))


class Hinted(Block):
    """`n` responses to the prompt with a hint join the group, where it failed or always.

    `fields` of the data record hold the hints, from the weakest to the strongest; each is tried where the
    ones before it brought no right response, and the first that brings one (or the last) stays. With
    `best_draft` the hint is the group's own best response (iGRPO). `template` wraps a hint, `{hint}` in it; a
    prompt that is longer with it than data.max_prompt_tokens goes without.

    prompt  own     responses are trained as if to the prompt without the hint (Guide, arXiv 2506.13923)
            hinted  as to the prompt they answered: a group of its own (iGRPO); the group it came from is
                    trained only where `keep_group`
    place   add, or replace: each takes the place of a wrong response (Scaf-GRPO, arXiv 2510.19807)
    source  policy, or demonstration, where the loss treats responses to hints as given solutions
    keep    all of the hinted responses, or only the right ones
    """

    name: Literal["hinted"] = "hinted"
    fields: tuple[str, ...] = ()
    best_draft: bool = False
    when: Literal["always", "all_wrong"] = "all_wrong"
    n: PositiveInt = 4
    template: str = "\n\nHint: {hint}"
    prompt: Literal["own", "hinted"] = "own"
    place: Literal["add", "replace"] = "add"
    source: Literal["policy", "demonstration"] = "policy"
    keep: Literal["all", "right"] = "all"
    keep_group: bool = True
    after_step: int = Field(0, ge=0)  # no hints up to it
    right: float = 0.0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if bool(self.fields) == self.best_draft:
            raise ValueError(
                "hinted needs `fields`, the hints in the data record, or `best_draft`: one of both"
            )
        if "{hint}" not in self.template:
            raise ValueError("template has no {hint} in it")
        if self.prompt == "hinted" and (self.place == "replace" or self.keep == "right"):
            raise ValueError("prompt=hinted makes a group of its own: place=add and keep=all go with it")
        return self

    def build(self) -> Member:
        return self

    def __call__(self, groups: Sequence[Group], sampling: Sampling) -> list[Group]:
        if sampling.step <= self.after_step:
            return list(groups)
        found: dict[int, Group] = {}
        for level in range(1 if self.best_draft else len(self.fields)):
            open_ = [g for g, group in enumerate(groups) if self._wants(group, found.get(g))]
            prompts: dict[int, Prompt] = {}
            for g in open_:
                hint = self._hint(groups[g], level)
                text = None if hint is None else self.template.replace("{hint}", hint)
                if text is not None and (prompt := sampling.extended(groups[g].prompt, text)) is not None:
                    prompts[g] = prompt
            if prompts:
                found |= dict(zip(prompts, sampling.ask(list(prompts.values()), self.n), strict=True))
        joined: list[Group] = []
        for g, group in enumerate(groups):
            joined += self._joined(group, found[g]) if g in found else [group]
        return joined

    def _wants(self, group: Group, found: Group | None) -> bool:
        if found is not None:
            return not self._any_right(found)
        return self.when == "always" or not self._any_right(group)

    def _any_right(self, group: Group) -> bool:
        return any(reward > self.right for reward in group.rewards)

    def _hint(self, group: Group, level: int) -> str | None:
        if self.best_draft:
            return max(group.rollouts, key=lambda rollout: rollout.reward).text or None
        hint = group.prompt.record.get(self.fields[level])
        return None if hint is None else str(hint)

    def _joined(self, group: Group, hinted: Group) -> list[Group]:
        if self.prompt == "hinted":
            return [group, hinted] if self.keep_group else [hinted]
        mine = [r for r in hinted.rollouts if self.keep == "all" or r.reward > self.right]
        rollouts = list(group.rollouts)
        if self.place == "replace":
            wrong = [i for i, rollout in enumerate(rollouts) if rollout.reward <= self.right]
            mine = mine[: len(wrong)]
            taken = set(wrong[: len(mine)])
            rollouts = [rollout for i, rollout in enumerate(rollouts) if i not in taken]
        return [replace(group, rollouts=[*rollouts, *taught(mine, self.source)])]


def taught(
    rollouts: Sequence[Rollout], source: Literal["policy", "demonstration"] = "policy"
) -> list[Rollout]:
    """Responses that are trained in another context than they were sampled in.

    Their log-probs and experts are of that other one: no engine speaks for them.
    """
    return [replace(r, weight_version=-1, spans=[], source=source, routing=None) for r in rollouts]
