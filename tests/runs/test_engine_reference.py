"""Whole runs that watch for a mismatch, and whose reference is the engine's log-probs."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny_run import (
    ENGINE_REFERENCE,
    GVPO,
    SHORT,
    configure,
    fit,
    records,
)

from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.types import TrainBatch

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


def test_every_step_is_watched_for_a_mismatch(finished, caplog):
    """The embedded engine differs from the trainer by rounding only, and no warning appears."""
    for line in records(finished)[1:]:
        assert line["mismatch/tokens"] == pytest.approx(16 * line["response/length"])
        assert 0 < line["mismatch/abs_mean"] < 1e-5 and line["mismatch/kl"] < 1e-10
        assert abs(line["mismatch/slope"]) < 1e-5
    assert "not the one that is trained" not in caplog.text


def with_gap(monkeypatch, gap: float, versions_behind: int = 0) -> None:
    """Make an engine's log-probs too small by `gap` in every token, and its weights older."""
    from_groups = TrainBatch.from_groups

    def perturbed(*groups):
        rows = from_groups(*groups)
        return rows.with_columns(
            engine_logp_r=rows.engine_logp_r - gap, version_r=rows.version_r - versions_behind
        )

    monkeypatch.setattr(TrainBatch, "from_groups", staticmethod(perturbed))


def counted_scores(monkeypatch) -> list[int]:
    """A list that receives the number of rows of every scoring pass from now on."""
    scored, score = [], Policy.score

    def counting(self, rows):
        scored.append(len(rows))
        return score(self, rows)

    monkeypatch.setattr(Policy, "score", counting)
    return scored


@pytest.mark.parametrize("gap", [0.0, 0.25])
def test_the_engines_reference_trains_like_the_trainers_without_scoring(
    task, tmp_path, monkeypatch, caplog, gap
):
    """A constant gap in the engine's log-probs is removed, and reported."""
    fit(configure(task, tmp_path / "trainer", *GVPO, *SHORT))
    with_gap(monkeypatch, gap)
    scored = counted_scores(monkeypatch)
    fit(configure(task, tmp_path / "engine", *ENGINE_REFERENCE, *SHORT))
    assert scored == [], "no group is split here, so nothing needs a scoring pass"
    for engine, trainer in zip(
        records(tmp_path / "engine")[1:], records(tmp_path / "trainer")[1:], strict=True
    ):
        assert engine["train/kl"] > 0, "the second mini-batch looks back at step start"
        for name in ("reward/mean", "response/length", "train/loss", "train/kl", "train/grad_norm"):
            assert engine[name] == pytest.approx(trainer[name], rel=1e-3, abs=1e-5), name
        assert engine["mismatch/tokens"] < trainer["mismatch/tokens"], "only the first mini-batch is compared"
        assert engine["mismatch/gap"] == pytest.approx(gap, abs=1e-5)
        assert engine["mismatch/slope"] == pytest.approx(gap, abs=1e-5)
        assert engine["mismatch/residual_slope"] == pytest.approx(0, abs=1e-5)
    warnings = [r.message for r in caplog.records if "not the one that is trained" in r.message]
    assert len(warnings) == (gap > 0), "once a run"


def test_what_older_weights_sampled_has_them_as_its_reference(task, tmp_path, monkeypatch):
    """Then the first mini-batch also looks back, and does not measure the engine."""
    trained = []
    update = Policy.update

    def spy(self, rows, *, at_step_start, **options):
        trained.append((at_step_start, rows))
        return update(self, rows, at_step_start=at_step_start, **options)

    monkeypatch.setattr(Policy, "update", spy)
    with_gap(monkeypatch, 0.0, versions_behind=1)
    fit(configure(task, tmp_path, *ENGINE_REFERENCE, *SHORT, "train.steps=1", "optimizer.warmup_steps=0"))
    assert [first for first, _ in trained] == [True, False]
    for _, rows in trained:
        assert torch.equal(rows.ref_logp_r, rows.engine_logp_r)
    assert not any(name.startswith("mismatch/") for name in records(tmp_path)[-1])
