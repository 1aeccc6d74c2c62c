"""Checks a run after its faults: no group is lost, counted twice or from old weights; numbers are equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.tiny_run import records, weights

from lib.chaos.job import ChaosError, Job, ledger_of

PROMPTS, RESPONSES = 4, 4  # prompts of a step, and responses of a prompt
STALE = 2e-3  # largest difference of the engine's and the trainer's log-probs; an update changes them more


def check(job: Job, ledger: Path, reference: Path | None, order: Sequence[list[str]]) -> int:
    """Check a finished job; returns the responses that it trained on. Raises ChaosError.

    `reference`: the output of an undisturbed run, which must be equal in every metric but times, and in every
    bit of the weights. `order`: the prompts of each step in an undisturbed run.
    """
    metrics = records(job.out)
    if [record["step"] for record in metrics] != list(range(job.steps + 1)):
        raise ChaosError(f"metrics.jsonl has the steps {[record['step'] for record in metrics]}")
    history = final_history(ledger_of(ledger))
    if sorted(history) != list(range(1, job.steps + 1)):
        raise ChaosError(f"the judge was asked about the steps {sorted(history)}")
    for step, groups in history.items():
        _check_step(step, groups, order[step - 1], metrics[step])
    if reference is not None:
        _check_equal(job.out, reference)
    return sum(len(group["responses"]) for groups in history.values() for group in groups)


def final_history(entries: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The groups of every step, from the last process that asked the judge about the step.

    A process that was started again repeats the steps after its checkpoint, and the repeated steps replace
    the earlier ones.
    """
    history: dict[int, list[dict[str, Any]]] = {}
    for entry in entries:
        versions = {response["version"] for response in entry["responses"]}
        if len(versions) != 1:
            raise ChaosError(f"the group of prompt {entry['prompt']} was sampled from weights {versions}")
        step = versions.pop() + 1
        groups = history.setdefault(step, [])
        if groups and groups[0]["process"] != entry["process"]:
            groups.clear()
        groups.append(entry)
    return history


def _check_step(step: int, groups: list[dict[str, Any]], prompts: list[str], record: dict[str, Any]) -> None:
    """Check that every group was counted once, is complete and current, and is in the step's record."""
    trained = [group["prompt"] for group in groups]
    if trained != prompts:
        raise ChaosError(f"step {step} trained on the prompts {trained}, and not {prompts}")
    responses = [response for group in groups for response in group["responses"]]
    for group in groups:
        if len(group["responses"]) != RESPONSES:
            raise ChaosError(f"step {step}: {len(group['responses'])} responses to prompt {group['prompt']}")
    for response in responses:
        is_complete = response["finish"] in ("stop", "length") and response["tokens"]
        if not is_complete or len(response["tokens"]) != response["logprobs"] or response["spans"] > 1:
            raise ChaosError(f"step {step}: an incomplete response: {response}")
        if response["errors"]:
            raise ChaosError(f"step {step}: a reward failed: {response['errors']}")
    rewards = [reward for group in groups for reward in group["rewards"]]
    mean = sum(rewards) / len(rewards)
    if not math.isclose(mean, record["reward/mean"], rel_tol=1e-6):
        raise ChaosError(f"step {step} recorded the mean reward {record['reward/mean']}, and it had {mean}")
    if record["mismatch/abs_max"] > STALE:
        raise ChaosError(f"step {step}: log-probs differ by {record['mismatch/abs_max']}: stale weights")


def _check_equal(out: Path, reference: Path) -> None:
    for own, expected in zip(records(out), records(reference), strict=True):
        if own != expected:
            names = sorted(name for name in {*own, *expected} if own.get(name) != expected.get(name))
            values = [(name, own.get(name), expected.get(name)) for name in names[:3]]
            raise ChaosError(f"step {own['step']} differs from the undisturbed run: {values}")
    tensors, others = weights(out), weights(reference)
    different = [name for name in others if name not in tensors or not tensors[name].equal(others[name])]
    if different or len(tensors) != len(others):
        raise ChaosError(f"the weights differ from the undisturbed run's: {different[:3]}")
