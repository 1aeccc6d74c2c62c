"""Every metric that a run can log, with its unit and meaning: the source of the metrics reference.

`<...>` in a name stands for what is between two slashes, such as a reward component's name. A test compares
this table with the names that the code writes and with those of a real run.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple


class Metric(NamedTuple):
    name: str
    unit: str
    meaning: str


OF_EVERY_LOSS = "Training, means over the step's updates"  # the trainer adds these to the metrics of a loss

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rewards": (
        Metric("reward/mean", "reward", "Mean reward of the step's responses, before shapers."),
        Metric("reward/<component>", "reward", "Mean of one reward component, without its weight."),
        Metric(
            "reward/groups_with_signal", "share", "Groups whose responses do not all have the same reward."
        ),
        Metric(
            "reward/length_correlation",
            "-1 to 1",
            "Correlation of a response's reward with its length, inside the groups.",
        ),
        Metric(
            "reward/errors", "responses", "Responses for which a reward component failed and counted as 0."
        ),
    ),
    "Reward models and judges": (
        Metric("reward/lost", "share", "Responses that left their groups because one could not score them."),
        Metric("reward/dropped_groups", "groups", "Groups that had fewer than two members left."),
        Metric("reward/served_s", "s", "Time until the last batch was scored, by other rewards, too."),
        Metric("reward/<component>/requests", "requests", "Requests to its servers since the run's start."),
        Metric("reward/<component>/failed_requests", "requests", "Those that failed, and were repeated."),
        Metric("reward/<component>/probe", "score", "Score of a fixed text, by which its model is known."),
        Metric(
            "reward/<component>/model_hash",
            "number",
            "First 8 hexadecimal digits of the hash of its checkpoint, which run.json has whole.",
        ),
        Metric(
            "reward/<component>/invalid", "answers", "Answers of a judge, so far, that were not verdicts."
        ),
    ),
    "Responses": (
        Metric("response/length", "tokens", "Mean length of the responses."),
        Metric(
            "response/entropy",
            "nats a token",
            "Estimate of the policy's entropy: the engine's mean negative log-prob of sampled tokens.",
        ),
        Metric(
            "response/support_size",
            "tokens",
            "Mean number of tokens that a token was sampled from, with top_p, top_k or min_p.",
        ),
        Metric("response/support_of_one", "share", "Tokens that had no alternative, with those."),
        Metric("response/truncated", "share", "Responses that were cut off at rollout.max_tokens."),
        Metric("response/from_policy", "share", "Responses that the policy itself sampled in this run."),
        Metric("response/weight_version", "steps", "Mean version of the weights that sampled the responses."),
        Metric("response/staleness", "steps", "Mean age of the oldest weights that took part in a response."),
        Metric("response/staleness_max", "steps", "The largest such age in the batch."),
        Metric(
            "response/carried", "share", "Responses that a weight push stopped and new weights continued."
        ),
    ),
    "Conversations (`rollout.conversation`)": (
        Metric("env/turns", "turns", "Mean number of the policy's turns in a conversation."),
        Metric(
            "env/<count>",
            "number",
            "Mean of a count: environment_reward, observation_tokens, observations_dropped, tool_calls, "
            "tool_errors, of programs overridden_calls and retried_calls, and those that replies have.",
        ),
        Metric("env/lost", "share", "Conversations that left their groups because their environment failed."),
        Metric("env/dropped_groups", "groups", "Groups that had fewer than two members left."),
    ),
    "Batches (`algorithm.batch_policy: accumulate`)": (
        Metric("batch/rounds", "rounds", "Rounds of sampling that the batch took."),
        Metric("batch/valid_groups", "groups", "Groups with a signal in the batch."),
        Metric("batch/dropped_groups", "groups", "Groups without a signal that were left out."),
        Metric("batch/gave_up", "0 or 1", "1 if the rounds ended before there were enough valid groups."),
    ),
    "Teacher": (
        Metric(
            "teacher/wait_s", "s", "Waited for its log-probs; without the time in which the trainer worked."
        ),
        Metric("teacher/tokens", "tokens", "Sent to it in the step, prompts included."),
        Metric("teacher/requests", "requests", "Requests to its servers since the run's start."),
        Metric("teacher/failed_requests", "requests", "Those that failed, and were repeated."),
        Metric(
            "teacher/excluded",
            "share",
            "Responses that a teacher with another tokenizer cannot score; they are not trained.",
        ),
        Metric(
            "teacher/excluded_<reason>",
            "share",
            "Those for one reason: empty, turns, special, bytes, tokens, prompt, text or long.",
        ),
        Metric(
            "teacher/joint",
            "share",
            "Scored responses whose first token has the prompt's last characters, too.",
        ),
        Metric("teacher/length_ratio", "ratio", "The teacher's tokens of scored responses to the policy's."),
    ),
    "Advantages, by estimator": (
        Metric("advantage/valid_fraction", "share", "group: responses in groups with different rewards."),
        Metric("advantage/age_alpha", "factor", "group: GPG's correction for groups without signal."),
        Metric("advantage/beta_a", "number", "bnpo: first parameter of the Beta distribution."),
        Metric("advantage/beta_b", "number", "bnpo: second parameter of the Beta distribution."),
        Metric("advantage/bonus", "reward", "confidence (CARE): mean bonus."),
        Metric("advantage/lambda_<component>", "factor", "lagrangian: the multiplier of a constraint."),
        Metric(
            "advantage/kl_in_reward", "nats a token", "gae: mean log-ratio to the reference in the reward."
        ),
        Metric(
            "advantage/explained_variance",
            "share",
            "gae: share of the returns' variance that the critic explains.",
        ),
        Metric("advantage/sub_agent_tokens", "share", "roles: tokens that sub-agents wrote."),
        Metric("advantage/zero_fraction", "share", "median: responses with advantage 0."),
        Metric("advantage/overflow", "share", "rank: tokens after the last item."),
        Metric("advantage/strata", "strata", "stratified: mean number of strata in a group."),
        Metric("advantage/branching", "share", "prefix_tree: tokens where the value changes."),
        Metric(
            "advantage/trust_in_group", "share", "shrunk: mean weight of the group's mean against the prior."
        ),
        Metric("advantage/novelty", "advantage", "novelty: mean bonus."),
        Metric(
            "advantage/teacher_kl",
            "nats a token",
            "distillation: mean of log pi - log pi_teacher of the sampled tokens, an estimate of KL(pi || "
            "pi_teacher).",
        ),
    ),
    OF_EVERY_LOSS: (
        Metric("train/loss", "loss", "The loss. Its scale depends on the method."),
        Metric("train/grad_norm", "norm", "Norm of the gradient before clipping."),
        Metric("train/lr", "rate", "Learning rate of the last update."),
        Metric("train/skipped", "updates", "Number of those skipped because the gradient was not finite."),
        Metric("train/entropy", "nats a token", "Mean entropy; only with loss.entropy_coef."),
        Metric("train/divergence", "nats a token", "Mean of loss.divergence before the update."),
        Metric("train/value", "reward", "Critic: mean value."),
        Metric("train/value_loss", "loss", "Critic: its loss."),
        Metric("train/value_clip_fraction", "share", "Critic: tokens whose clipped error counts."),
        Metric("train/value_grad_norm", "norm", "Critic: norm of its gradient."),
        Metric(
            "train/value_skipped", "share", "Critic: updates skipped because the gradient was not finite."
        ),
    ),
    "Training, by loss": (
        Metric(
            "train/kl",
            "nats a token",
            "k3 estimate of the KL from the policy at step start (gvpo: from its reference).",
        ),
        Metric("train/kl_ref", "nats a token", "k3 estimate of the KL to the reference policy, in the loss."),
        Metric("train/kl_step", "nats a token", "disco: KL from the policy at step start."),
        Metric("train/clip_fraction", "share", "ppo, cispo: tokens whose ratio was clipped."),
        Metric("train/importance", "factor", "Mean weight of a token by loss.importance."),
        Metric("train/importance_square", "factor²", "Mean square of these weights."),
        Metric(
            "train/importance_ess",
            "share",
            "Effective sample size as a share of the tokens: squared mean over mean square.",
        ),
        Metric(
            "train/importance_truncated", "share", "Tokens whose ratio is above the cap of loss.importance."
        ),
        Metric("train/importance_masked", "share", "Tokens that loss.importance drops."),
        Metric("train/importance_masked_responses", "share", "Responses that it drops whole."),
        Metric("train/reward_variance", "reward²", "gvpo: variance of the rewards within groups."),
        Metric(
            "train/residual_variance", "reward²", "gvpo: variance that the implicit rewards do not explain."
        ),
        Metric(
            "train/weighted_ratio_variance",
            "nat²",
            "gvpo_plus_plus: variance within groups of the weighted log-ratios of policy and teacher.",
        ),
        Metric(
            "train/log_ratio",
            "nat",
            "gvpo_plus_plus: mean log-ratio of policy and teacher a token; on own samples an estimate of KL.",
        ),
        Metric("train/residual", "advantage²", "reg_grpo: mean squared residual."),
        Metric("train/gap", "score", "disco: score of right responses minus pooled score of wrong ones."),
        Metric(
            "train/preferred", "share", "dpo: pairs whose better response has the higher implicit reward."
        ),
        Metric("train/margin", "nats", "dpo: mean beta times the difference of the log-ratios."),
        Metric("train/<metric>", "its own", "A metric that your own loss returns."),
    ),
    "Engine against trainer": (
        Metric(
            "mismatch/abs_mean",
            "nats a token",
            "Mean absolute difference of their log-probs of the same tokens.",
        ),
        Metric("mismatch/abs_max", "nats", "The largest such difference."),
        Metric("mismatch/kl", "nats a token", "k3 estimate of KL(engine || trainer)."),
        Metric("mismatch/gap", "nats a token", "Mean of trainer minus engine."),
        Metric("mismatch/slope", "nats a token", "Slope of the sums over a response against its length."),
        Metric(
            "mismatch/residual_slope", "nats a token", "The slope that is left when the gap is subtracted."
        ),
        Metric("mismatch/tokens", "tokens", "Tokens that were compared."),
    ),
    "Evaluation, means over the held-out prompts": (
        Metric(
            "eval/pass@<k>",
            "share",
            "Unbiased estimate that one of k samples is right: its score is eval.right_at or more.",
        ),
        Metric("eval/all@<k>", "share", "Unbiased estimate that all of k samples are right (k > 1)."),
        Metric("eval/avg@n", "score", "Mean score of the n samples, which is their first reward component."),
        Metric(
            "eval/maj@n",
            "share",
            "Prompts whose most frequent answer is right; as texts: 1/2 and 0.5 are two answers.",
        ),
        Metric("eval/response_length", "tokens", "Mean length of the samples."),
        Metric("eval/truncated", "share", "Samples that were cut off at eval.sampling.max_tokens."),
        Metric("eval/errors", "share", "Samples for which a reward failed and counted as 0."),
        Metric(
            "eval/lost",
            "share",
            "Samples that the other metrics leave out, lost to environments, reward models or judges, or "
            "with a prompt that lost too many.",
        ),
    ),
    "Time of a step": (
        Metric("time/step", "s", "The whole step, without evaluation and checkpoint."),
        Metric("time/rollout", "s", "Waiting for responses."),
        Metric("time/reward", "s", "Waiting for rewards and shapers."),
        Metric("time/scoring", "s", "Log-probs of reference policies, values of the critic."),
        Metric("time/training", "s", "Forward, backward and optimizer."),
        Metric("time/sync", "s", "New weights to the rollout engine."),
        Metric(
            "throughput/tokens_per_s", "tokens/s", "Prompt and response tokens of the batch over time/step."
        ),
        Metric(
            "throughput/response_tokens_per_s",
            "tokens/s",
            "Servers: response tokens over the sum of the seconds that each response took.",
        ),
    ),
    "Speculative rollouts (`rollout.speculation`), since the last batch of responses": (
        Metric("speculation/acceptance", "share", "Drafted tokens that the policy accepted."),
        Metric(
            "speculation/length",
            "tokens",
            "Tokens that a verification gives: those accepted, and one of the policy's own.",
        ),
    ),
    "Rollout servers": (
        Metric(
            "server/prefix_cache_hits",
            "share",
            "Prompt tokens that the servers had in their prefix caches, since the last batch of responses. "
            "Every turn of a conversation is a request whose prompt is all that was before it.",
        ),
        Metric(
            "server/<server>/relative_time",
            "factor",
            "Of several servers: seconds a response token takes on this one, relative to the median one.",
        ),
    ),
    "Weight pushes to servers": (
        Metric(
            "sync/bytes", "bytes", "Bytes sent to each server; sharded: bytes that the trainer's ranks sent."
        ),
        Metric("sync/gb_per_s", "GB/s", "Those bytes over the seconds of the whole push."),
        Metric("sync/wire_s", "s", "Until the servers had the bytes, before they loaded them."),
        Metric("sync/most_sent", "bytes", "sharded: bytes that the busiest trainer rank sent."),
        Metric("sync/changed", "share", "delta: elements that changed."),
        Metric("sync/ipc", "share", "shared: servers that mapped the trainer's GPU memory."),
    ),
    "Head (output layer)": (
        Metric("head/known", "share", "Tokens whose weights were known before the forward: one pass."),
        Metric("head/stash", "share", "Tokens whose exponentials were kept for the backward: one pass."),
        Metric("head/stash_mb", "MiB", "Memory that a rank kept for a micro-batch, mean over tokens."),
    ),
    "Memory of the first update, on the rank with the highest peak": (
        Metric("memory/weights_gib", "GiB", "Weights; in FP8 with their scales."),
        Metric("memory/gradients_gib", "GiB", "Gradients."),
        Metric("memory/optimizer_gib", "GiB", "Master weights and moments."),
        Metric("memory/activations_gib", "GiB", "Peak outside the head, above what is always there."),
        Metric("memory/head_gib", "GiB", "The head's own peak."),
        Metric("memory/peak_gib", "GiB", "The peak of all memory."),
        Metric("memory/host_optimizer_gib", "GiB", "Optimizer states in host memory; no part of the peak."),
    ),
    "GPUs between two steps; `device/node<j>/gpu<i>/...` with several machines": (
        Metric("device/gpu<i>/utilization", "share", "Share of time in which a kernel ran, mean."),
        Metric("device/gpu<i>/memory_gib", "GiB", "Memory in use, the highest."),
        Metric("device/gpu<i>/power_w", "W", "Power, mean."),
        Metric("device/gpu<i>/temperature_c", "°C", "Temperature, the highest."),
        Metric("device/gpu<i>/sm_mhz", "MHz", "Clock of the processors, mean."),
        Metric("device/gpu<i>/memory_mhz", "MHz", "Clock of the memory, mean."),
        Metric(
            "device/gpu<i>/ecc_errors", "errors", "Uncorrected memory errors since the driver was loaded."
        ),
        Metric("device/gpu<i>/slowed_by_power", "share", "Time in which power limits held the clocks down."),
        Metric("device/gpu<i>/slowed_by_heat", "share", "Time in which heat held the clocks down."),
        Metric(
            "device/gpu<i>/slowed_by_hardware", "share", "Time in which the hardware held the clocks down."
        ),
    ),
}


LONGEST = 64  # characters of a user's name for a metric


def check_key(name: str, taken: Collection[str]) -> None:
    """Raises ValueError for a name in a configuration that no metric can have, or that is `taken`."""
    if re.fullmatch(r"[^\W\d][\w.-]*", name) is None or len(name) > LONGEST:
        raise ValueError(
            f"the name {_shown(name)}: expected a letter or _, then letters, digits, _, - and ., at most "
            f"{LONGEST} together"
        )
    check_name(name, taken)


def check_name(name: str, taken: Collection[str]) -> None:
    """Raises ValueError for a name that the user's code gives to a metric, and that would hide another one.

    So does one that no table can show.
    """
    if not name.isprintable() or not 0 < len(name) <= LONGEST:
        raise ValueError(f"the name {_shown(name)}: expected 1 to {LONGEST} characters that can be printed")
    if name in taken:
        others = ", ".join(sorted({*taken} - {name}))
        raise ValueError(
            f"the name {name!r} is that of another metric, as are {others}: choose one of your own"
        )


def own_names(pattern: str, section: str | None = None) -> frozenset[str]:
    """The words in place of the `<...>` at the end of `pattern` in the package's own metrics, or a section's.

    `reward/<component>` has mean, for one.
    """
    beginning = pattern.partition("<")[0]
    sections = SECTIONS.values() if section is None else [SECTIONS[section]]
    names = (metric.name.removeprefix(beginning) for metrics in sections for metric in metrics)
    return frozenset(name for name in names if re.fullmatch(r"\w+", name))


def _shown(name: str) -> str:
    return repr(name if len(name) <= LONGEST else f"{name[:LONGEST]}...")


def entry(name: str) -> Metric | None:
    """The entry that describes a metric: the one of exactly this name, else the first whose pattern fits."""
    entries = [metric for metrics in SECTIONS.values() for metric in metrics]
    exact = [metric for metric in entries if metric.name == name]
    fitting = [metric for metric in entries if re.fullmatch(_pattern(metric.name), name)]
    return next(iter(exact + fitting), None)


def _pattern(name: str) -> str:
    parts = re.split(r"<[^>]+>", name.replace("device/", "device/<node>"))
    parts = [re.escape(part) for part in parts]
    if name.startswith("device/"):
        return parts[0] + r"(?:node\d+/)?" + r"\d+".join(parts[1:])
    return "[^/]+".join(parts)
