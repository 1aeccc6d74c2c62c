"""The GPU's own layers compute the reference's loss and gradient, in every layout, on emulated GPUs.

Transformer Engine's layers, its FusedAdam, its attention and the head's Triton kernels run as on a GPU, with
values (megatron_gvpo/emulation/). The cases, the fp64 reference and the measure are those of
test_gradient_invariance.py, which runs the layers of a CPU.

fp32: as exact as there, 1e-5. Transformer Engine then computes attention in separate operations, and has no
context parallelism. bf16, with context parallelism: its fused attention. There the bound is the error of
transformers, in bf16 as well, from the same fp64 gradient: a gradient that is wrong differs by more.

Adapters, critics, teachers, images, FP8 and shared prompts are in the files beside this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.gradient_cases import (
    MODELS,
    STEPS,
    TEMPERATURE,
    assert_reference,
    assert_update_is_that_of_adamw,
    expected,
    sampled,
    sampled_for,
)
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.references.bf16_errors import errors, round_weights, transformers_in_bf16
from helpers.suite.selected import selected
from helpers.workers.gradient_worker import Case, Layout, Outcome, Probe
from safetensors.torch import load_file

_SP = {"tp": 2, "sequence_parallel": True}
_GVPO, _GPG = "gvpo, groups split", "gpg, age by token, ranks without signal, accumulated"
Run = tuple[Layout, str]
# `make test`: one launch of few ranks for each precision.
QUICK: dict[str, list[Run]] = {
    "float32": [(Layout(1), _GVPO), (Layout(2, **_SP, overlap=True), _GPG)],
    "bfloat16": [(Layout(1), _GVPO), (Layout(2, cp=2), _GVPO)],
}
_LAYOUTS = [
    *(Layout(1, recompute="full"), Layout(2), Layout(2, overlap=True), Layout(2, tp=2), Layout(2, **_SP)),
    *(Layout(2, pp=2), Layout(2, pp=2, vpp=2), Layout(4, **_SP, pp=2, vpp=2), Layout(4, tp=2, overlap=True)),
]
_STEPS = [_GVPO, _GPG, "grpo with kl", "gvpo, step start, groups whole", "sft"]
_MIXTURE, _LATENT = "qwen3_moe, gvpo, groups split", "deepseek_v3, gvpo, groups split"
_EXPERTS = [
    Layout(1),
    Layout(2, ep=2),
    Layout(2, **_SP, ep=2),
    Layout(2, **_SP, etp=2),
    Layout(4, ep=2, pp=2),
]
# The other layouts of docs/reference/layouts.md that change more than the number of ranks.
_OTHERS = [
    *(Layout(2, overlap=True, offload=1.0), Layout(4, tp=2, offload=0.5)),
    *(Layout(2, pp=2, recompute="full", recompute_layers=1), Layout(2, pp=2, stage_layers=(3, 1))),
    *(Layout(2, **_SP, recompute="selective"), Layout(2, overlap=True, small=True)),
    *(Layout(4, pp=4), Layout(4, pp=2, vpp=2, overlap=True)),
]
_OTHERS_OF_EXPERTS = [Layout(2, ep=2, recompute="selective"), Layout(4, **_SP, ep=2, etp=2)]
_PROOF = [(Layout(1), name) for name in _STEPS]
_PROOF += [(layout, _GVPO) for layout in _OTHERS]
_PROOF += [(layout, _MIXTURE) for layout in _OTHERS_OF_EXPERTS]
_PROOF += [(layout, name) for layout in _LAYOUTS for name in (_GVPO, _GPG)]
_PROOF += [(Layout(2, tp=2), "tied, gvpo, groups split"), (Layout(2, pp=2), "tied, gvpo, groups split")]
_PROOF += [(layout, _MIXTURE) for layout in _EXPERTS]
_PROOF += [(Layout(1), f"{family}, gvpo, groups split") for family in ("qwen3", "llama3", "mistral")]
_PROOF += [(layout, _LATENT) for layout in (Layout(1), Layout(2, **_SP, ep=2))]
# Its ring waits for the last message of a pass twice; each exchange of keys and values has code of its own.
_CONTEXT = [(Layout(2, cp=2, cp_exchange=exchange), _GVPO) for exchange in ("all_gather", "a2a")]
_CONTEXT += [(Layout(2, cp=2), _GPG), (Layout(4, cp=4, overlap=True), _GVPO), (Layout(4, cp=2, **_SP), _GVPO)]
_CONTEXT += [(Layout(4, cp=2, pp=2, vpp=2), _GVPO), (Layout(2, cp=2), _LATENT)]
_CONTEXT += [(Layout(4, cp=2, ep=2), _MIXTURE)]
PROOF: dict[str, list[Run]] = {"float32": _PROOF, "bfloat16": [*_PROOF, *_CONTEXT]}


def _cases(*dtypes: str) -> list[Any]:
    params = []
    for dtype in dtypes:
        for run in dict.fromkeys([*QUICK[dtype], *PROOF[dtype]]):
            marks = () if run in QUICK[dtype] else pytest.mark.proof
            params.append(pytest.param(dtype, *run, id=f"{dtype}, {run[0]}: {run[1]}", marks=marks))
    return params


each_run = pytest.mark.parametrize(("dtype", "layout", "name"), _cases("float32", "bfloat16"))
each_fp32_run = pytest.mark.parametrize(("dtype", "layout", "name"), _cases("float32"))
each_bf16_run = pytest.mark.parametrize(("dtype", "layout", "name"), _cases("bfloat16"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference's models, with weights that bf16 has: one fp64 gradient is right for both precisions."""
    path = tmp_path_factory.mktemp("emulated")
    reference.save_models(path)
    round_weights(path)
    return path


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, directory: Path) -> dict[tuple[str, str, str], Any]:
    """{(dtype, layout, step): Outcome, (dtype, layout, model): Probe} of the runs that tests need."""
    wanted = selected(request, "dtype", "layout", "name")
    by_key: dict[tuple[str, str, str], Any] = {}
    for dtype in dict.fromkeys(dtype for dtype, *_ in wanted):
        runs = [(layout, name) for of, layout, name in wanted if of == dtype]
        by_key |= {(dtype, *key): value for key, value in _launched(directory, dtype, runs).items()}
    return by_key


