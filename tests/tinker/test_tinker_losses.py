"""Refusals of losses; test_tinker_operations.py compares their numbers with formulas of its own."""

import numpy as np
import pytest
import torch

from megatron_gvpo.tinker.losses import LOSSES, RequestedLoss
from megatron_gvpo.tinker.wire import Datum, Refusal


def datum(tokens: int = 3, **inputs: list[float]) -> Datum:
    columns = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    return Datum([1] * tokens, {"target_tokens": np.asarray([2] * tokens, np.int64), **columns})


def sampled(**inputs: list[float]) -> Datum:
    return datum(logprobs=[-1.0] * 3, advantages=[1.0] * 3, **inputs)


@pytest.mark.parametrize(
    ("name", "config", "data", "words"),
    [
        ("reinforce", {}, datum(), "this server has cross_entropy"),
        ("stable_reinforce", {}, datum(), "give the recipe loss_fn=importance_sampling or cispo"),
        ("gspo", {}, sampled(), "sequence_ratio_mask is missing"),
        ("gspo", {}, sampled(sequence_ratio_mask=[0] * 3), "is 0 everywhere: want 1 for the tokens"),
        ("cross_entropy", {}, datum(), "weights is missing"),
        ("cross_entropy", {}, datum(weights=[1, 1]), "has 2 numbers: want 3"),
        ("cross_entropy", {}, datum(weights=[1, 1, float("nan")]), "not finite"),
        ("cross_entropy", {}, datum(weights=[1] * 3, logprobs=[0] * 3), "does not read logprobs"),
        ("cross_entropy", {"beta": 1.0}, datum(weights=[1] * 3), "no such option"),
        ("gvpo", {}, datum(weights=[1] * 3, logprobs=[0] * 3, group=[0]), "reward is missing"),
        (
            "gvpo",
            {"beta": -1.0},
            datum(weights=[1] * 3, logprobs=[0] * 3, group=[0], reward=[1]),
            "loss_fn_config",
        ),
        ("ppo", {"clip_low_threshold": "x"}, sampled(), "'x' is not a number of at least 0"),
        ("cispo", {"clip_high_threshold": float("nan")}, sampled(), "nan is not a number of at least 0"),
        (
            "ppo",
            {"clip_low_threshold": 1.3},
            sampled(),
            "clip_low_threshold=1.3 exceeds clip_high_threshold=1.2",
        ),
        ("dro", {"beta": -1.0}, sampled(), "-1.0 is not a number of at least 0"),
    ],
)
def test_what_a_loss_cannot_read_is_refused(name, config, data, words):
    with pytest.raises(Refusal, match=words):
        RequestedLoss.of(name, config, [data])


def gvpo(group: float, weights: float = 1.0) -> Datum:
    return datum(weights=[weights] * 3, logprobs=[-1.0] * 3, group=[group], reward=[1.0])


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("gpg", [datum(weights=[0] * 3, advantages=[1] * 3)], "all are 0, so no token is trained"),
        ("gvpo", [gvpo(0, 0.0), gvpo(0, 0.0)], "all are 0, so no token is trained"),
        ("gvpo", [gvpo(0), gvpo(0.5)], r"data\[1\].* is 0\.5: want an integer"),
        ("gvpo", [gvpo(1e30), gvpo(1e30)], r"data\[0\].* is 1e\+30: want an integer"),
        ("gvpo", [gvpo(0), gvpo(1)], "each of the 2 sequences is alone in its group"),
    ],
)
def test_a_request_that_would_train_nothing_is_refused(name, data, words):
    """A mean over no token would be a division by zero on all ranks, which would end the server."""
    with pytest.raises(Refusal, match=words):
        RequestedLoss.of(name, {}, data)
    assert RequestedLoss.of("gvpo", {}, [gvpo(0), gvpo(0, 0.0), gvpo(1)])


def test_targets_are_integers():
    floats = Datum([1], {"target_tokens": np.asarray([2.5], np.float32), "weights": np.ones(1, np.float32)})
    with pytest.raises(Refusal, match="is of float32: tokens are int64"):
        RequestedLoss.of("cross_entropy", {}, [floats])


def test_the_shares_of_micro_batches_add_up():
    """A loss may be computed on some of the sequences at a time; the weights are those of the whole."""
    generator = torch.Generator().manual_seed(0)
    data = [
        datum(
            length,
            weights=[1.0] * length,
            logprobs=[-1.0] * length,
            advantages=[0.5] * length,
            sequence_ratio_mask=[0.0] * (length - 1) + [1.0],
            group=[i % 2],
            reward=[float(i)],
        )
        for i, length in enumerate((2, 3, 4, 1))
    ]
    logp_r = -torch.rand(10, generator=generator)
    parts = logp_r.split([2, 3, 4, 1])
    for name, loss in LOSSES.items():
        own = [Datum(d.tokens, {k: d.inputs[k] for k in ("target_tokens", *loss.inputs)}) for d in data]
        requested = RequestedLoss.of(name, {}, own)
        weight_r, value = requested.weights(logp_r)
        groups = [[0, 2], [1, 3]]
        shares = [requested.weights(torch.cat([parts[i] for i in group]), group) for group in groups]
        assert torch.allclose(sum(share for _, share in shares), value, atol=1e-6)
        of_sequence = {}
        for group, (own_r, _) in zip(groups, shares, strict=True):
            of_sequence |= dict(zip(group, own_r.split([len(parts[i]) for i in group]), strict=True))
        assert torch.allclose(torch.cat([of_sequence[i] for i in range(4)]), weight_r, atol=1e-6)


def test_no_sequence_has_no_weight():
    weight_r, value = RequestedLoss.of("ppo", {}, []).weights(torch.zeros(0), [])
    assert (len(weight_r), float(value)) == (0, 0.0)
