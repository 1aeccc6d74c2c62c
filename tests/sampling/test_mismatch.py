"""The mismatch watch against numpy, and the engine's log-probs as GVPO's reference against the exact one.

test_gradient_invariance.py covers real ranks, test_engine_reference.py whole runs.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers.inputs.rows import make_logp, make_rows, sequence_weights

from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.observe.mismatch import THRESHOLDS, MismatchWatch, mismatch
from megatron_gvpo.types import TrainBatch

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.5], [1.0, 0.0]]
LENGTHS = [3, 40, 12, 7, 25, 2, 60, 5, 18]


def sampled(seed: int = 0) -> TrainBatch:
    return make_rows(REWARDS, lengths=LENGTHS, seed=seed)


def watched(rows: TrainBatch, logp_r: torch.Tensor, version: int = 0) -> dict[str, float]:
    watch = MismatchWatch(1.0)
    watch.compare(rows, logp_r, version)
    return watch.take()


# --- the comparison ---------------------------------------------------------------------------------------


def test_metrics_are_those_of_numpy():
    rows, logp_r = sampled(), make_logp(sampled())
    metrics = watched(rows, logp_r)
    difference = logp_r.double().numpy() - rows.engine_logp_r.double().numpy()
    ratio = np.exp(difference)  # trainer over engine, on samples of the engine
    sums = [part.sum() for part in np.split(difference, rows.offsets[1:-1])]
    slope, _ = np.polyfit(LENGTHS, sums, 1)
    assert metrics == {
        "mismatch/abs_mean": pytest.approx(np.abs(difference).mean()),
        "mismatch/abs_max": pytest.approx(np.abs(difference).max()),
        "mismatch/kl": pytest.approx((ratio - 1 - np.log(ratio)).mean()),
        "mismatch/gap": pytest.approx(difference.mean()),
        "mismatch/tokens": sum(LENGTHS),
        "mismatch/slope": pytest.approx(slope),
        "mismatch/residual_slope": pytest.approx(slope - difference.mean()),
    }


def test_k3_is_the_divergence_in_expectation():
    """All tokens of a vocabulary are weighted by the engine's probabilities instead of sampled."""
    generator = torch.Generator().manual_seed(0)
    engine, trainer = torch.randn(2, 1000, generator=generator, dtype=torch.float64).log_softmax(-1)
    weighted = engine.exp() * (torch.expm1(trainer - engine) - (trainer - engine))
    exact = torch.nn.functional.kl_div(trainer, engine, log_target=True, reduction="sum")
    assert float(weighted.sum()) == pytest.approx(float(exact))
    drawn = torch.multinomial(engine.exp(), 200_000, replacement=True, generator=generator)
    metrics = mismatch((trainer - engine)[drawn], torch.tensor([200_000]))
    assert metrics["kl"] == pytest.approx(float(exact), rel=0.05)
    assert metrics["gap"] == pytest.approx(-float(exact), rel=0.05), "not 0: the samples are the engine's"


def test_comparisons_of_a_step_are_put_together():
    all_rows, logp_r = sampled(), make_logp(sampled())
    parts = MismatchWatch(1.0)
    for index in ([0, 1, 2, 3], [4, 5, 6], [7, 8]):
        tokens = [t for i in index for t in range(all_rows.offsets[i], all_rows.offsets[i + 1])]
        parts.compare(all_rows.select(index), logp_r[tokens], 0)
    assert parts.take() == pytest.approx(watched(all_rows, logp_r))
    assert parts.take() == {}


def test_only_tokens_of_the_present_weights_are_compared():
    rows, logp_r = sampled(), make_logp(sampled())
    version_r = torch.zeros(sum(LENGTHS), dtype=torch.int64)
    version_r[: rows.offsets[4]] = 7  # the first four responses, and the end of the seventh
    version_r[rows.offsets[6] + 20 : rows.offsets[7]] = 7
    metrics = watched(rows.with_columns(version_r=version_r), logp_r, version=7)
    current = version_r == 7
    difference = (logp_r - rows.engine_logp_r).double()[current]
    expected = mismatch(difference, torch.tensor([*LENGTHS[:4], 40]))
    assert metrics == pytest.approx({f"mismatch/{name}": value for name, value in expected.items()})
    assert watched(rows.with_columns(version_r=version_r), logp_r, version=8) == {}


