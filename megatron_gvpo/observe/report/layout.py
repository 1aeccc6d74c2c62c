"""The charts that the page shows at once, under questions; every other metric follows by its section."""

from __future__ import annotations

# A name that ends with * stands for all metrics that begin so, each with a chart of its own.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "Is it learning?": (
        *("reward/mean", "eval/pass@*", "reward/groups_with_signal"),
        *("response/length", "response/truncated", "train/loss"),
    ),
    "Is it stable?": (
        *("response/entropy", "train/entropy", "train/kl", "train/kl_ref"),
        *("mismatch/kl", "mismatch/abs_max", "train/grad_norm"),
    ),
    "What do the conversations do?": ("env/*",),
    "How fast is it?": ("time/step", "throughput/tokens_per_s", "response/staleness_max"),
}
