"""XRPO's seeding: solved problems stand in front of one that every response failed (arXiv 2510.06672)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import PositiveInt, model_validator

from megatron_gvpo.algorithms.members.base import Member, MemberContext, any_right, ask_each, taught
from megatron_gvpo.core.template import filled
from megatron_gvpo.groups import Group, Prompt


class Exemplars(Member):
    """If every response fails, sample `n` more responses with `count` solved problems in front of the prompt.

    They are the most similar problems for which the run has seen a right response; the similarity of two
    texts is the number of words in both over the number of words in either. The run remembers the newest
    `keep` solved problems with one response each, also in checkpoints. Fewer problems are shown if the prompt
    would be longer than data.max_prompt_tokens. The responses are trained as responses to the prompt alone.
    `template` writes one solved problem; `key` is the field of the data record that has the problem.
    """

    brings_hinted: ClassVar[bool] = True
    takes_images: ClassVar[bool] = False  # it writes the solved problems as text, without their images

    name: Literal["exemplars"] = "exemplars"
    count: PositiveInt = 2
    n: PositiveInt = 4
    keep: PositiveInt = 1024
    template: str = "Problem:\n{problem}\n\nSolution:\n{solution}\n\n"
    key: str = "prompt"
    right: float = 0.5  # a reward above this is right

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if "{problem}" not in self.template or "{solution}" not in self.template:
            raise ValueError("template needs {problem} and {solution} in it")
        if self.count > self.keep:
            raise ValueError(f"count={self.count} exceeds keep={self.keep}: so many problems are remembered")
        return self

    @property
    def record_fields(self) -> dict[str, str]:
        return {"key": self.key}

    def build(self) -> Corpus:
        return Corpus(self)


class Solved(NamedTuple):
    """A problem and a right response to it."""

    problem: str
    solution: str


class Corpus:
    """The solved problems of a run, by the id of their prompt, the newest last."""

    def __init__(self, options: Exemplars) -> None:
        self._options = options
        self._solved: dict[str, Solved] = {}

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        self._learn(groups)
        prompts = {
            g: self._seeded(group.prompt, context)
            for g, group in enumerate(groups)
            if not any_right(group, self._options.right)
        }
        joined = list(groups)
        for g, seeded in ask_each(context, prompts, self._options.n).items():
            rollouts = [*groups[g].rollouts, *taught(seeded.rollouts)]
            joined[g] = replace(groups[g], rollouts=rollouts)
        return joined

    def _learn(self, groups: Sequence[Group]) -> None:
        for group in groups:
            best = max(group.rollouts, key=lambda rollout: rollout.reward)
            if best.reward > self._options.right and best.text:
                self._solved.pop(group.prompt.id, None)
                self._solved[group.prompt.id] = Solved(self._problem(group.prompt), best.text)
        while len(self._solved) > self._options.keep:
            del self._solved[next(iter(self._solved))]

    def _seeded(self, prompt: Prompt, context: MemberContext) -> Prompt | None:
        """Return the prompt with as many solved problems as fit, or None if not even one fits."""
        problem = self._problem(prompt)
        others = [solved for name, solved in self._solved.items() if name != prompt.id]
        like = nlargest(self._options.count, others, key=lambda solved: alike(problem, solved.problem))
        for count in range(len(like), 0, -1):
            shown = reversed(like[:count])  # the most similar one comes last
            text = "".join(filled(self._options.template, solved._asdict()) for solved in shown)
            if (seeded := context.extended(prompt, text, before=True)) is not None:
                return seeded
        return None

    def _problem(self, prompt: Prompt) -> str:
        problem = prompt.record.get(self._options.key)
        return problem if isinstance(problem, str) else prompt.text

    def state_dict(self) -> dict[str, Any]:
        return {name: list(solved) for name, solved in self._solved.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._solved = {name: Solved(*solved) for name, solved in state.items()}


def alike(a: str, b: str) -> float:
    """Return the number of words in both texts over the number of words in either; 0 for two empty texts."""
    words_a, words_b = set(a.split()), set(b.split())
    return len(words_a & words_b) / max(len(words_a | words_b), 1)
