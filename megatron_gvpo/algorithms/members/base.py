"""Members: responses that join a group although they are not ordinary samples of its prompt.

GVPO permits responses from any sampler (arXiv 2504.19599).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol

from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.groups import Group, Prompt, Rollout


class MemberContext(Protocol):
    """The services of a run that a member may use. All ranks call them with equal arguments and results."""

    step: int
    seed: int  # a new one for every batch

    @property
    def longest_prompt(self) -> int:
        """The largest number of tokens that a prompt may have."""

    def ask(self, prompts: Sequence[Prompt], n: int) -> list[Group]:
        """Sample and score `n` responses to each prompt. The result lacks conversations that were lost."""

    def extended(self, prompt: Prompt, text: str, *, before: bool = False) -> Prompt | None:
        """Return the prompt with `text` after the user's message, or before it, in the same chat template.

        Returns None if the new prompt is too long.
        """

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without the tokenizer's special tokens."""

    def encode_response(self, text: str) -> list[int]:
        """Return the token ids of a response, with the end token."""

    def texts(
        self, function: str, groups: Sequence[Group], n: int, options: Mapping[str, Any]
    ) -> list[list[str | None]]:
        """Call a user's function on one rank and return its `n` texts for each group; None: it is missing."""

    def score(self, groups: list[Group]) -> None:
        """Compute the rewards of the responses and write them into the groups."""

    def mean_logp(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """Return each response's mean log-prob of a token after its prompt, by the policy at step start."""


Sampling = MemberContext  # the class's former name, which is kept for one more release


# The function of a member in a run: it takes groups, and returns them with the responses that join them.
JoinGroups = Callable[[Sequence[Group], MemberContext], list[Group]]


class Member(Block):
    """A block that adds responses from some source to the groups of a batch.

    Every rank calls it with the same groups, and it must return the same groups on every rank.
    """

    needs_engine: ClassVar[bool] = True
    # True if the rewards of the responses that it adds are the weighted sums of their components.
    gives_components: ClassVar[bool] = True
    # True if it works for conversations: it requests complete conversations and changes no response.
    takes_conversations: ClassVar[bool] = False
    # True if it adds groups whose prompts it has changed, with its own rewards.
    adds_groups: ClassVar[bool] = False
    # True if it may bring solutions that no policy sampled (`TrainBatch.demonstration_n`).
    brings_demonstrations: ClassVar[bool] = False
    # True if it may bring responses that the policy sampled in another context than that of their training.
    brings_hinted: ClassVar[bool] = False
    takes_images: ClassVar[bool] = True  # false if it refuses prompts with images

    name: str

    def build(self) -> JoinGroups:
        """Return the function that a run calls: the block itself, unless it keeps state between steps."""
        return self

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        raise NotImplementedError


def any_right(group: Group, right: float) -> bool:
    """True if the reward of some response is above `right`."""
    return any(reward > right for reward in group.rewards)


def ask_each[K](context: MemberContext, prompts: Mapping[K, Prompt | None], n: int) -> dict[K, Group]:
    """Return `n` scored responses to each prompt, by the prompt's key. Prompts that are None are left out."""
    known = {key: prompt for key, prompt in prompts.items() if prompt is not None}
    answers = context.ask(list(known.values()), n) if known else []
    return dict(zip(known, answers, strict=True))


def taught(
    rollouts: Sequence[Rollout], source: Literal["policy", "demonstration"] = "policy"
) -> list[Rollout]:
    """Return copies of responses for training in another context than the one that they were sampled in.

    The engine's experts belong to the context of the sampling, so they are dropped. The engine's log-probs
    and supports are kept only if the policy sampled the responses: the option `cross_context` of PPO's loss
    compares with them.
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
