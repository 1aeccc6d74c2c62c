"""Finds alerts in the metrics of a run, step by step. The same metrics always give the same alerts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from megatron_gvpo.core.metric_names import own_names
from megatron_gvpo.core.plain_values import finite_number
from megatron_gvpo.observe.alerts.rules import RULES, Condition, Rule


class Alert(NamedTuple):
    step: int
    rule: str
    message: str
    advice: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}. Look at {self.advice}."


class Finder:
    """Remembers the metrics of a run and finds the problems that the rules describe."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)  # recent values by metric
        self._since: dict[tuple[str, str], int] = {}  # (rule, metric) -> calls since the rule became true
        self._raised = set[str]()  # rules that have raised an alert
        self._patterns = {c.metric: _pattern(c.metric) for rule in RULES for c in rule.conditions}

    def update(self, step: int, metrics: Mapping[str, Any]) -> list[Alert]:
        """Add the metrics of a step; returns the alerts that it gives. NaN and infinity are left out."""
        for name, value in metrics.items():
            if (number := finite_number(value)) is not None:
                self._values[name].append(number)
        alerts = []
        for rule in RULES:
            pattern = self._patterns[rule.conditions[0].metric]
            for name in filter(pattern.fullmatch, metrics):
                if not self._holds(rule, name):
                    if (key := (rule.name, name)) in self._since:
                        self._since[key] += 1
                elif self._is_new(rule, name) and not self._follows(rule):
                    self._raised.add(rule.name)
                    alerts.append(self._alert(rule, name, step))
        return alerts

    def _is_new(self, rule: Rule, name: str) -> bool:
        """True unless the rule held for this metric in the last `steps` steps."""
        since = self._since.get((rule.name, name))
        self._since[rule.name, name] = 0
        return since is None or since > rule.steps

    def _follows(self, rule: Rule) -> bool:
        """True if an earlier alert already explains this one."""
        return rule.not_after in self._raised

    def _holds(self, rule: Rule, name: str) -> bool:
        first, *others = rule.conditions
        return self._is(first, name, rule.steps) and all(self._is(c, c.metric, rule.steps) for c in others)

    def _is(self, condition: Condition, name: str, steps: int) -> bool:
        values = self._values[name]
        if condition.kind == "not_gained":
            return len(values) < 2 or 2 * (values[-1] - values[0]) <= max(values) - min(values)
        if len(values) < steps or (condition.kind in ("rises", "falls") and len(values) < 2 * steps):
            return False
        now, before = fmean(values[-steps:]), fmean(values[:steps])
        match condition.kind:
            case "above":
                return now > condition.value
            case "below":
                return now < condition.value
            case "rises":
                return now > condition.value * before > 0
            case "falls":
                return before > 0 and now < condition.value * before
            case "reaches":
                return max(values) > condition.value
            case "leaps":
                return max(values) > condition.value * values[0] > 0
            case "constant":
                return len(set(values[-steps:])) == 1

    def _alert(self, rule: Rule, name: str, step: int) -> Alert:
        first, *others = (
            self._numbers(n, rule.steps) for n in (name, *(c.metric for c in rule.conditions[1:]))
        )
        stands = self._patterns[rule.conditions[0].metric].fullmatch(name)
        named = stands[1] if stands is not None and stands.groups() else name
        message = rule.message.format(**first, others=others, name=named, steps=rule.steps)
        return Alert(step, rule.name, message, rule.advice)

    def _numbers(self, name: str, steps: int) -> dict[str, float]:
        """The numbers of a metric that a rule's message may contain; empty if the metric has no value."""
        if not (values := self._values[name]):
            return {}
        return {"now": fmean(values[-steps:]), "before": fmean(values[:steps]), "most": max(values)}


def alerts_of(records: Iterable[Mapping[str, Any]]) -> list[Alert]:
    """The alerts of a run, from the lines of its metrics.jsonl."""
    finder = Finder()
    return [alert for record in records for alert in finder.update(record["step"], _metrics(record))]


def _metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "step"}


def _pattern(metric: str) -> re.Pattern[str]:
    """A regular expression for the names that `metric` stands for, without the package's own."""
    parts = re.split(r"<[^>]+>", metric)
    own = "|".join(sorted(own_names(metric))) if metric.endswith(">") else ""
    between = rf"((?!(?:{own})$)[^/]+)" if own else r"([^/]+)"
    return re.compile(between.join(map(re.escape, parts)))
