"""Faults in the engine or the trainer of a real run, for tests that the certificate names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.tiny_run import configure, fit
from megatron_gvpo.replay.certificate import Certificate
from megatron_gvpo.replay.mismatch import certify
from megatron_gvpo.runs.one_machine import load_run
from megatron_gvpo.sampling.embedded import EmbeddedEngine
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer

RUN = ("algorithm=gvpo", "data.eval=null", "checkpoint.export_hf=false", "train.steps=2", "optimizer.lr=0.01")


class After(Callback):
    """Callback that calls `put` after a step."""

    def __init__(self, step: int, put: Callable[[Trainer], None]) -> None:
        self._step, self._put = step, put

    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        if step == self._step:
            self._put(trainer)


@dataclass(frozen=True)
class RunFault:
    """A fault, and the first cause that the certificate of the run's second step should name."""

    put: Callable[[Trainer, pytest.MonkeyPatch], None]
    side: str
    cause: str
    detail: str = ""
    settings: tuple[str, ...] = ()
    after: int = 1  # the step after which the fault begins


def certificate_with(fault: RunFault, task: Path, out: Path) -> Certificate:
    """The certificate of the second step of a run with this fault."""
    with pytest.MonkeyPatch.context() as patch:
        fit(
            configure(task, out, *RUN, *fault.settings),
            [After(fault.after, lambda trainer: fault.put(trainer, patch))],
        )
    return certify(load_run(out), 2)


def check_names(certificate: Certificate, fault: RunFault) -> None:
    """Assert that the certificate names the fault first, and that rounding does not explain it."""
    first = certificate.causes[0]
    assert (first.side, first.name) == (fault.side, fault.cause), certificate.causes
    assert fault.detail in first.detail, certificate.causes
    assert first.share > 0.8
    assert not certificate.is_rounding
    worst = certificate.worst[0]
    assert abs(worst.trainer - worst.engine) == pytest.approx(certificate.abs_max)


def stale_weights(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The second push does not arrive: the version is the new one, the weights are not."""
    original = EmbeddedEngine.sync

    def sync(self: EmbeddedEngine, version: int) -> None:
        if version == 0:
            original(self, version)
        self._model.version = version

    patch.setattr(EmbeddedEngine, "sync", sync)
