"""The certificate of the mismatch names each fault that is put into engine or trainer of a real run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inputs.run_faults import RUN, RunFault, certificate_with, check_names, stale_weights
from helpers.tiny_run import configure, fit
from safetensors.torch import load_file

from megatron_gvpo import cli
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.megatron.microbatch import Share
from megatron_gvpo.sampling.embedded import EmbeddedEngine
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


def noise(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The engine's log-probs are off by random numbers, which no program error would give."""
    original = LocalModel._sample

    def sample(self: LocalModel, *arguments: Any) -> Any:
        rollouts, generator = original(self, *arguments), torch.Generator().manual_seed(0)
        for rollout in rollouts:
            numbers = torch.randn(len(rollout.logprobs), generator=generator).tolist()
            rollout.logprobs = [p - abs(n) for p, n in zip(rollout.logprobs, numbers, strict=True)]
        return rollouts

    patch.setattr(LocalModel, "_sample", sample)


def one_step_behind(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The engine has the weights of the step before and says so, as servers with rollout.async_steps do."""
    original = EmbeddedEngine.sync
    patch.setattr(EmbeddedEngine, "sync", lambda self, version: None if version else original(self, version))


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
    "noise": RunFault(noise, "engine", "unexplained", "no suspicion reproduces it"),
    "temperature of the trainer": RunFault(
        *(trainer_temperature, "trainer", "temperature", "1 in place of 0.8"),
        settings=("rollout.temperature=0.8",),
    ),
}


@pytest.fixture(scope="module")
def sound(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sound")
    fit(configure(task, out, *RUN, "checkpoint.every=1"))
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


def test_a_step_without_a_record_needs_the_checkpoint_before_it(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The oldest records are removed above logging.steps.max_gb."""
    run = shutil.copytree(sound, tmp_path / "run")
    shutil.rmtree(run / "steps")
    assert cli.main(["mismatch", str(run), "--step", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("step 2: ") and "rounding in float32 explains the gap on both sides" in printed
    shutil.rmtree(run / "checkpoints" / "step_00000001")
    assert cli.main(["mismatch", str(run), "--step", "2"]) == 2
    assert "no checkpoint before step 2 from which every step is recorded" in capsys.readouterr().err


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_share(task: Path, tmp_path: Path, name: str):
    fault = FAULTS[name]
    check_names(certificate_with(fault, task, tmp_path), fault)


def test_older_weights_that_say_so_are_the_policys_own_change(task: Path, tmp_path: Path):
    fault = RunFault(one_step_behind, "both", "the policy's own change", after=0)
    certificate = certificate_with(fault, task, tmp_path)
    first = certificate.causes[0]
    assert (first.side, first.name) == (fault.side, fault.cause), certificate.causes
    assert "sampled by step 0" in first.detail
    assert first.share > 0.8
    assert certificate.is_rounding, "no side is wrong"
    assert certificate.worst[0].cause == "both: the policy's own change"


# In the characters of the tiny model's tokenizer: "=" before a system prompt, "+" before the user's message.
TEMPLATE = (
    "{% for m in messages %}{{ ('=' if m.role == 'system' else '+') + m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}*={% endif %}"
)


@pytest.fixture(scope="module")
def chat_task(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the tiny task with a chat template."""
    model = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(task / "model", model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def other_template(change: Callable[[str], str]) -> Callable[[Trainer, pytest.MonkeyPatch], None]:
    """A fault by which the engine gets each prompt with another text around the problem."""

    def put(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        original, tokenizer = LocalModel._sample, load_tokenizer(trainer.config.model.path)

        def sample(self: LocalModel, requests: Any, *arguments: Any) -> Any:
            changed = []
            for request in requests:
                text = tokenizer.decode(request.prompt_ids)
                assert change(text) != text
                changed.append(replace(request, prompt_ids=tuple(tokenizer(change(text))["input_ids"])))
            return original(self, changed, *arguments)

        patch.setattr(LocalModel, "_sample", sample)

    return put


SYSTEM = "=0123\n"
TEMPLATES = {  # the engine's prompt, what the certificate says, the configuration
    "no system prompt": (lambda text: text.removeprefix(SYSTEM), "without data.system_prompt", ()),
    "no generation prompt": (lambda text: text.removesuffix("*="), "without the generation prompt", ()),
    "no template": (
        lambda text: text.removeprefix(f"{SYSTEM}+").removesuffix("\n*="),
        "without the chat template",
        (),
    ),
    "a template that the run lacks": (
        lambda text: f"+{text}\n*=",
        "through the tokenizer's chat template",
        ("data.chat_template=false", "data.system_prompt=null"),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.proof if i > 1 else ()) for i, name in enumerate(TEMPLATES)]
)
def test_another_template_is_named(task: Path, chat_task: Path, tmp_path: Path, name: str):
    change, detail, settings = TEMPLATES[name]
    chat = (f"model.path={chat_task}", "data.system_prompt='0123'", "data.max_prompt_tokens=48")
    fault = RunFault(other_template(change), "engine", "template", detail, (*chat, *settings))
    check_names(certificate_with(fault, task, tmp_path), fault)
