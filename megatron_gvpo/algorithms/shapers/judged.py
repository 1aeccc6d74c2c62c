"""Shapers that compare responses with each other by a user's function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from megatron_gvpo.algorithms.base import WithFunction
from megatron_gvpo.algorithms.shapers.base import Shaper, rewarded
from megatron_gvpo.core.plain_values import NoNumberError, real_number
from megatron_gvpo.core.user_functions import call_function, refused
from megatron_gvpo.groups import Group, Prompt, Rollout


class WinRate(WithFunction, Shaper):
    """r_i = mean over opponents j of [i beats j]: Pref-GRPO's pairwise reward.

    `function(prompt, a, b, **options)` -> 1 where response a is better than b, 0 where worse, 0.5 for a tie;
    it is called once for each pair, with i before j. `opponents`: number of the next responses of the group,
    cyclically, that each is compared with; null: all others. A response alone has 0.5.
    """

    outside: ClassVar[bool] = True
    makes_rewards: ClassVar[bool] = True
    arguments: ClassVar[tuple[str, ...]] = ("prompt", "a", "b")

    name: Literal["win_rate"] = "win_rate"
    opponents: PositiveInt | None = None

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        return [rewarded(group, self._rewards(group)) for group in groups]

    def _rewards(self, group: Group) -> list[float]:
        k = len(group.rollouts)
        reach = min(self.opponents or k - 1, k - 1)
        wins: dict[tuple[int, int], float] = {}
        for i in range(k):
            for j in ((i + 1 + offset) % k for offset in range(reach)):
                a, b = min(i, j), max(i, j)
                if (a, b) not in wins:
                    won = _number(self, group.prompt, group.rollouts[a], group.rollouts[b])
                    wins[a, b], wins[b, a] = won, 1 - won
        return [fmean([won for (a, _), won in wins.items() if a == i] or [0.5]) for i in range(k)]


class GroupSimilarity(WithFunction, Shaper):
    """r_i = r weight + mean over the others j of similarity(i, j): PS-GRPO's consistency.

    `function(a, b, **options)` -> float of two texts. With `across`, a field of the data record, the group is
    made of all prompts of the batch with the same value there (paraphrases), and only responses to *other*
    prompts are compared; for a prompt without a paraphrase the similarity is 0. The paper's abstract inspired
    this shaper.
    """

    outside: ClassVar[bool] = True
    makes_rewards: ClassVar[bool] = True
    arguments: ClassVar[tuple[str, ...]] = ("a", "b")

    name: Literal["group_similarity"] = "group_similarity"
    across: str | None = None
    weight: float = 0.0  # weight of the reward before shaping

    @property
    def record_fields(self) -> dict[str, str]:
        return {} if self.across is None else {"across": self.across}

    @property
    def replaces_rewards(self) -> bool:
        return self.weight == 0

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        return [self._shaped(group, self._others(groups, g)) for g, group in enumerate(groups)]

    def _others(self, groups: Sequence[Group], g: int) -> list[str] | None:
        """Return the texts to compare the responses of group `g` with; None: compare them with each other."""
        if self.across is None:
            return None
        key = groups[g].prompt.record.get(self.across)
        if key is None:  # prompts without a topic are not paraphrases of each other
            return []
        same = [
            group for i, group in enumerate(groups) if i != g and group.prompt.record.get(self.across) == key
        ]
        return [rollout.text for group in same for rollout in group.rollouts]

    def _shaped(self, group: Group, others: list[str] | None) -> Group:
        rewards = []
        for i, rollout in enumerate(group.rollouts):
            texts = others
            if texts is None:
                texts = [other.text for j, other in enumerate(group.rollouts) if j != i]
            values = [_number(self, rollout.text, text) for text in texts]
            rewards.append(self.weight * rollout.reward + fmean(values or [0.0]))
        return rewarded(group, rewards)


def _number(shaper: WinRate | GroupSimilarity, *arguments: Any) -> float:
    """The number that the user's function returns. Raises UserFunctionError."""
    where = ("shaper function", shaper.function)
    try:
        return real_number(call_function(*where, *arguments, **shaper.options))
    except NoNumberError as error:
        raise refused(*where, f"expected a number, it returned {error}") from None


def unigram_overlap(a: str, b: str) -> float:
    """2 |A and B| / (|A| + |B|) of the words of two texts, with multiplicity; 1 where both have none."""
    words_a, words_b = Counter(a.split()), Counter(b.split())
    total = words_a.total() + words_b.total()
    return 2 * (words_a & words_b).total() / total if total else 1.0


def shorter(prompt: Prompt, a: Rollout, b: Rollout) -> float:
    """A judge that prefers the shorter response, as a stand-in while a recipe is tried out."""
    return 0.5 if len(a.token_ids) == len(b.token_ids) else float(len(a.token_ids) < len(b.token_ids))
