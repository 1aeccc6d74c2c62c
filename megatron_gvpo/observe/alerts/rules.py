"""The rules of alerts, as data: which metrics show the trouble, the words for it, and where to look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# `now` is the mean of a metric over the last steps, `before` that over the first steps of the run.
# above, below: now > value, now < value; rises, falls: now > value * before, now < value * before;
# constant: all of the last values are the same.
# not_gained: the last value is above the first one by less than half of what the values range over; also
# where the metric has fewer than two values, because then nothing says that it did.
Kind = Literal["above", "below", "rises", "falls", "constant", "not_gained"]


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a metric's mean over steps. `<...>` in the name stands for any name, as in the table
    of metrics; the rule then holds for each metric that has such a name.
    """

    metric: str
    kind: Kind
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert is given when all conditions hold over `steps` steps; again only after they did not.

    `says` is filled in with {now} and {before} of the first condition's metric, {name}, which stands for
    `<...>` in it, and {steps}. `look` says what to look at.
    """

    name: str
    conditions: tuple[Condition, ...]
    steps: int
    says: str
    look: str


RULES = (
    Rule(
        "entropy collapse",
        # A policy that learned its task is certain, too: its evaluations rose.
        (Condition("response/entropy", "falls", 0.1), Condition("eval/pass@1", "not_gained")),
        5,
        "the responses have become nearly certain: entropy fell from {before:.3g} to {now:.3g} nats a token, "
        "and no evaluation says that they became right",
        "whether a group's responses are all alike (report, Samples); lower optimizer.lr, set "
        "loss.entropy_coef, or hold the policy to a reference",
    ),
    Rule(
        "reward for length",
        (
            Condition("response/length", "rises", 1.3),
            Condition("reward/length_correlation", "above", 0.5),
            Condition("eval/pass@1", "not_gained"),
        ),
        5,
        "responses grew from {before:.0f} to {now:.0f} tokens, and longer ones of a group get more "
        "reward, and no evaluation says that they became right",
        "the longest responses (report, Samples); evaluate (eval.every) to see if they are better",
    ),
    Rule(
        "mismatch rises",
        (Condition("mismatch/kl", "rises", 5.0), Condition("mismatch/kl", "above", 1e-5)),
        3,
        "engine and trainer disagree more than at first: mismatch/kl rose from {before:.2g} to {now:.2g} "
        "nats a token",
        "whether every push reached the engine (response/staleness), and the tokens with the largest gap "
        "(report, Samples); docs/explanation/mismatch.md lists the causes, and loss.importance bounds what "
        "such tokens weigh",
    ),
    Rule(
        "correction leaves little",
        (Condition("train/importance", "below", 0.5),),
        3,
        "loss.importance leaves {now:.0%} of the policy gradient: its weights are 1 on average without a "
        "mismatch",
        "train/importance_masked, and mismatch/abs_mean: low and high are to allow a few times that; "
        "with level=sequence also the length of responses (docs/howto/mismatch.md)",
    ),
    Rule(
        "no signal",
        (Condition("reward/groups_with_signal", "below", 0.1),),
        5,
        "nearly all groups are solved or failed: {now:.0%} have responses with different rewards",
        "reward/mean: where it is high, take harder prompts, where it is low, easier ones; or more responses "
        "(rollout.n), or a recipe with a filter",
    ),
    Rule(
        "dead reward component",
        (Condition("reward/<component>", "constant"),),
        10,
        "the reward component {name} gave {now:.3g} on average in each of the last {steps} steps",
        "the component's values in the responses (report, Samples), and its errors (reward/errors)",
    ),
    Rule(
        "slow server",
        (Condition("server/<server>/relative_time", "above", 2.0),),
        3,
        "the server {name} takes {now:.1f} times as long for a token as the others",
        "its machine: another process on its GPU, its clocks and heat, its log in OUTPUT_DIR",
    ),
)
