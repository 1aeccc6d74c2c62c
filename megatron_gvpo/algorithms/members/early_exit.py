"""S-GRPO's early exits: the thinking of a response is cut off, and the policy answers (arXiv 2505.07686)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, PositiveInt

from megatron_gvpo.algorithms.members.base import Member, MemberContext
from megatron_gvpo.groups import Group, Prompt, Rollout


class Exits(Member):
    """S-GRPO's serial group (arXiv 2505.07686): the first response is cut off at `count` random tokens.

    The cuts lie in the thinking, which is the text before `end`, or all of a response without `end`. After
    each cut, `inducer` ends the thinking and the engine samples an answer. The new response consists of the
    beginning, the inducer and the answer. All three parts are trained, and the reward is that of the answer.
    The new responses come first in the group, from the earliest cut to the latest. Prompt, beginning and
    inducer together must fit into data.max_prompt_tokens, so no cut is made at a token for which they would
    not fit.
    """

    name: Literal["exits"] = "exits"
    count: PositiveInt = 4
    inducer: str = "\n\nTime is limited, so here is the answer.\n</think>\n\n"
    end: str = Field("</think>", min_length=1)

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        inducer, end = context.encode(self.inducer), context.encode(self.end)
        begun: list[tuple[int, list[int]]] = []  # index of the group, tokens of beginning and inducer
        prompts: list[Prompt] = []
        for g, group in enumerate(groups):
            thought, prompt = before(group.rollouts[0].token_ids, end), group.prompt
            last = min(len(thought), context.longest_prompt - len(prompt.token_ids) - len(inducer) + 1)
            cuts = range(1, max(last, 1))
            for cut in sorted(random.Random(context.seed + g).sample(cuts, min(self.count, len(cuts)))):
                opening = [*thought[:cut], *inducer]
                begun.append((g, opening))
                prompts.append(replace(prompt, token_ids=(*prompt.token_ids, *opening)))
        exits: list[list[Rollout]] = [[] for _ in groups]
        answers = context.ask(prompts, 1) if prompts else []
        for (g, opening), answer in zip(begun, answers, strict=True):
            continuation = answer.rollouts[0]
            tokens = [*opening, *continuation.token_ids]
            # The response's tokens come from several contexts, so the engine's log-probs, experts and
            # supports do not apply.
            early = replace(
                continuation,
                token_ids=tokens,
                logprobs=[],
                weight_version=-1,
                spans=[],
                source="exit",
                routing=None,
                support=None,
            )
            exits[g].append(early)
        return [
            replace(group, rollouts=[*added, *group.rollouts])
            for group, added in zip(groups, exits, strict=True)
        ]


def before(token_ids: list[int], end: list[int]) -> list[int]:
    """Return the tokens before the first `end`, or all of them without it."""
    positions = (t for t in range(len(token_ids)) if end and token_ids[t : t + len(end)] == end)
    return token_ids[: next(positions, None)]
