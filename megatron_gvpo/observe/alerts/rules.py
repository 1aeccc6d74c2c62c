"""The rules of alerts, as data: the metrics that show a problem, its message, and advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# `now` is the mean of a metric over the last steps, `before` its mean over the first steps of the run.
# above: now > value; below: now < value.
# rises: now > value * before; falls: now < value * before.
# reaches: the largest value of the run > value; leaps: it is > value * the first one.
# constant: all of the last values are the same.
# not_gained: the last value exceeds the first by less than half of the range of all values, or the metric has
# fewer than two values, which show no gain.
Kind = Literal["above", "below", "rises", "falls", "reaches", "leaps", "constant", "not_gained"]


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
    """A rule raises an alert when all conditions hold over `steps` steps, and again only after they failed.

    `message` is filled in with {now}, {before} and {most} (the largest value) of the first metric, those of
    the second as {others[0][now]} and so on, {steps}, and {name}, the text for which `<...>` stands in the
    metric's name. `advice` names things to check. No alert follows one of the rule `not_after`, which
    explains it.
    """

    name: str
    conditions: tuple[Condition, ...]
    steps: int
    message: str
    advice: str
    not_after: str | None = None


_FELL = Condition("reward/mean", "falls", 0.5)
_LOWER = (
    "the steps in which train/kl and train/grad_norm leapt; lower optimizer.lr to a third or a tenth, "
    "and start anew"
)

RULES = (
    Rule(
        "divergence",
        (Condition("train/kl", "reaches", 0.5), _FELL),
        3,
        "the policy has diverged: train/kl came to {most:.3g} nats a token, and the reward fell from "
        "{others[0][before]:.3g} to {others[0][now]:.3g}: the learning rate is too high",
        _LOWER,
        not_after="divergence",
    ),
    Rule(
        "divergence",
        (Condition("train/grad_norm", "leaps", 10.0), _FELL),
        3,
        "the policy has diverged: the gradient's norm came to {most:.3g}, and the reward fell from "
        "{others[0][before]:.3g} to {others[0][now]:.3g}: the learning rate is too high",
        _LOWER,
        not_after="divergence",
    ),
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
        "with level=sequence also the length of responses (docs/howto/correct_mismatch.md)",
    ),
    Rule(
        "no signal",
        (Condition("reward/groups_with_signal", "below", 0.1),),
        5,
        "nearly all groups are solved or failed: {now:.0%} have responses with different rewards",
        "reward/mean: where it is high, take harder prompts, where it is low, easier ones; or more responses "
        "(rollout.n), or a recipe with a filter",
        not_after="divergence",
    ),
    Rule(
        "dead reward component",
        (Condition("reward/<component>", "constant"),),
        10,
        "the reward component {name} gave {now:.3g} on average in each of the last {steps} steps",
        "the component's values in the responses (report, Samples), and its errors (reward/errors)",
    ),
    Rule(
        "never right",
        (Condition("eval/avg@n", "above", 0.0), Condition("eval/pass@1", "below", 1e-9)),
        2,
        "no sample of the last {steps} evaluations was right, and their mean score is {now:.3g}",
        "the scores that the first reward component can give: a sample is right from eval.right_at on, and "
        "checkpoint.keep_best cannot choose by pass@1 where none is",
    ),
    Rule(
        "slow server",
        (Condition("server/<server>/relative_time", "above", 2.0),),
        3,
        "the server {name} takes {now:.1f} times as long for a token as the others",
        "its machine: another process on its GPU, its clocks and heat, its log in OUTPUT_DIR",
    ),
)