def test_the_gap_moves_by_as_much_as_is_measured():
    rows, logp_r = sampled(), make_logp(sampled())
    difference_r = (logp_r - rows.engine_logp_r).double()
    version_r = torch.zeros(sum(LENGTHS), dtype=torch.int64)
    version_r[:43] = 1
    watch = MismatchWatch(1.0)
    watch.compare(rows, logp_r, 0)
    assert watch.gap == pytest.approx(float(difference_r.mean()))
    before = watch.gap
    mixed, total = rows.with_columns(version_r=version_r), len(version_r)
    watch.compare(mixed, logp_r, 1)
    assert watch.gap == pytest.approx((float(difference_r[:43].sum()) + (total - 43) * before) / total)
    before = watch.gap
    watch.compare(mixed, logp_r, 2)
    assert watch.gap == before, "nothing was measured"
    watch.compare(rows.with_columns(engine_logp_r=logp_r - torch.inf), logp_r, 0)
    assert watch.gap == before, "a damaged measurement does not outlive its step"


def test_a_resumed_run_corrects_by_the_gap_that_was_known():
    rows, logp_r = sampled(), make_logp(sampled())
    before, after = MismatchWatch(1.0), MismatchWatch(1.0)
    before.compare(rows, logp_r, 0)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert torch.equal(after.corrected(rows), before.corrected(rows)) and after.gap != 0
    after.load_state_dict({})  # of a version that did not keep it
    assert after.gap == 0


def test_equal_lengths_have_no_slope():
    metrics = mismatch(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), torch.tensor([2, 2]))
    assert "slope" not in metrics and "residual_slope" not in metrics and metrics["gap"] == 0.25


def test_rows_without_log_probs_are_ignored():
    rows = sampled().with_columns(engine_logp_r=None)
    assert watched(rows, make_logp(rows)) == {}


# --- the warning ------------------------------------------------------------------------------------------


def metrics_with(kl: float) -> dict[str, float]:
    return {"mismatch/kl": kl, "mismatch/abs_mean": 0.031, "mismatch/abs_max": 2.5}


def test_a_run_is_warned_once_and_again_only_when_it_got_much_worse():
    watch = MismatchWatch(1e-3)
    warned = [
        step
        for step, kl in enumerate([0.0, 5e-4, 2e-3, 2e-3, 1.9e-2, 2.1e-2, 0.1, 0.5, np.nan, np.nan])
        if watch.warning(step, metrics_with(kl))
    ]
    assert warned == [2, 5, 7, 8]
    assert watch.warning(10, {}) is None


def test_the_warning_says_what_how_much_and_why():
    text = MismatchWatch(1e-3).warning(12, metrics_with(5.4e-3))
    assert text.startswith("step 12: the policy that samples is not the one that is trained.")
    assert "0.031 (mean) and 2.5 (at most), a KL of 0.0054 nats a token" in text
    assert "rollout.mismatch_threshold=0.001" in text
    for cause in ("a push failed", "temperature", "FP8", "tokenizer", "mixture-of-experts"):
        assert cause in text


def test_thresholds_are_of_the_models_dtypes():
    from megatron_gvpo.settings.sections import ModelConfig

    assert set(THRESHOLDS) == set(ModelConfig.model_fields["dtype"].annotation.__args__)


# --- columns from rollouts --------------------------------------------------------------------------------


def group(*rollouts: Rollout) -> Group:
    return Group(Prompt("p", (1, 2), "1+1="), list(rollouts))


def test_rows_carry_the_engines_log_probs_and_versions():
    groups = [
        group(Rollout([5, 6], [-0.5, -0.25], "", "stop", 3), Rollout([7], [-1.5], "", "length", 4)),
        group(Rollout([8, 9, 10], [-1.0, -2.0, -4.0], "", "stop", 2, spans=[(2, 0, 1), (3, 1, 3)])),
    ]
    rows = TrainBatch.from_groups(groups)
    assert rows.engine_logp_r.dtype == torch.float32
    assert rows.engine_logp_r.tolist() == [-0.5, -0.25, -1.5, -1.0, -2.0, -4.0]
    assert rows.version_r.tolist() == [3, 3, 4, 2, 3, 3]
    assert rows.select([2, 1]).engine_logp_r.tolist() == [-1.0, -2.0, -4.0, -1.5]
    assert rows.sampled_by(4).tolist() == [False, False, True, False, False, False]


