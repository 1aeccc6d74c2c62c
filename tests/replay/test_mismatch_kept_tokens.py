"""The certificate judges truncated sampling with the kept tokens, and names those that are stale or lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inputs.run_faults import RUN, RunFault, certificate_with, check_names, stale_weights
from helpers.references import gradient_reference as reference
from helpers.tiny_run import configure, fit
from torch import Tensor

from megatron_gvpo.groups import Rollout
from megatron_gvpo.megatron import batch
from megatron_gvpo.replay.kept_tokens import kept_tokens, origin, recorded_tokens, wrong_sets
from megatron_gvpo.replay.mismatch import certify
from megatron_gvpo.runs.one_machine import load_run
from megatron_gvpo.sampling import draws
from megatron_gvpo.sampling.draws import Draws
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.settings.sections import RolloutConfig
from megatron_gvpo.supports import Support
from megatron_gvpo.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("leave_the_process_group")

TRUNCATED = ("rollout.top_p=0.8",)
ALL_LIMITS = ("rollout.top_k=5", "rollout.min_p=0.05", "rollout.top_p=0.9")
Change = Callable[
    [Rollout, Tensor, Tensor], None
]  # a rollout, its logits by the present and the first weights


def changed(change: Change) -> Callable[[Trainer, pytest.MonkeyPatch], None]:
    """A fault that changes each rollout of the engine before the trainer gets it."""

    def put(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        first = reference.load(Path(trainer.config.model.path)).float()
        original = LocalModel._sample

        def sample(self: LocalModel, requests: Any, rows: Any, *arguments: Any) -> list[Rollout]:
            rollouts = original(self, requests, rows, *arguments)
            for row, rollout in zip(rows, rollouts, strict=True):
                ids = torch.tensor([[*requests[row].prompt_ids, *rollout.token_ids]])
                begin = len(requests[row].prompt_ids) - 1
                logits = [model(input_ids=ids).logits[0, begin:-1] for model in (self.model, first)]
                change(rollout, *logits)
            return rollouts

        patch.setattr(LocalModel, "_sample", sample)

    return put


def stale_sets(rollout: Rollout, now: Tensor, first: Tensor) -> None:
    """Tokens that the first weights would keep, where the token is one of them."""
    assert rollout.support is not None
    is_kept = recorded_tokens(rollout.support, now.shape[1])
    stale = kept_tokens(first.log_softmax(-1), {"top_p": 0.8}, in_turn=True)
    has_token = stale[torch.arange(len(stale)), rollout.token_ids]
    is_kept[has_token] = stale[has_token]
    rollout.support = Support.of([row.nonzero()[:, 0].tolist() for row in is_kept])


def stale_sets_of_both(rollout: Rollout, now: Tensor, first: Tensor) -> None:
    """The same, and the engine's log-probs are over them."""
    stale_sets(rollout, now, first)
    assert rollout.support is not None
    now = now.masked_fill(~recorded_tokens(rollout.support, now.shape[1]), -torch.inf)
    rollout.logprobs = now.log_softmax(-1).gather(1, torch.tensor([rollout.token_ids]).T)[:, 0].tolist()


def lost_sets(rollout: Rollout, now: Tensor, first: Tensor) -> None:
    rollout.support = None


