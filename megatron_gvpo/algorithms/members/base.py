"""Members: responses from any sampler that join a group, which GVPO permits (arXiv 2504.19599)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol

from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.groups import Group, Prompt, Rollout


class MemberContext(Protocol):
    """The run, as a member sees it. Every rank calls with the same arguments and gets the same groups."""

    step: int
    seed: int  # changes with every batch

    @property
    def longest_prompt(self) -> int:
        """The longest prompt that may be asked, in tokens."""

    def ask(self, prompts: Sequence[Prompt], n: int) -> list[Group]:
        """`n` scored responses of the engine to each prompt; of conversations, those that were not lost."""

    def extended(self, prompt: Prompt, text: str, *, before: bool = False) -> Prompt | None:
        """The prompt with `text` after the user's message, or `before` it, in the same chat template.

        None if it is then too long.
        """

    def encode(self, text: str) -> list[int]:
        """Token ids, without the tokenizer's special tokens."""

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a response, end token included."""

    def texts(
        self, function: str, groups: Sequence[Group], n: int, options: Mapping[str, Any]
    ) -> list[list[str | None]]:
        """`n` texts for each group from a user's function, which is called on one rank; None: it has none."""

    def score(self, groups: list[Group]) -> None:
        """Fill in the rewards."""

    def mean_logp(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """The mean log-prob of each response's tokens after its prompt, under the policy at step start."""


Sampling = MemberContext  # its former name, for one more release


# A member at work in a run: it takes groups, and returns them with the responses that join them.
JoinGroups = Callable[[Sequence[Group], MemberContext], list[Group]]


class Member(Block):
    """Responses that join the groups of a batch, from wherever they come.

    Every rank calls it with the same groups and must give the same.
    """

    needs_engine: ClassVar[bool] = True
    # Its responses have the components of the reward, and not only a reward.
    gives_components: ClassVar[bool] = True
    # Its groups may be conversations: it asks for whole ones, and changes no response.
    takes_conversations: ClassVar[bool] = False
    # It adds groups of prompts that it has changed, with rewards of its own.
    adds_groups: ClassVar[bool] = False
    takes_images: ClassVar[bool] = True  # the prompts of its groups may have images

    name: str

    def build(self) -> JoinGroups:
        """The member at work in a run: itself, unless it remembers something between steps."""
        return self

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        raise NotImplementedError


def any_right(group: Group, right: float) -> bool:
    """True if the reward of some response is above `right`."""
    return any(reward > right for reward in group.rewards)


def ask_each[K](context: MemberContext, prompts: Mapping[K, Prompt | None], n: int) -> dict[K, Group]:
    """`n` scored responses to each prompt, by its key. A prompt that is None, as one too long, has none."""
    known = {key: prompt for key, prompt in prompts.items() if prompt is not None}
    answers = context.ask(list(known.values()), n) if known else []
    return dict(zip(known, answers, strict=True))


def taught(
    rollouts: Sequence[Rollout], source: Literal["policy", "demonstration"] = "policy"
) -> list[Rollout]:
    """Responses that are trained in another context than they were sampled in.

    The engine's experts belong to that other context, and are dropped. So are its log-probs and supports, but
    for responses of the policy: there they say how often it sampled them (`PPO.cross_context`).
    """
    return [
        replace(
            r,
            weight_version=-1,
            spans=[],
            source=source,
            routing=None,
            logprobs=r.logprobs if source == "policy" else [],
            support=r.support if source == "policy" else None,
        )
        for r in rollouts
    ]