def test_log_probs_that_are_missing_or_do_not_match():
    good, none = Rollout([5, 6], [-0.5, -0.25], "", "stop"), Rollout([7], [], "", "stop")
    assert TrainBatch.from_groups([group(good, none)]).engine_logp_r is None
    empty = Rollout([], [], "", "abort")
    assert TrainBatch.from_groups([group(good, empty)]).engine_logp_r.tolist() == [-0.5, -0.25]
    short = Rollout([7, 8], [-1.0], "", "stop")
    with pytest.raises(ValueError, match=r"response 1 of the batch has 2 tokens, .* gave 1 log-probs"):
        TrainBatch.from_groups([group(good, short)])


# --- the engine's log-probs as the reference ----------------------------------------------------------------


def test_a_gap_biases_by_length_and_its_correction_removes_the_bias():
    """GVPO's weight is linear in the reference's sums: a gap g per token moves it by -beta^2 g (L - Lbar) /
    n.

    Other rows than the corrected ones measure the gap, as in a step.
    """
    gap, beta = 0.036, 0.1
    first, rows = sampled(0), sampled(1)
    exact_r = rows.ref_logp_r  # of the policy at step start, by the trainer
    rows = rows.with_columns(engine_logp_r=exact_r - gap)
    start_r = make_logp(first, seed=5)
    watch = MismatchWatch(1.0)
    watch.compare(first.with_columns(engine_logp_r=start_r - gap), start_r, 0)
    assert watch.gap == pytest.approx(gap, rel=1e-5)
    metrics = watch.take()
    assert metrics["mismatch/slope"] == pytest.approx(gap, rel=1e-5)
    assert metrics["mismatch/residual_slope"] == pytest.approx(0, abs=1e-6)

    loss, logp_r = GVPO(beta=beta), make_logp(rows, seed=6)
    exact_n = sequence_weights(loss, rows, logp_r)
    raw_n = sequence_weights(loss, rows.with_columns(ref_logp_r=rows.engine_logp_r), logp_r)
    corrected_n = sequence_weights(loss, rows.with_columns(ref_logp_r=watch.corrected(rows)), logp_r)

    length_n, index_n = rows.length_n.double(), rows.groups[0]
    k_n = torch.bincount(index_n)[index_n]
    bias_n = beta**2 * gap * (length_n - rows.group_mean(length_n)) / (k_n - 1) / len(REWARDS)
    torch.testing.assert_close((raw_n - exact_n).double(), bias_n, atol=1e-7, rtol=1e-3)
    torch.testing.assert_close(corrected_n, exact_n, atol=1e-7, rtol=0)
    assert bias_n.abs().max() > 1e-3


def test_noise_leaves_no_bias_on_length():
    """Under noise the trainer's sums lie below the engine's by KL times length, on average.

    The engine samples from a noisy copy of the trainer's distribution, and its log-probs are those of the
    copy. A regression of the differences of 2000 sequences on their lengths shows the rest after a correction
    by the mean: less than a tenth of the slope.
    """
    generator = torch.Generator().manual_seed(0)
    trainer_v = torch.randn(500, generator=generator).log_softmax(-1)
    noisy_v = (trainer_v + 0.2 * torch.randn(500, generator=generator)).log_softmax(-1)
    length_n = torch.randint(1, 400, (2000,), generator=generator)
    token_r = torch.multinomial(noisy_v.exp(), int(length_n.sum()), replacement=True, generator=generator)
    metrics = mismatch((trainer_v - noisy_v).double()[token_r], length_n)
    exact = float((noisy_v.exp() * (noisy_v - trainer_v)).sum())
    assert metrics["slope"] == pytest.approx(-exact, rel=0.1) and exact > 0.01
    assert abs(metrics["residual_slope"]) < 0.1 * exact


def test_an_engine_without_log_probs_is_no_reference():
    rows = sampled().with_columns(engine_logp_r=None)
    with pytest.raises(ValueError, match=r"algorithm\.reference_logprobs=engine: .* gave no log-probs"):
        MismatchWatch(1.0).corrected(rows)
