"""The certificate names other experts of engine or trainer, and a lost or shifted replay of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inputs import gpt_oss_task
from helpers.inputs.gpt_oss_task import LAYERS, PER_TOKEN
from helpers.inputs.run_faults import RUN, After
from helpers.references import gradient_reference as reference
from helpers.tiny_run import configure, fit

from megatron_gvpo.cli.mismatch import lines
from megatron_gvpo.groups import Rollout, Routing
from megatron_gvpo.megatron import batch
from megatron_gvpo.replay.certificate import Certificate
from megatron_gvpo.replay.mismatch import certify
from megatron_gvpo.replay.routing import RouterModules, through
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.settings.config import Config
from megatron_gvpo.training.trainer import Trainer
from megatron_gvpo.verify.reference import Exact

pytestmark = pytest.mark.usefixtures("leave_the_process_group")

LAYER = 1  # whose router the engine has otherwise
Put = Callable[[Trainer, pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def moe(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_oss_task.make(task, tmp_path_factory.mktemp("moe") / "task")


@contextmanager
def exchanged(
    model: Any, ids: torch.Tensor, choices: dict[int, torch.Tensor] | None = None
) -> Iterator[None]:
    """Context in which every third token id goes through the next expert in LAYER; notes the choices."""

    def hook(layer: int) -> Callable[..., Any]:
        def choose(_: Any, __: Any, output: Any) -> Any:
            logits, scores, own = output
            if layer == LAYER:
                best = logits.topk(own.shape[1] + 1).indices
                is_other = (ids.reshape(-1) % 3 == 0)[:, None]
                own = torch.where(is_other, torch.cat([best[:, :-2], best[:, -1:]], 1), best[:, :-1])
                scores = logits.gather(1, own).softmax(-1)
            if choices is not None:
                choices[layer] = own
            return logits, scores, own

        return choose

    hooks = [layer.mlp.router.register_forward_hook(hook(i)) for i, layer in enumerate(model.model.layers)]
    yield
    for handle in hooks:
        handle.remove()


def other_experts(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The engine's decoding goes through other experts, and its reading of prompts does not."""
    original = LocalModel._forward

    def forward(self: LocalModel, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if ids.shape[1] > 1:
            return original(self, ids, *arguments)
        with exchanged(self.model, ids):
            return original(self, ids, *arguments)

    patch.setattr(LocalModel, "_forward", forward)


def one_expert_fewer(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    engine = trainer.components.engine._model
    for layer in engine.model.model.layers:
        layer.mlp.router.top_k -= 1


def recorded(shift: int | None = 0) -> Put:
    """The engine goes through other experts, and tells which, `shift` tokens late; None: it tells none."""

    def put(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        forward, sample = LocalModel._forward, LocalModel._sample

        def other_forward(self: LocalModel, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
            with exchanged(self.model, ids):
                return forward(self, ids, *arguments)

        def noted(self: LocalModel, requests: Any, rows: Any, *arguments: Any) -> list[Rollout]:
            rollouts = sample(self, requests, rows, *arguments)
            for row, rollout in zip(rows, rollouts, strict=True):
                ids = torch.tensor([[*requests[row].prompt_ids, *rollout.token_ids]])
                choices: dict[int, torch.Tensor] = {}
                with exchanged(self.model, ids, choices):
                    self.model(input_ids=ids)
                experts = torch.stack([choices[layer] for layer in sorted(choices)], 1)[:-1]
                if shift is not None:
                    encoded = experts.roll(shift, 0).to(torch.uint8).numpy().tobytes()
                    rollout.routing = Routing(LAYERS, PER_TOKEN, 1, encoded)
            return rollouts

        patch.setattr(LocalModel, "_forward", other_forward)
        patch.setattr(LocalModel, "_sample", noted)

    return put


def ignored(change: Callable[..., Any]) -> Put:
    """The engine's experts are recorded rightly, and the trainer's packs get what `change` makes of them."""

    def put(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        recorded()(trainer, patch)
        original = batch._experts
        patch.setattr(batch, "_experts", lambda *arguments: change(original(*arguments)))

    return put


def replaying(config: Config, engine: str) -> Config:
    """The run with router replay, in which the embedded engine of this file takes a server's part."""
    rollout = config.rollout.model_copy(update={"router_replay": True, "engine": engine})
    return config.model_copy(update={"rollout": rollout})


def certificate_of(moe: Path, out: Path, put: Put | None, replays: bool, after: int = 1) -> Certificate:
    config = configure(moe, out, *RUN)
    with pytest.MonkeyPatch.context() as patch:
        callbacks = [] if put is None else [After(after, lambda trainer: put(trainer, patch))]
        fit(replaying(config, "local") if replays else config, callbacks)
    return certify(replaying(config, "sglang") if replays else config, 2)


@pytest.mark.proof
def test_sound_experts_are_no_cause(moe: Path, tmp_path: Path):
    certificate = certificate_of(moe, tmp_path, None, replays=False)
    assert certificate.is_rounding, certificate.causes


@pytest.mark.parametrize(
    ("put", "detail"),
    [
        (other_experts, f"the next expert for the last chosen, at single tokens of layer {LAYER}"),
        pytest.param(one_expert_fewer, "one expert fewer a token", marks=pytest.mark.proof),
    ],
)
def test_other_experts_of_the_engine_are_named(moe: Path, tmp_path: Path, put: Put, detail: str):
    certificate = certificate_of(moe, tmp_path, put, replays=False)
    first = certificate.causes[0]
    assert (first.side, first.name, first.detail) == ("engine", "routing", detail), certificate.causes
    assert first.share > 0.8 and first.bound is None and not certificate.is_rounding
    assert "the gap is not rounding in float32: engine, routing" in [*lines(certificate)][-1]


@pytest.mark.proof
def test_experts_that_rounding_exchanges_have_a_bound(task: Path, tmp_path: Path):
    """RouterModules that can hardly tell pairs of experts apart: rounding decides, on both sides."""
    pairs = gpt_oss_task.make(task, tmp_path / "task", pairs=True)
    config = configure(pairs, tmp_path / "run", *RUN, "optimizer.lr=1e-30")
    fit(config)
    certificate = certify(config, 2)
    causes = {(cause.side, cause.name): cause for cause in certificate.causes}
    assert certificate.is_rounding, certificate.causes
    for side in ("engine", "trainer"):
        routing = causes[side, "routing"]
        assert routing.bound is not None and routing.largest <= routing.bound
        assert routing.largest > 0.0


def test_a_replay_of_the_engines_experts_is_rounding(moe: Path, tmp_path: Path):
    """Engine and judge go through the experts that the engine recorded, and so does the trainer."""
    certificate = certificate_of(moe, tmp_path, recorded(), replays=True)
    assert certificate.is_rounding, certificate.causes
    assert {(cause.side, cause.name) for cause in certificate.causes} == {
        ("engine", "precision"),
        ("trainer", "precision"),
    }


@pytest.mark.parametrize(
    ("put", "side", "detail"),
    [
        (ignored(lambda experts_t: None), "trainer", "those that the routers choose by themselves"),
        pytest.param(
            ignored(lambda experts_t: experts_t.roll(1, 0)),
            *("trainer", "the recorded experts of the token before"),
            marks=pytest.mark.proof,
        ),
        pytest.param(
            recorded(shift=1), "engine", "the recorded experts of the token after", marks=pytest.mark.proof
        ),
    ],
)
def test_a_lost_or_shifted_replay_is_named(moe: Path, tmp_path: Path, put: Put, side: str, detail: str):
    certificate = certificate_of(moe, tmp_path, put, replays=True)
    first = certificate.causes[0]
    assert (first.side, first.name) == (side, "routing"), certificate.causes
    assert detail in first.detail
    assert not certificate.is_rounding


@pytest.mark.proof
def test_experts_that_are_not_recorded_are_named(moe: Path, tmp_path: Path):
    certificate = certificate_of(moe, tmp_path, recorded(shift=None), replays=True)
    details = [cause.detail for cause in certificate.causes if cause.side == "engine"]
    assert "rollout.router_replay=true, and no experts are recorded" in details, certificate.causes
    assert not certificate.is_rounding


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_the_judge_goes_through_the_given_experts(tmp_path: Path, family: str):
    """Against forward hooks on the routers' outputs, and, with the routers' own choice, the plain model."""
    reference.save_models(tmp_path, [family])
    model = reference.load(tmp_path / family)
    routers, ids = RouterModules.of(model), torch.arange(3, 15)[None]
    layers = model.config.num_hidden_layers
    with torch.no_grad(), Exact():
        plain = model(input_ids=ids).logits
        chosen: dict[int, torch.Tensor] = {}

        def note(layer: int, scores: torch.Tensor, k: int) -> torch.Tensor:
            chosen[layer] = scores.topk(k).indices
            return chosen[layer]

        with routers.choosing(note):
            assert torch.allclose(model(input_ids=ids).logits, plain)
        assert sorted(chosen) == [i for i in range(layers) if family == "qwen3_moe" or i > 0]
        experts = torch.stack([chosen.get(i, chosen[layers - 1]) for i in range(layers)], 1)
        shifted = experts.roll(1, 0)
        with routers.choosing(through(shifted[:-1])):
            through_others = model(input_ids=ids).logits
        assert not torch.allclose(through_others, plain)
        if family == "deepseek_v2":
            return
        routing = Routing(layers, shifted.shape[2], 1, shifted[:-1].to(torch.uint8).numpy().tobytes())
        with reference.routed(model, routing):
            assert torch.allclose(through_others[:, :-1], model(input_ids=ids).logits[:, :-1])
