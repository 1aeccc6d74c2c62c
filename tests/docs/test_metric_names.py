"""Every metric has an entry in core/metrics.txt, and every entry a metric."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_gvpo.core.metric_names import OF_EVERY_LOSS, SECTIONS, entry, own_names
from megatron_gvpo.observe import read_metrics

PACKAGE = Path(__file__).parents[2] / "megatron_gvpo"
PREFIXES = (
    *("reward", "response", "env", "batch", "advantage", "train", "mismatch"),
    *("eval", "time", "throughput", "sync", "head", "memory", "device", "server", "speculation", "teacher"),
)
# Blocks of these files and folders name their metrics relative to a prefix that the trainer adds.
RELATIVE = {
    "algorithms/losses": "train",
    "algorithms/importance": "train",
    "algorithms/advantages": "advantage",
    "algorithms/distillation.py": "advantage",
    "algorithms/curriculum": "batch",
    "observe/mismatch.py": "mismatch",
}
PUT_TOGETHER = {"memory/host_optimizer_gib", "train/entropy", "train/divergence", "server/a:1/relative_time"}
PUT_TOGETHER |= {"train/importance_ess", "teacher/excluded_bytes"}
PUT_TOGETHER |= {f"{kind}/{name}" for kind in ("env", "reward") for name in ("lost", "dropped_groups")}
SERVED = ("requests", "failed_requests", "probe", "model_hash", "invalid")  # of a reward model or a judge
CRITIC = {"value", "value_loss", "value_clip_fraction"}  # the critic's loss stands beside its estimator


def constant(node: ast.AST) -> str | None:
    """A string, with `1` where something is filled in, as in f"eval/pass@{k}"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(constant(part) or "1" for part in node.values)
    return None


def keys(node: ast.AST | None) -> list[str]:
    if isinstance(node, ast.DictComp):
        return [constant(node.key) or ""]
    if isinstance(node, ast.Dict):
        return [text for key in node.keys if key is not None and (text := constant(key))]
    return []


def names_metrics(target: ast.AST) -> bool:
    return getattr(target, "id", getattr(target, "attr", "")) == "metrics"


def relative_names(tree: ast.AST) -> Iterator[str]:
    """Keys of `metrics = {...}`, `metrics[...] = ...` and `return value, {...}`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            yield from keys(node.value.elts[-1])
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            flat = [t for target in targets for t in getattr(target, "elts", [target])]
            for target in flat:
                if names_metrics(target):
                    yield from keys(node.value)
                if isinstance(target, ast.Subscript) and names_metrics(target.value):
                    yield constant(target.slice) or ""


def written_names() -> set[str]:
    """Every metric name that the package's source writes."""
    metrics: set[str] = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        where, tree = file.relative_to(PACKAGE).as_posix(), ast.parse(file.read_text())
        for node in ast.walk(tree):
            text = constant(node) or ""
            if text.split("/")[0] in PREFIXES and re.fullmatch(r"\w+/[\w@]+", text):
                metrics.add(text)
            called = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "phase"
            if called and (phase := constant(node.args[0])):  # the timer's own calls have a variable
                metrics.add(f"time/{phase}")
        for folder, prefix in RELATIVE.items():
            if where.startswith(folder):
                names = {name for name in relative_names(tree) if name and "/" not in name}
                metrics |= {f"{'train' if name in CRITIC else prefix}/{name}" for name in names}
    # The trainer's own f"{prefix}/{name}", whose names the rules above find where they are given; and the
    # seconds of checkpoints, which are between two steps, so that summary.json alone has them.
    own = {f"{prefix}/1" for prefix in PREFIXES} | {"memory/1_gib", "eval/pass@", "eval/all@", "device/node"}
    return metrics - own - {"time/checkpoint"}


def described() -> list[str]:
    return [metric.name for metrics in SECTIONS.values() for metric in metrics]


def is_described(name: str) -> bool:
    """True if it has an entry of its own, and not only the one for what a user's loss returns."""
    metric = entry(name)
    return metric is not None and metric.name != "train/<metric>" and metric.name != "reward/<component>"


def test_the_source_was_read():
    """The rules find names of every kind."""
    kinds = {"train/clip_fraction", "advantage/lambda_1", "batch/rounds", "mismatch/residual_slope"}
    assert kinds | {"time/rollout", "eval/pass@1", "sync/ipc", "train/value_loss"} <= written_names()


def test_every_name_in_the_source_has_an_entry():
    assert [name for name in sorted(written_names()) if not is_described(name)] == []


def test_no_entry_is_stale():
    """Every entry describes a name in the source; those that are put together there are listed here."""
    import pynvml

    from megatron_gvpo.core import gpus

    sensors = {f"device/gpu0/{name}" for name in gpus._sensors(pynvml)}
    parts = {f"memory/{p}_gib" for p in ("weights", "gradients", "optimizer", "activations", "head", "peak")}
    critic = {"train/value_grad_norm", "train/value_skipped"}
    source = "".join(file.read_text() for file in (PACKAGE / "megatron").glob("*.py"))
    assert all(f'"{name.split("/")[1].removesuffix("_gib")}"' in source for name in parts | critic)
    served = "".join(file.read_text() for file in (PACKAGE / "rewards").glob("*.py"))
    assert all(f'"{name}"' in served for name in SERVED)
    put_together = sensors | parts | critic | PUT_TOGETHER | {f"reward/a/{name}" for name in SERVED}
    users = {"reward/<component>", "train/<metric>", "env/<count>"}
    covered = {metric.name for name in written_names() | put_together if (metric := entry(name))}
    assert [name for name in described() if name not in covered | users] == []


def test_names_of_the_package_itself_come_from_the_table():
    assert own_names("reward/<component>") == {
        *("mean", "errors", "groups_with_signal", "length_correlation", "lost", "dropped_groups", "served_s")
    }
    assert own_names("env/<count>") == {"turns", "lost", "dropped_groups"}
    assert {"loss", "lr", "entropy", "value_loss"} < own_names("train/<metric>", OF_EVERY_LOSS)
    assert "kl" in own_names("train/<metric>") - own_names("train/<metric>", OF_EVERY_LOSS)


def test_names_are_given_once():
    assert len(described()) == len(set(described()))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("device/gpu3/power_w", "device/gpu<i>/power_w"),
        ("device/node1/gpu3/power_w", "device/gpu<i>/power_w"),
        ("eval/pass@16", "eval/pass@<k>"),
        ("reward/mean", "reward/mean"),
        ("reward/brevity", "reward/<component>"),
        ("rewards/brevity", None),
    ],
)
def test_an_entry_is_found(name, meant):
    metric = entry(name)
    assert (metric.name if metric else None) == meant


def test_a_real_run_logs_nothing_else(finished: Path):
    records = read_metrics(finished / "metrics.jsonl")
    logged = {name for record in records for name in record} - {"step"}
    assert len(logged) > 30
    assert [name for name in sorted(logged) if entry(name) is None] == []
    # `variety` is the run's reward component; everything else has an entry of its own.
    assert [name for name in sorted(logged) if not is_described(name)] == ["reward/variety"]