def whole_vocabulary(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The engine's log-probs are over the whole vocabulary, and its kept tokens are right."""
    original = Draws.next

    def next_(self: Draws, logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        token, _ = original(self, logits, *arguments)
        return token, logits.float().log_softmax(-1).gather(1, token[:, None])[:, 0]

    patch.setattr(Draws, "next", next_)


def trainer_without_sets(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch, "_supports", lambda rows: None)


def wider_sets(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The engine samples at top_p 0.95."""
    original = draws.outside_support
    wider = RolloutConfig(top_p=0.95)
    patch.setattr(draws, "outside_support", lambda p, sampling: original(p, wider))


SETS = "truncated support"
FAULTS = {
    "stale kept tokens": RunFault(
        *(
            changed(stale_sets),
            "engine",
            SETS,
            "over the tokens that top_p=0.8 keeps, and not over the record",
        ),
        settings=TRUNCATED,
    ),
    "lost kept tokens": RunFault(
        *(changed(lost_sets), "engine", SETS, "top_p=0.8 keeps, and no kept tokens are recorded"),
        settings=TRUNCATED,
    ),
    "whole vocabulary of the engine": RunFault(
        *(whole_vocabulary, "engine", SETS, "over the whole vocabulary"), settings=TRUNCATED
    ),
    "whole vocabulary of the trainer": RunFault(
        *(trainer_without_sets, "trainer", SETS, "over the whole vocabulary"), settings=TRUNCATED
    ),
    "stale weights": RunFault(
        *(stale_weights, "engine", "stale weights", "those of step 0"), settings=TRUNCATED, after=0
    ),
}
# Trainer and engine agree, on tokens that the run's limits do not keep.
AGREED = {
    "stale kept tokens": (changed(stale_sets_of_both), "but those of the weights of step 0"),
    "wider kept tokens": (wider_sets, "but others"),
}
QUICK = ("stale kept tokens", "whole vocabulary of the trainer")


def quick(names: dict[str, Any]) -> Iterator[Any]:
    for name in names:
        yield name if name in QUICK else pytest.param(name, marks=pytest.mark.proof)


@pytest.mark.parametrize("limits", [TRUNCATED, pytest.param(ALL_LIMITS, marks=pytest.mark.proof)])
def test_a_sound_run_that_truncates_has_rounding_only(task: Path, tmp_path: Path, limits: tuple[str, ...]):
    fit(configure(task, tmp_path, *RUN, *limits))
    certificate = certify(load_run(tmp_path), 2)
    assert certificate.is_rounding, certificate.causes
    assert {(cause.side, cause.name) for cause in certificate.causes} == {
        ("engine", "precision"),
        ("trainer", "precision"),
    }


@pytest.mark.parametrize("name", quick(FAULTS))
def test_a_fault_of_kept_tokens_is_named(task: Path, tmp_path: Path, name: str):
    check_names(certificate_with(FAULTS[name], task, tmp_path), FAULTS[name])


@pytest.mark.proof
@pytest.mark.parametrize("name", AGREED)
def test_kept_tokens_that_both_sides_have_wrong_are_named(task: Path, tmp_path: Path, name: str):
    put, whose = AGREED[name]
    certificate = certificate_with(RunFault(put, "engine", SETS, settings=TRUNCATED), task, tmp_path)
    assert certificate.abs_max < 1e-4, "engine and trainer agree"
    last = certificate.causes[-1]
    assert (last.side, last.name, last.share) == ("engine", SETS, 0.0), certificate.causes
    assert whose in last.detail
    assert not certificate.is_rounding


def test_sets_are_those_of_the_embedded_engine_to_rounding():
    """The judge's and the engine's code are two; any order of the limits, random distributions."""
    generator = torch.Generator().manual_seed(0)
    for limits in ({"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 6, "min_p": 0.02}):
        logp = torch.log_softmax(3 * torch.randn(64, 40, generator=generator, dtype=torch.float64), -1)
        outside = draws.outside_support(logp.exp().float(), RolloutConfig(**limits))
        assert torch.equal(kept_tokens(logp, limits, in_turn=True), ~outside)
        assert not wrong_sets(logp, ~outside, limits, True, 1e-6).any()
        one_less = ~outside & (logp > logp.masked_fill(outside, torch.inf).amin(-1, keepdim=True))
        assert wrong_sets(logp, one_less, limits, True, 1e-6).double().mean() > 0.9
        everything = Support.whole_vocabulary(len(logp))
        assert origin(iter([(1, logp)]), everything, limits, True, 1e-6) == "the whole vocabulary"


def test_the_order_of_the_limits_is_that_of_the_engine():
    """SGLang's top-p is of the whole distribution, vLLM's of what top-k has left."""
    logp = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    limits = {"top_k": 2, "top_p": 0.5}
    assert kept_tokens(logp, limits, in_turn=True).sum() == 1  # 0.4 of 0.7 is more than a half
    assert kept_tokens(logp, limits, in_turn=False).sum() == 2
