"""Runs the named evaluations one after another; if one fails, the others' results are kept."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.data.task import Task
from megatron_gvpo.evals.answers import Answers
from megatron_gvpo.evals.catalog import ChosenEvaluations, NamedEvaluation
from megatron_gvpo.evals.documents import Documents, Prepared
from megatron_gvpo.evals.measure import Measured, measure

log = logging.getLogger(__name__)
FOLDER = "evals"  # the folder in the output directory


@dataclass
class Outcomes:
    """The results, and for each evaluation that failed, the reason."""

    measured: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluatedPolicy:
    """The policy with its descriptions: `label` in the names of files, `about` in the results."""

    answers: Answers
    task: Task
    longest: int | None  # tokens of the longest prompt; None without a limit
    system_prompt: str | None
    label: str
    about: Mapping[str, Any]


def run_all(
    choice: ChosenEvaluations,
    prepared: Prepared,
    policy: EvaluatedPolicy,
    output_dir: str,
    tell: Callable[[str], None],
) -> Outcomes:
    """Measure the policy on all evaluations; `tell` gets a line of each as it ends. Raises RolloutError.

    Every result is written to `output_dir/evals` at once: LABEL-NAME.json, and LABEL-NAME.jsonl with a record
    of each problem.
    """
    outcomes = Outcomes()
    for evaluation in choice.evaluations:
        try:
            result, records = _measure(evaluation, prepared[evaluation.name], policy)
            _write(
                Path(output_dir, FOLDER), f"{policy.label}-{evaluation.name}", result, records, policy.about
            )
        except RolloutError:
            raise  # the engine has failed, so no rank can go on
        except Exception as error:  # lm-eval's functions may raise anything
            log.debug("%s failed", evaluation.name, exc_info=True)
            reason = " ".join(str(error).split()) or type(error).__name__
            outcomes.failed[evaluation.name] = reason.removeprefix(f"{evaluation.name}: ")
            tell(f"{evaluation.name}: failed: {outcomes.failed[evaluation.name]}")
        else:
            outcomes.measured.append(result)
            tell(result.line())
    return outcomes


def _measure(
    evaluation: NamedEvaluation, documents: Documents, policy: EvaluatedPolicy
) -> tuple[Measured, list[dict[str, Any]]]:
    from megatron_gvpo.evals.policy_lm import PolicyLM

    task = policy.task
    lm = PolicyLM(evaluation.name, policy.answers, task.tokenizer, task.chat, policy.longest)
    return measure(
        evaluation, documents, lm, chat=task.chat, n=policy.answers.n, system_prompt=policy.system_prompt
    )


def _write(
    folder: Path, name: str, result: Measured, records: list[dict[str, Any]], about: Mapping[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record, default=str) + "\n" for record in records)
    texts = {
        folder / f"{name}.jsonl": lines,
        folder / f"{name}.json": json.dumps({**result.as_json(), **about}, indent=2) + "\n",
    }
    asides = {file: file.with_name(file.name + ".tmp") for file in texts}
    try:
        for file, text in texts.items():  # a full disk leaves the earlier results as they are
            asides[file].write_text(text)
        for file, aside in asides.items():
            os.replace(aside, file)
    finally:
        for aside in asides.values():
            aside.unlink(missing_ok=True)
