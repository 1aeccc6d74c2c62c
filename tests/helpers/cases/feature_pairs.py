"""Rows of test_feature_pairs.py: the features of a run. Each pair of two features' values is in some row.

`MEANING` has the features that decide what a run computes, `MACHINE` those that must not change it. A value
is a tuple of overrides of tiny_run.py's configuration. Pairs that a run refuses are in `REFUSED`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

Row = dict[str, str]
Overrides = tuple[str, ...]

MEANING: dict[str, dict[str, Overrides]] = {
    # The embedded engine samples from the first two; `made` is the engine of pairs_worker.py.
    "model": {"tied": (), "sinks": (), "latent": ("rollout.engine=made",)},
    "method": {
        "gvpo": ("algorithm.reference_logprobs=engine", "train.mini_batches=2"),
        "gvpo_history": ("algorithm.recipe=gvpo_history",),
        "grpo, ema": (
            "algorithm.recipe=grpo",
            "algorithm.loss.reference={name: ema, decay: 0.5}",
            "algorithm.loss.kl_coef=0.3",
        ),
        "gspo, fixed": ("algorithm.recipe=gspo", "algorithm.loss.kl_coef=0.3"),
        "dapo": ("algorithm.recipe=dapo", "algorithm.batch_policy.max_rounds=2"),
        "ppo": ("algorithm.recipe=ppo", "algorithm.critic.lr=1.0e-2"),
        "gvpo_plus_plus": ("algorithm.recipe=gvpo_plus_plus", "teacher.path={teacher}"),
        "gpg": ("algorithm.recipe=gpg",),
        "reinforce_pp": ("algorithm.recipe=reinforce_pp",),
        "opd_full": ("algorithm.recipe=opd_full", "teacher.path={teacher}"),
    },
    "trained": {
        "all": (),
        "attention": ("model.adapter={rank: 4, targets: [o_proj]}",),
        "adapters": ("model.adapter={rank: 4, type: lora}",),
        "frozen": ("model.freeze=[embedding, decoder.layers.0]",),
    },
    "optimizer": {"adam": (), "muon": ("optimizer.muon={}",)},
    "updates": {
        "one": (),
        "two": ("train.mini_batches=2",),
        "four": ("train.mini_batches=2", "train.batch_epochs=2"),
    },
    "sampling": {"plain": (), "top_p": ("rollout.top_p=0.8", "rollout.temperature=0.9")},
    "shaper": {"none": (), "mask_truncated": ("algorithm.shapers=[{name: mask_truncated}]",)},
}
MACHINE: dict[str, dict[str, Overrides]] = {
    "layout": {
        "dp2": ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"),
        "tp2": ("parallel.tp=2", "parallel.sequence_parallel=true"),
        "pp2": ("parallel.pp=2",),
        "vpp2": ("parallel.pp=2", "parallel.vpp=2"),
        "cp2": ("parallel.cp=2",),
        "ep2": ("parallel.ep=2",),
        "tp2-pp2": ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.pp=2"),
        "dp2-cp2": (
            "parallel.cp=2",
            "parallel.overlap_grad_reduce=true",
            "parallel.overlap_param_gather=true",
        ),
        "tp2-ep2": ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=2"),
    },
    "packs": {"large": (), "small": ("train.max_tokens_per_micro_batch=48",)},
    "prompts": {"repeated": (), "shared": ("train.share_prompts=auto",)},
    "recompute": {
        "none": (),
        "selective": ("parallel.recompute=selective",),
        "full": ("parallel.recompute=full",),
    },
    # A run `moved` is resumed on one rank.
    "resume": {"none": (), "same": ("checkpoint.asynchronous=true", "checkpoint.every=1"), "moved": ()},
}
FEATURES = MEANING | MACHINE
REFUSED = {
    (("model", "tied"), ("layout", "ep2")),
    (("model", "tied"), ("layout", "tp2-ep2")),
    (("model", "sinks"), ("layout", "cp2")),
    (("model", "sinks"), ("layout", "dp2-cp2")),
    (("method", "gvpo_plus_plus"), ("layout", "ep2")),
    (("method", "gvpo_plus_plus"), ("layout", "tp2-ep2")),
    (("method", "opd_full"), ("layout", "ep2")),
    (("method", "opd_full"), ("layout", "tp2-ep2")),
    (("method", "opd_full"), ("sampling", "top_p")),
}
COMMON = (
    "train.steps=2",
    "train.max_tokens_per_micro_batch=4096",
    "train.share_prompts=false",
    "optimizer.lr=1.0e-2",
    "optimizer.eps=1.0e-3",  # with the usual one, Adam's first step would be the sign of a rounding error
    "optimizer.clip_grad=0.5",
    "optimizer.weight_decay=0.1",
    "data.eval=null",
    "logging.rollouts.every=0",
    "logging.steps.max_gb=0",
    "logging.progress=off",
)
QUICK = (2, 3)  # numbers of rows; the others are proofs
# The largest relative difference of metrics. In row 54 the updates amplify rounding errors of fp32: the plain
# run itself, from weights that differ by 1.2e-7 of their values, ends with a loss that differs by up to
# 3.3e-3.
METRICS = {54: 5e-3}
OF_METRICS = 2e-4  # the largest relative difference in the other rows


def overrides(row: Row, teacher: Path, is_plain: bool = False) -> Overrides:
    """A row's overrides; with `is_plain`, those of the features of MACHINE are left out."""
    features = MEANING if is_plain else FEATURES
    words = [word for name, values in features.items() for word in values[row[name]]]
    return (*COMMON, *(word.replace("{teacher}", str(teacher)) for word in words))


def ranks_of(row: Row) -> int:
    return 4 if "-" in row["layout"] else 2


def name_of(row: Row) -> str:
    return " ".join(row.values())


def pairs_of(row: Row) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    return combinations(row.items(), 2)  # type: ignore[return-value]


def every_pair() -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """All pairs of values of two features, in the features' order, except those that a run refuses."""
    pairs = {
        ((a, x), (b, y)) for a, b in combinations(FEATURES, 2) for x, y in product(FEATURES[a], FEATURES[b])
    }
    return pairs - REFUSED


def covering_rows() -> list[Row]:
    """Rows that have all pairs: each begins with a missing one, and takes the values that add the most."""
    draw, open_pairs, rows = random.Random(0), every_pair(), list[Row]()
    while open_pairs:
        starts = draw.choices(sorted(open_pairs), k=15)
        tries = [_row_from(start, open_pairs, draw) for start in starts]
        best = max((row for row in tries if row), key=lambda row: len(open_pairs & set(pairs_of(row))))
        open_pairs -= set(pairs_of(best))
        rows.append(best)
    return rows


def _row_from(
    start: tuple[tuple[str, str], tuple[str, str]],
    open_pairs: set[tuple[tuple[str, str], tuple[str, str]]],
    draw: random.Random,
) -> Row:
    """A row with the pair `start`; empty if no value of another feature goes with the row's values."""
    row = dict(start)
    others = [name for name in FEATURES if name not in row]
    draw.shuffle(others)
    for name in others:
        closes: dict[str, int] = {}
        for value in FEATURES[name]:
            longer = row | {name: value}
            pairs = set(pairs_of({key: longer[key] for key in FEATURES if key in longer}))
            if not pairs & REFUSED:
                closes[value] = len(pairs & open_pairs)
        if not closes:
            return {}
        most = max(closes.values())
        row[name] = draw.choice([value for value, count in closes.items() if count == most])
    return {name: row[name] for name in FEATURES}