def _launched(directory: Path, dtype: str, runs: list[Run]) -> dict[tuple[str, str], Any]:
    """The results of the runs of one precision: one launch has all their layouts."""
    cases = {}
    for name in {name for _, name in runs} | {MODELS[STEPS[name].model] for _, name in runs}:
        step = STEPS[name]
        rows, *_ = sampled_for(step, directory)
        options = {"dtype": dtype, "replays": False}  # with replay, routers are not fused
        case = Case(name, step.algorithm, rows, step.budget, step.at_step_start, step.model, **options)
        cases[name] = case
    probes = {STEPS[name].model: cases[MODELS[STEPS[name].model]] for _, name in runs}
    torch.save(([(layout, cases[name]) for layout, name in runs], probes), directory / "work.pt")
    ranks = [layout.ranks for layout in dict.fromkeys(layout for layout, _ in runs)]
    launch("helpers.workers.gradient_worker:run", ranks, str(directory), timeout=3000, emulated=True)
    results = {}
    for file in directory.glob("results-*.pt"):
        results |= torch.load(file, weights_only=False)
        file.unlink()
    return results


@each_fp32_run
def test_loss_and_gradients_are_those_of_the_reference(
    outcomes: dict[tuple[str, str, str], Any], directory: Path, dtype: str, layout: Layout, name: str
) -> None:
    assert_reference(outcomes[dtype, str(layout), name], name, directory)


@each_bf16_run
def test_in_bf16_the_error_is_that_of_transformers(
    outcomes: dict[tuple[str, str, str], Any], directory: Path, dtype: str, layout: Layout, name: str
) -> None:
    outcome: Outcome = outcomes[dtype, str(layout), name]
    _, exact = expected(name, directory)
    differences = errors(outcome.gradients, exact)
    bound = 2 * max(errors(transformers_in_bf16(STEPS[name], directory), exact).values())
    assert max(differences.values()) <= bound, max(differences, key=differences.__getitem__)


@each_run
def test_export_is_what_was_loaded_bit_for_bit(
    outcomes: dict[tuple[str, str, str], Any], directory: Path, dtype: str, layout: Layout, name: str
) -> None:
    exported = outcomes[dtype, str(layout), STEPS[name].model].exported
    loaded = load_file(directory / STEPS[name].model / "model.safetensors")
    assert exported.keys() == loaded.keys()
    for key, tensor in loaded.items():
        assert torch.equal(exported[key].cpu().to(tensor.dtype), tensor), key


@each_fp32_run
def test_scores_and_an_update_are_those_of_transformers_and_adamw(
    outcomes: dict[tuple[str, str, str], Any], directory: Path, dtype: str, layout: Layout, name: str
) -> None:
    """Transformer Engine's FusedAdam against PyTorch's; the tolerance as in test_gradient_invariance.py."""
    model = STEPS[name].model
    probe: Probe = outcomes[dtype, str(layout), model]
    _, logp, _ = sampled(directory, model, TEMPERATURE, "ragged")
    torch.testing.assert_close(probe.logp_r.cpu(), torch.cat(logp).detach().float(), rtol=0, atol=1e-5)
    assert_update_is_that_of_adamw(probe, model, directory)
