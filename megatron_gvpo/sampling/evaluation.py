"""Metrics of sampled responses to held-out prompts: pass@k, all@k, avg@n, maj@n, length and truncation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from megatron_gvpo.data.converters import boxed
from megatron_gvpo.groups import Group, Rollout
from megatron_gvpo.observe.rollout_metrics import is_correct, pass_at_k


def summarise(groups: Sequence[Group], k: Sequence[int], right_at: float = 1.0) -> dict[str, float]:
    """Computes an evaluation's metrics. Each is a mean over prompts, so groups of any size weigh the same.

    - eval/pass@1 and eval/pass@k for every k: unbiased estimate from the numbers of correct responses;
    - eval/all@k for every k above 1: the same for k responses that are all correct;
    - eval/avg@n: mean score, which equals pass@1 if all scores are 0 or 1;
    - eval/maj@n: fraction of prompts whose most frequent answer is correct;
    - eval/response_length: mean length in tokens;
    - eval/truncated: fraction of responses that hit the token limit;
    - eval/errors: fraction of responses with a failed reward, which counts as 0.

    The score of a rollout is its first reward component (the verifier comes first by convention), or its
    reward if it has no components. A rollout is correct if its score is `right_at` or more. Raises
    ValueError if there are no groups, or if a group is smaller than a k.
    """
    if not groups:
        raise ValueError("nothing to evaluate: there are no groups")
    scores = [[score(rollout) for rollout in group.rollouts] for group in groups]
    correct = [[is_correct(score(rollout), right_at) for rollout in group.rollouts] for group in groups]
    metrics = {
        f"eval/pass@{i}": fmean(pass_at_k(len(c), sum(c), i) for c in correct) for i in sorted({1, *k})
    }
    metrics |= {f"eval/all@{i}": fmean(all_at_k(len(c), sum(c), i) for c in correct) for i in {*k} - {1}}
    answers = [[final_answer(rollout.text) for rollout in group.rollouts] for group in groups]
    metrics["eval/avg@n"] = fmean(map(fmean, scores))
    metrics["eval/maj@n"] = fmean(map(maj_at_n, answers, correct))
    metrics["eval/response_length"] = fmean(fmean(len(r.token_ids) for r in g.rollouts) for g in groups)
    metrics["eval/truncated"] = fmean(fmean(r.finish_reason == "length" for r in g.rollouts) for g in groups)
    metrics["eval/errors"] = fmean(fmean(bool(r.reward_errors) for r in g.rollouts) for g in groups)
    return metrics


def all_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(all of k samples are correct), given that c of n samples are correct.

    The estimate is `C(c, k) / C(n, k)`, as pass^k of tau-bench (arXiv 2406.12045). Raises ValueError unless
    1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"all@{k} of n={n} samples with c={c} correct: needs 1 <= k <= n and 0 <= c <= n")
    return math.prod(max(c - i, 0) / (n - i) for i in range(k))


def maj_at_n(answers: Sequence[str], correct: Sequence[bool]) -> bool:
    """Returns True if the most frequent answer is correct. In a tie, the answer that occurs first counts."""
    # Counter keeps the order of first occurrence, and max returns the first of equal counts.
    counts = Counter(answers)
    majority = max(counts, key=counts.__getitem__)
    return correct[answers.index(majority)]


def score(rollout: Rollout) -> float:
    """Returns the rollout's first reward component, or its reward if it has no components."""
    return next(iter(rollout.rewards.values()), rollout.reward)


def final_answer(text: str) -> str:
    r"""Returns the content of the last `\boxed{}`, or else the whole text, stripped."""
    answer = boxed(text)
    return text.strip() if answer is None else answer
