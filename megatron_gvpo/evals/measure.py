"""Measures the policy on one named evaluation, with lm-eval's prompts and scores."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.evals.catalog import NamedEvaluation
from megatron_gvpo.evals.definitions import read_definition, task_of
from megatron_gvpo.evals.documents import Documents

Number = float | None


@dataclass(frozen=True)
class Measured:
    """The result of one evaluation.

    `metrics` and `stderrs` by lm-eval's names, `METRIC,FILTER`: means over problems of the mean over a
    problem's `n` answers, and the standard errors of these means (None where there is none, such as for one
    problem, or for a metric that is not a mean over problems). `truncated`: the fraction of answers that hit
    the token limit. `task` and `version` are lm-eval's.
    """

    name: str
    task: str
    version: str
    lm_eval: str
    dataset: str
    problems: int
    n: int
    metric: str
    metrics: dict[str, float]
    stderrs: dict[str, Number]
    truncated: float

    def line(self) -> str:
        """Return a line with the metric, its standard error and the numbers of problems and answers."""
        error = self.stderrs[self.metric]
        name = self.metric.removesuffix(",none").removesuffix(",create_test").replace(",", " ")
        spread = "" if error is None else f" ± {error:.4f}"
        answers = "" if self.n == 1 else f", {self.n} answers each"
        cut = f", {self.truncated:.0%} of answers cut off" if self.truncated else ""
        value = f"{self.metrics[self.metric]:.4f}{spread}"
        return f"{self.name}: {name} {value} ({self.problems} problems{answers}{cut})"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    evaluation: NamedEvaluation,
    documents: Documents,
    lm: Any,
    *,
    chat: bool,
    n: int,
    system_prompt: str | None = None,
) -> tuple[Measured, list[dict[str, Any]]]:
    """The result, and a record of each problem: its prompt, and its answers with their scores.

    `lm`: an lm-eval LM; where `n` is above 1, its `turn` chooses the answers that are scored. Raises
    DataError, ConfigError, RolloutError.
    """
    import lm_eval

    lm_eval_name = str(read_definition(evaluation, chat)["task"])
    turns = []
    for turn in range(n):
        lm.turn = turn
        # The task is built again for each turn, because lm-eval keeps the answers in it.
        task = task_of(evaluation, documents, chat)
        turns.append(_scored(lm_eval_name, task, lm, chat, system_prompt))
    metrics, stderrs = _means([turn["results"][lm_eval_name] for turn in turns])
    if evaluation.metric not in metrics:
        raise DataError(f"{evaluation.name}: lm-eval gave no {evaluation.metric}, but {', '.join(metrics)}")
    samples = [turn["samples"][lm_eval_name] for turn in turns]
    if n > 1:
        stderrs = {name: _stderr(name, samples) for name in metrics}
    reasons = [reason for answers in lm.sampled for _, reason in answers]
    result = Measured(
        name=evaluation.name,
        task=lm_eval_name,
        version=str(turns[0]["versions"][lm_eval_name]),
        lm_eval=lm_eval.__version__,
        dataset=evaluation.dataset,
        problems=len(lm.sampled),
        n=n,
        metric=evaluation.metric,
        metrics=metrics,
        stderrs=stderrs,
        truncated=fmean(reason == "length" for reason in reasons),
    )
    return result, _records(lm, samples)


def _scored(name: str, task: Any, lm: Any, chat: bool, system_prompt: str | None) -> dict[str, Any]:
    """lm-eval's results for one answer to each problem."""
    from lm_eval.evaluator import evaluate

    with redirect_stderr(io.StringIO()):
        results: dict[str, Any] = evaluate(
            lm=lm,
            task_dict={"tasks": {name: task}, "groups": {}},
            system_instruction=system_prompt if chat else None,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            confirm_run_unsafe_code=True,  # programs run in the sandbox
        )
    return results


def _means(results: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, Number]]:
    """The metrics' means over the turns, and lm-eval's standard errors of the first."""
    names = [name for name in results[0] if "," in name and "_stderr," not in name]
    metrics = {name: fmean(float(result[name]) for result in results) for name in names}
    return metrics, {name: _number(results[0].get(name.replace(",", "_stderr,"))) for name in names}


def _number(value: Any) -> Number:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _stderr(name: str, samples: Sequence[Sequence[Mapping[str, Any]]]) -> Number:
    """The standard error of a mean over problems of means over their answers, `samples` by turn.

    A problem's answers are not independent of each other, so the error counts problems.
    """
    metric, _, chosen = name.partition(",")
    scores: dict[int, list[float]] = {}
    for sample in (sample for turn in samples for sample in turn if sample["filter"] == chosen):
        if not isinstance(sample[metric], int | float):
            return None
        scores.setdefault(sample["doc_id"], []).append(float(sample[metric]))
    means = [fmean(values) for values in scores.values()]
    return stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None


def _records(lm: Any, samples: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    records: dict[int, dict[str, Any]] = {}
    for turn, turn_samples in enumerate(samples):
        for sample in turn_samples:
            number = sample["doc_id"]
            record = records.setdefault(
                number, {"problem": number, "prompt": sample["arguments"][0][0], "answers": []}
            )
            if len(record["answers"]) <= turn:
                text, reason = lm.sampled[number][turn]
                record["answers"].append({"text": text, "finish_reason": reason, "scores": {}})
            scores = {f"{metric},{sample['filter']}": sample[metric] for metric in sample["metrics"]}
            record["answers"][turn]["scores"] |= scores
    return [records[number] for number in sorted(records)]
