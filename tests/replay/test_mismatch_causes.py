"""The certificate of the mismatch names each fault that is put into engine or trainer of a real run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inputs.run_faults import RUN, RunFault, certificate_with, check_names, stale_weights
from helpers.tiny_run import configure, fit
from safetensors.torch import load_file

from megatron_gvpo import cli
from megatron_gvpo.megatron.microbatch import Share
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


def stale_cache(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The prompts' keys and values, but for their last tokens', are those of the weights before the push."""
    before = load_file(Path(trainer.config.model.path) / "model.safetensors")
    original = LocalModel._forward

    def forward(self: LocalModel, ids: Any, positions: Any, mask: Any, cache: Any, **images: Any) -> Any:
        if ids.shape[1] == 1:
            return original(self, ids, positions, mask, cache, **images)
        now = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(before, strict=False)
        original(self, ids[:, :-1], positions[:, :-1], mask[:, :-1], cache)
        self.model.load_state_dict(now)
        return original(self, ids[:, -1:], positions[:, -1:], mask, cache)

    patch.setattr(LocalModel, "_forward", forward)


def low_precision(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The engine computes in bfloat16, and the run in float32."""
    original = LocalModel.generate

    def generate(self: LocalModel, *arguments: Any) -> Any:
        self.model.to(torch.bfloat16)
        try:
            return original(self, *arguments)
        finally:
            self.model.to(torch.float32)

    patch.setattr(LocalModel, "generate", generate)


def renormalised(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The engine samples as generation_config.json says, and its log-probs are over what is left."""
    original = LocalModel._sample

    def sample(self: LocalModel, requests: Any, rows: Any, seeds: Any, longest: Any, sampling: Any) -> Any:
        narrower = sampling.model_copy(update={"top_k": 2})
        rollouts = original(self, requests, rows, seeds, longest, narrower)
        for rollout in rollouts:
            rollout.support = None
        return rollouts

    patch.setattr(LocalModel, "_sample", sample)


def other_tokens(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The engine leaves out the prompt's first token, as a template without it would."""
    original = LocalModel._sample

    def sample(self: LocalModel, requests: Any, *arguments: Any) -> Any:
        changed = [replace(request, prompt_ids=request.prompt_ids[1:]) for request in requests]
        return original(self, changed, *arguments)

    patch.setattr(LocalModel, "_sample", sample)


def recommended_temperature(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The engine samples at the temperature of generation_config.json."""
    original = LocalModel._sample

    def sample(self: LocalModel, requests: Any, rows: Any, seeds: Any, longest: Any, sampling: Any) -> Any:
        warmer = sampling.model_copy(update={"temperature": 0.3})
        return original(self, requests, rows, seeds, longest, warmer)

    patch.setattr(LocalModel, "_sample", sample)


def rounded_trainer(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The trainer's log-probs go through bfloat16."""
    original = Share.gather
    patch.setattr(Share, "gather", lambda *arguments: original(*arguments).bfloat16().float())


def trainer_temperature(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The trainer scores at temperature 1, and the engine samples at 0.8."""
    patch.setattr(trainer.components.policy, "_temperature", 1.0)


FAULTS = {
    "stale weights": RunFault(stale_weights, "engine", "stale weights", "those of step 0", after=0),
    "stale cache": RunFault(stale_cache, "engine", "stale cache", "are of step 0"),
    "precision of the engine": RunFault(low_precision, "engine", "precision", "bfloat16"),
    "truncated support": RunFault(
        renormalised, "engine", "truncated support", "top_k=2 of generation_config.json"
    ),
    "tokens": RunFault(other_tokens, "engine", "tokens", "without the prompt's first token"),
    "temperature of the engine": RunFault(
        recommended_temperature, "engine", "temperature", "0.3 in place of 1"
    ),
    "precision of the trainer": RunFault(rounded_trainer, "trainer", "precision", "bfloat16"),
    "temperature of the trainer": RunFault(
        *(trainer_temperature, "trainer", "temperature", "1 in place of 0.8"),
        settings=("rollout.temperature=0.8",),
    ),
}


@pytest.fixture(scope="module")
def sound(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sound")
    fit(configure(task, out, *RUN))
    return out


def test_a_sound_run_has_rounding_only(sound: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["mismatch", str(sound)]) == 0
    printed = capsys.readouterr().out
    assert "rounding in float32 explains the gap on both sides" in printed
    written = json.loads((sound / "mismatch.json").read_text())
    assert {(c["side"], c["name"]) for c in written["causes"]} == {
        ("engine", "precision"),
        ("trainer", "precision"),
    }
    assert sum(cause["share"] for cause in written["causes"]) == pytest.approx(1.0)
    assert all(cause["largest"] <= cause["bound"] for cause in written["causes"])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_share(task: Path, tmp_path: Path, name: str):
    fault = FAULTS[name]
    check_names(certificate_with(fault, task, tmp_path), fault)
