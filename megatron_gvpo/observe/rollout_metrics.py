"""Metrics of responses, of training and of evaluations: rewards, lengths, staleness, pass@k, maj@n.

pass@k follows from the number of correct samples.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median_low
from urllib.parse import urlsplit

import numpy as np

from megatron_gvpo.data.final_answer import final_answer
from megatron_gvpo.groups import Group, Rollout
from megatron_gvpo.settings.rewards import RewardConfig
from megatron_gvpo.supports import Support


def rollout_statistics(
    groups: Sequence[Group], version: int, compares_rewards: bool = True, selects_right: bool = False
) -> dict[str, float]:
    """Return means over all responses of the batch; `version`: weights of the policy that they will train.

    Metrics that say nothing of a method are left out, because alerts judge by them: the share of groups with
    different rewards, unless it `compares_rewards`, and a component that is the same for all responses, where
    it `selects_right` ones.

    Staleness is the number of steps since the oldest weights that sampled a part of the response.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sampled = [rollout for rollout in rollouts if rollout.source == "policy" and rollout.weight_version >= 0]
    staleness = [version - rollout.weight_version for rollout in sampled] or [0]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    statistics = {
        "reward/mean": fmean(rollout.reward for rollout in rollouts),
        "reward/errors": float(sum(bool(rollout.reward_errors) for rollout in rollouts)),
        "response/length": fmean(lengths),
        "response/truncated": fmean(rollout.finish_reason == "length" for rollout in rollouts),
        "response/weight_version": fmean(rollout.weight_version for rollout in sampled or rollouts),
        "response/staleness": fmean(staleness),
        "response/staleness_max": float(max(staleness)),
        "response/carried": fmean(len(rollout.spans) > 1 for rollout in rollouts),
        "response/from_policy": len(sampled) / len(rollouts),
    }
    if compares_rewards and not selects_right:
        statistics["reward/groups_with_signal"] = fmean(len(set(group.rewards)) > 1 for group in groups)
    for name in sorted({name for rollout in rollouts for name in rollout.rewards}):
        scored = [rollout.rewards[name] for rollout in rollouts if name in rollout.rewards]
        if len(set(scored)) > 1 or not selects_right:
            statistics[f"reward/{name}"] = fmean(scored)
    if (correlation := _length_correlation(groups)) is not None:
        statistics["reward/length_correlation"] = correlation
    logprobs = [logprob for rollout in sampled for logprob in rollout.logprobs]
    if logprobs:
        statistics["response/entropy"] = -math.fsum(logprobs) / len(logprobs)
    statistics |= _support_statistics(sampled)
    return statistics | _server_times(sampled) | _conversation_statistics(rollouts)


def _length_correlation(groups: Sequence[Group]) -> float | None:
    """Pearson's correlation of reward and length, without their groups' means; None if one is constant."""
    pairs = []
    for group in groups:
        lengths = [len(rollout.token_ids) for rollout in group.rollouts]
        reward, length = fmean(group.rewards), fmean(lengths)
        pairs += [(r - reward, n - length) for r, n in zip(group.rewards, lengths, strict=True)]
    scale = math.sqrt(math.fsum(r * r for r, _ in pairs) * math.fsum(n * n for _, n in pairs))
    return math.fsum(r * n for r, n in pairs) / scale if scale > 1e-12 else None


def _support_statistics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the mean size of tokens' supports, and the share of one; empty where none was truncated."""
    counts = [Support(*rollout.support).arrays[0] for rollout in rollouts if rollout.support is not None]
    sizes = np.concatenate(counts) if counts else np.zeros(0)
    if not (sizes := sizes[sizes > 0]).size:
        return {}
    return {
        "response/support_size": float(sizes.mean()),
        "response/support_of_one": float((sizes == 1).mean()),
    }


def _server_times(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Mean tokens a second of a response; seconds a token of each server, divided by the median server's.

    Empty where no server sampled the responses.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    tokens: defaultdict[str, int] = defaultdict(int)
    for rollout in rollouts:
        if rollout.server is not None and rollout.seconds is not None:
            seconds[rollout.server] += rollout.seconds
            tokens[rollout.server] += len(rollout.token_ids)
    rates = {server: seconds[server] / tokens[server] for server in sorted(seconds) if tokens[server]}
    spent = math.fsum(seconds.values())
    speed = {"throughput/response_tokens_per_s": sum(tokens.values()) / spent} if spent > 0 else {}
    middle = median_low(rates.values()) if len(rates) > 1 else 0.0
    if middle <= 0:
        return speed
    return speed | {
        f"server/{urlsplit(s).netloc or s}/relative_time": rate / middle for s, rate in rates.items()
    }


def _conversation_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return means over the conversations of the batch; empty without any."""
    talks = [rollout for rollout in rollouts if rollout.turns]
    if not talks:
        return {}
    statistics = {"env/turns": fmean(len(rollout.turns) for rollout in talks)}
    for name in sorted({name for rollout in talks for name in rollout.counts}):
        statistics[f"env/{name}"] = fmean(rollout.counts.get(name, 0.0) for rollout in talks)
    return statistics


def trained_tokens(groups: Sequence[Group]) -> int:
    """Return the number of prompt and response tokens that go through the model in training.

    In a conversation, the environment's tokens also go through the model.
    """
    return sum(
        len(group.prompt.token_ids) + len(rollout.token_ids) + sum(len(turn.given) for turn in rollout.turns)
        for group in groups
        for rollout in group.rollouts
    )


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is correct), given that c of n samples are correct.

    The estimate is `1 - C(n-c, k) / C(n, k)`, computed as a product of factors in [0, 1] (Chen et al. 2021,
    equation 1 and figure 3). Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of n={n} samples with c={c} correct: needs 1 <= k <= n and 0 <= c <= n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def is_correct(score: float, right_at: float) -> bool:
    """Returns True if the score of a rollout reaches `right_at`, up to rounding."""
    return score >= right_at - 1e-6 * max(1.0, abs(right_at))


def summarise(
    groups: Sequence[Group], k: Sequence[int], right_at: float = 1.0, judge: RewardConfig | None = None
) -> dict[str, float]:
    """Computes an evaluation's metrics. Each is a mean over prompts, so groups of any size weigh the same.

    - eval/pass@1 and eval/pass@k for every k: unbiased estimate from the numbers of correct responses;
    - eval/all@k for every k above 1: the same for k responses that are all correct;
    - eval/avg@n: mean score, which equals pass@1 if all scores are 0 or 1;
    - eval/maj@n: fraction of prompts whose most frequent answer is correct;
    - eval/response_length: mean length in tokens;
    - eval/truncated: fraction of responses that hit the token limit;
    - eval/errors: fraction of responses with a failed reward, which counts as 0.

    `judge`: the first reward component, which tells where a response's answer is.

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
    answers = [[final_answer(rollout.text, judge) for rollout in group.rollouts] for group in groups]
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
