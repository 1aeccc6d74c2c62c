"""Models that take images: Megatron-Bridge's against transformers in fp64, packed, in every layout.

The rows have none, one or two images, so that some micro-batches have several and some none. One row a time
is the reference: its log-probs, the loss, every parameter's gradient (the vision tower's, too), the norm that
clips, one update, and the exported weights. The tolerances are those of test_gradient_invariance.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.vision_cases import (
    CASES,
    CONFIGS,
    VisionCase,
    decoded_log_probs,
    load,
    log_probs,
    make_rows,
    save_model,
    with_placeholders,
)
from helpers.distributed import launch
from helpers.references.bf16_errors import round_weights
from helpers.suite.selected import selected
from helpers.workers.gradient_worker import UPDATE, Layout
from helpers.workers.vision_worker import VisionResult
from safetensors.torch import load_file

from megatron_gvpo.data.image_processor import ImageProcessor
from megatron_gvpo.huggingface.image_families import name_in_file
from megatron_gvpo.types import TrainBatch

TOLERANCE = 1e-5
_SP = {"tp": 2, "sequence_parallel": True}
QUICK = {
    VisionCase("qwen2_5_vl", Layout(2, **_SP)),
    VisionCase("qwen2_5_vl", Layout(2, overlap=True), trained=False),
    VisionCase("qwen2_5_vl_tied", Layout(2, pp=2)),
    VisionCase("qwen3_vl", Layout(2, **_SP)),
    VisionCase("qwen3_vl", Layout(2)),
    VisionCase("qwen3_vl_tied", Layout(2, pp=2), trained=False),
}
each_case = pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=str(c), marks=() if c in QUICK else pytest.mark.proof) for c in CASES],
)


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and results: one launch runs all cases that the selected tests need."""
    path = tmp_path_factory.mktemp("vision")
    run_cases(path, selected(request, "case"))
    return path


def run_cases(path: Path, cases: list[VisionCase], emulated: bool = False, rounded: bool = False) -> None:
    """`rounded`: with weights that bf16 has."""
    for model in CONFIGS:
        save_model(path, model)
    if rounded:
        round_weights(path)
    rows = make_rows(path, ImageProcessor(str(path / "qwen3_vl")))
    torch.save((cases, rows), path / "work.pt")
    ranks = [case.layout.ranks for case in cases]
    launch("helpers.workers.vision_worker:run", ranks, str(path), timeout=1800, emulated=emulated)


def rows_of(directory: Path) -> TrainBatch:
    rows: TrainBatch = torch.load(directory / "work.pt", weights_only=False)[1]
    return rows


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {}


def reference(directory: Path, model_name: str, references: dict[str, Any]) -> Any:
    """(log-probs [r], loss, {name in files: gradient}, {name in files: weight}) of transformers."""
    if model_name not in references:
        references[model_name] = computed(load(directory / model_name), directory, model_name)
    return references[model_name]


def computed(model: Any, directory: Path, model_name: str) -> Any:
    """`reference` of a model of any dtype; the loss is in fp64."""
    logp = [logp.double() for logp in log_probs(model, rows_of(directory), directory / model_name)]
    loss = -torch.cat(logp).mean()
    loss.backward()
    architecture = model.config.architectures[0]
    named = {name_in_file(name, architecture): p for name, p in model.named_parameters()}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    weights = {n: p.detach().clone() for n, p in named.items()}
    return torch.cat(logp).detach(), loss.item(), gradients, weights


def result_of(directory: Path, case: VisionCase) -> VisionResult:
    result: VisionResult = torch.load(directory / f"found-{case}.pt", weights_only=False)
    return result


@each_case
def test_scores_are_those_of_transformers(
    directory: Path, references: dict[str, Any], case: VisionCase
) -> None:
    logp_r, loss, *_ = reference(directory, case.model, references)
    result = result_of(directory, case)
    torch.testing.assert_close(result.logp_r.double(), logp_r, rtol=0, atol=1e-5)
    assert result.loss == pytest.approx(loss, rel=TOLERANCE)


@each_case
def test_placeholders_that_a_policy_samples_are_ordinary_tokens(directory: Path, case: VisionCase) -> None:
    model = load(directory / case.model)
    rows = with_placeholders(rows_of(directory))
    wanted_r = torch.cat(decoded_log_probs(model, rows, directory / case.model))
    result = result_of(directory, case)
    torch.testing.assert_close(result.marked_logp_r.double(), wanted_r, rtol=0, atol=1e-5)


@each_case
def test_every_gradient_and_their_norm_are_those_of_transformers(
    directory: Path, references: dict[str, Any], case: VisionCase
) -> None:
    _, _, gradients, _ = reference(directory, case.model, references)
    result = result_of(directory, case)
    assert result.gradients.keys() == gradients.keys()
    trained = trained_of(gradients, case)
    for name, wanted in gradients.items():
        wanted = wanted if name in trained else torch.zeros_like(wanted)
        assert (result.gradients[name] - wanted).abs().max() <= TOLERANCE * wanted.abs().max() + 1e-9, name
    norm = torch.stack([gradients[name].norm() for name in trained]).norm().item()
    assert result.grad_norm == pytest.approx(norm, rel=TOLERANCE)


def trained_of(named: dict[str, Any], case: VisionCase) -> list[str]:
    return [name for name in named if case.trained or "visual." not in name]


@each_case
def test_an_update_is_that_of_torch_adamw(
    directory: Path, references: dict[str, Any], case: VisionCase
) -> None:
    _, _, gradients, weights = reference(directory, case.model, references)
    result = result_of(directory, case)
    trained = trained_of(gradients, case)
    norm = torch.stack([gradients[name].norm() for name in trained]).norm().item()
    weights = {name: weight.clone() for name, weight in weights.items()}
    for name in trained:
        weights[name].grad = gradients[name] * min(1, UPDATE["clip_grad"] / norm)
    matrices = [weights[name] for name in trained if weights[name].dim() > 1]
    vectors = [weights[name] for name in trained if weights[name].dim() == 1]
    options = {key: UPDATE[key] for key in ("lr", "eps", "betas", "weight_decay")}
    torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], **options).step()
    for name, weight in weights.items():
        assert (result.updated[name] - weight).abs().max() < 5e-3 * UPDATE["lr"], name
        if name not in trained:
            assert torch.equal(result.updated[name], result.exported[name]), name


@each_case
def test_a_score_waits_for_the_weights_of_an_update(directory: Path, case: VisionCase) -> None:
    result = result_of(directory, case)
    moved = (result.next_logp_r - result.updated_logp_r).abs().max()
    assert (result.settled_logp_r - result.next_logp_r).abs().max() < 1e-4 * moved


@each_case
def test_export_is_what_was_loaded_bit_for_bit(directory: Path, case: VisionCase) -> None:
    exported = result_of(directory, case).exported
    loaded = load_file(directory / case.model / "model.safetensors")
    assert exported.keys() == loaded.keys()
    for name, tensor in loaded.items():
        assert torch.equal(exported[name], tensor), name


def test_a_frozen_tower_has_no_gradients_and_no_optimizer_states(directory: Path) -> None:
    """Each data-parallel rank's optimizer has a shard."""
    case = VisionCase("qwen2_5_vl", Layout(2, overlap=True), trained=False)
    result = result_of(directory, case)
    of_text = sum(t.numel() for n, t in result.exported.items() if "visual." not in n)
    assert of_text <= result.with_gradient < of_text + 1000  # rounded up to whole shards
    assert result.optimizer_parameters <= result.with_gradient / 2
