"""Adapters train as `transformers` and `peft` would train them, in every layout.

The reference is the merged model in fp64 with the chain rule (adapter_reference.py); Hugging Face's own peft
reads what is saved. The adapters of all tests come from a directory in PEFT's format, so that importing is
tested by all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.adapter_cases import ADAPTERS, shared_in
from helpers.cases.families import FAMILIES
from helpers.cases.gradient_cases import (
    COMBINED,
    MODELS,
    OTHERS,
    STEPS,
    THOROUGH,
    TOLERANCE,
    Step,
    sampled_for,
    small,
)
from helpers.distributed import launch
from helpers.references import adapter_reference
from helpers.references import gradient_reference as reference
from helpers.references.adapter_reference import Expected
from helpers.suite.selected import selected
from helpers.workers.adapter_worker import Job
from helpers.workers.gradient_worker import TEMPERATURE, UPDATE, Case, Layout

from megatron_gvpo.megatron.checkpoint.load import open_checkpoint
from megatron_gvpo.verify.shrink import save_tiny

RANK, ALPHA = 4, 8
# The families of test_families.py take the older ones' step.
FAMILY = {family.architecture: family for family in FAMILIES}
STEP = {model: STEPS[name] for model, name in MODELS.items()}
STEP |= {name: replace(STEP["untied"], model=name) for name in FAMILY}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
MLP_AGAIN: dict[str, Any] = {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")}
FEW = [Layout(1), Layout(2, tp=2), Layout(2, **SP), Layout(4, tp=2, pp=2)]
LAYOUTS: dict[str, list[Layout]] = {
    "untied-all": [*THOROUGH, *OTHERS, *COMBINED, *map(small, [Layout(2), Layout(4, pp=2, vpp=2)])],
    "untied-fused": FEW,
    "untied-qv": [*FEW, Layout(1, **MLP_AGAIN), Layout(2, pp=2)],
    "untied-mlp": [
        Layout(1),
        Layout(1, **MLP_AGAIN),
        Layout(2, **SP, **MLP_AGAIN),
        Layout(1, recompute="full"),
    ],
    "tied-all": [Layout(1), Layout(2, pp=2), Layout(4, **SP, pp=2)],
    "qwen3-all": FEW,
    "llama3-all": FEW,
    "mistral-all": [Layout(1), Layout(2, cp=2), Layout(2, **SP)],
    "qwen3_moe-all": [
        Layout(1),
        Layout(2, ep=2),
        Layout(2, **SP, ep=2),
        Layout(4, ep=2, overlap=True),
        Layout(4, pp=2, vpp=2, ep=2),
        Layout(4, ep=4),
        Layout(2, ep=2, recompute="selective", recompute_modules=("core_attn", "moe")),
    ],
    "qwen3_moe-fused": [Layout(1), Layout(2, **SP, ep=2)],
    "qwen3_moe-attention": [Layout(1), Layout(2, ep=2), Layout(2, **SP, etp=2)],
    "deepseek_v2-all": [Layout(1), Layout(2, **SP, ep=2)],
    "deepseek_v3-all": [Layout(1), Layout(2, **SP), Layout(2, ep=2), Layout(4, **SP, pp=2, ep=2)],
    "gemma3-all": [Layout(1), Layout(2, **SP), Layout(2, pp=2)],
    "olmoe-all": [Layout(1), Layout(2, ep=2)],
    "glm4_moe-all": [Layout(1), Layout(2, **SP, ep=2)],
    "gpt_oss-all": [Layout(1), Layout(2, **SP, ep=2)],
    "minimax_m2-all": [Layout(1), Layout(2, ep=2)],
}
# (adapter, its layout when it was saved, another layout)
RESUMED = [
    ("untied-all", Layout(2, **SP), Layout(1)),
    ("untied-all", Layout(1), Layout(4, tp=2, pp=2)),
    ("untied-qv", Layout(2, tp=2), Layout(2, pp=2)),
    ("qwen3_moe-all", Layout(2, ep=2), Layout(1)),
    ("qwen3_moe-all", Layout(1), Layout(4, ep=4)),
    ("deepseek_v3-all", Layout(2, **SP), Layout(2, ep=2)),
]
QUICK = {
    ("untied-all", Layout(1)),
    ("untied-all", Layout(2, **SP)),
    ("untied-qv", Layout(2, tp=2)),
    ("untied-fused", Layout(2, tp=2)),
    ("tied-all", Layout(2, pp=2)),
    ("qwen3_moe-all", Layout(2, ep=2)),
    ("deepseek_v3-all", Layout(2, **SP)),
}


def job(adapter: str, layout: Layout, load: Job | None = None) -> Job:
    model, kind, targets = ADAPTERS[adapter]
    settings = (("type", kind), ("rank", RANK), ("alpha", ALPHA), ("targets", targets))
    return Job(model, layout, adapter, settings, None if load is None else load.file)


def _parameters(jobs: list[Job], quick: set[str]) -> list[Any]:
    return [pytest.param(j, id=j.name, marks=() if j.name in quick else pytest.mark.proof) for j in jobs]


TRAINED = [job(adapter, layout) for adapter, layouts in LAYOUTS.items() for layout in layouts]
CONTINUED = [job(adapter, after, job(adapter, before)) for adapter, before, after in RESUMED]
_QUICK = {job(*pair).name for pair in QUICK} | {CONTINUED[0].name, CONTINUED[3].name}
each_job = pytest.mark.parametrize("job", _parameters(TRAINED, _QUICK))
each_resumed = pytest.mark.parametrize("job", _parameters(CONTINUED, _QUICK))


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, adapters, and the results of one launch of all jobs that the selected tests need."""
    path = tmp_path_factory.mktemp("adapters")
    jobs = wanted_jobs(request)
    save_inputs(path, jobs)
    run_jobs(path, jobs)
    return path


def wanted_jobs(request: pytest.FixtureRequest) -> list[Job]:
    """The jobs of the selected tests of this file, and those that some of them resume."""
    wanted = selected(request, "job")
    first = [j for j in TRAINED if j in wanted or j.file in {w.load for w in wanted}]
    return [*first, *(j for j in CONTINUED if j in wanted)]


def save_inputs(path: Path, jobs: list[Job]) -> None:
    """Write the models and adapters of these jobs."""
    reference.save_models(path, {j.model for j in jobs} - FAMILY.keys())
    for name in FAMILY.keys() & {j.model for j in jobs}:
        save_tiny(FAMILY[name].tiny, path / name, name)
    for name in {j.adapter for j in jobs}:
        model, _, targets = ADAPTERS[name]
        adapter_reference.write_adapter(path / model, path / name, targets, RANK, ALPHA, shared_in(name))


def run_jobs(
    path: Path,
    jobs: list[Job],
    emulated: bool = False,
    dtype: str = "float32",
    steps: Mapping[str, Step] = STEP,
) -> None:
    """`steps`: of each model."""
    cases = {}
    for model in {j.model for j in jobs}:
        step = steps[model]
        rows, *_ = sampled_for(step, path)
        cases[model] = Case(model, step.algorithm, rows, step.budget, step.at_step_start, model, dtype=dtype)
    torch.save((jobs, cases), path / "work.pt")
    ranks = [j.layout.ranks for j in jobs]
    launch("helpers.workers.adapter_worker:run", ranks, str(path), timeout=1800, emulated=emulated)


@cache
def expected(directory: Path, adapter: str) -> Expected:
    model, *_ = ADAPTERS[adapter]
    return adapter_reference.expected(directory / model, directory / adapter, STEP[model], shared_in(adapter))


@cache
def result_of(directory: Path, file: str) -> dict[str, Any]:
    # This test and its ranks wrote both files, in a temporary directory of their own.
    result: dict[str, Any] = torch.load(directory / f"{file}.pt", weights_only=False)
    return result


@each_job
def test_log_probs_with_and_without_adapters_are_those_of_transformers(directory: Path, job: Job) -> None:
    """Without: the fixed reference policy, which needs no second copy of the weights."""
    result, wanted = result_of(directory, job.file), expected(directory, job.adapter)
    torch.testing.assert_close(result["logp_r"], wanted.logp_r.float(), rtol=0, atol=2e-5)
    torch.testing.assert_close(result["base_logp_r"], wanted.base_logp_r.float(), rtol=0, atol=1e-5)
    assert (wanted.logp_r - wanted.base_logp_r).abs().max() > 0.1, "the adapters would change nothing"


@each_job
def test_gradients_and_their_norm_are_those_of_the_reference(directory: Path, job: Job) -> None:
    result, wanted = result_of(directory, job.file), expected(directory, job.adapter)
    assert result["loss"] == pytest.approx(wanted.loss, rel=2 * TOLERANCE, abs=1e-6)
    assert result["gradients"].keys() == wanted.gradients.keys()
    nothing = 1e-8 * max(g.abs().max() for g in wanted.gradients.values())
    for name, gradient in wanted.gradients.items():
        difference = (result["gradients"][name] - gradient).abs().max()
        assert difference <= 3 * TOLERANCE * gradient.abs().max() + nothing, name
    assert result["grad_norm"] == pytest.approx(wanted.norm, rel=TOLERANCE)


@each_job
def test_an_update_is_that_of_torch_adamw_and_keeps_the_base(directory: Path, job: Job) -> None:
    result, wanted = result_of(directory, job.file), expected(directory, job.adapter)
    for name, tensor in wanted.updated.items():
        assert (result["updated"][name] - tensor).abs().max() < 5e-3 * UPDATE["lr"], name
    moved = (wanted.updated_logp_r - wanted.logp_r).abs().max()
    assert (result["updated_logp_r"] - wanted.updated_logp_r).abs().max() < 1e-2 * moved
    assert result["base_kept"]


@each_job
def test_memory_is_lent_and_given_back(directory: Path, job: Job) -> None:
    """While a colocated engine generates, the base, the adapters and their states are on the host."""
    result = result_of(directory, job.file)
    assert result["held"] == 0
    assert torch.equal(result["restored_logp_r"], result["updated_logp_r"])


@each_job
def test_only_adapters_have_gradients_and_optimizer_states(directory: Path, job: Job) -> None:
    result = result_of(directory, job.file)
    assert result["trained"] > 0
    assert result["buffers"] <= 2 * result["trained"] + 2048, "every parameter is padded to 64 elements"
    if not job.layout.offload:
        assert result["optimizer"] <= 3 * (2 * result["trained"] + 2048)


@each_job
def test_adapters_and_merged_weights_are_exported_as_they_were_read(directory: Path, job: Job) -> None:
    from safetensors.torch import load_file

    result = result_of(directory, job.file)
    stored = load_file(directory / job.adapter / "adapter_model.safetensors")
    assert result["adapters"].keys() == stored.keys()
    assert all(torch.equal(result["adapters"][name], tensor) for name, tensor in stored.items())
    saved = load_file(directory / f"{job.file}-saved" / "adapter_model.safetensors")
    assert saved.keys() == stored.keys() and all(torch.equal(saved[n], t) for n, t in stored.items())
    merged = expected(directory, job.adapter).merged
    assert result["merged"].keys() == merged.keys()
    assert max((result["merged"][name] - tensor).abs().max() for name, tensor in merged.items()) < 1e-6


@each_job
def test_hugging_face_peft_loads_what_is_saved(directory: Path, job: Job) -> None:
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        directory / job.model,
        dtype=torch.float64,
        experts_implementation="eager",
        attn_implementation="eager",
    )
    saved = directory / f"{job.file}-saved"
    model = peft.PeftModel.from_pretrained(base, saved, autocast_adapter_dtype=False).double().eval()
    rows, *_ = sampled_for(STEP[job.model], directory)
    with torch.no_grad():
        logp_r = torch.cat(reference.log_probs(model, rows, TEMPERATURE))
    wanted = expected(directory, job.adapter)
    torch.testing.assert_close(logp_r, wanted.logp_r, rtol=0, atol=1e-6)


@each_resumed
def test_another_layout_resumes_bit_for_bit(directory: Path, job: Job) -> None:
    """The next update differs by rounding only, so the optimizer's masters and moments are there, too."""
    assert job.load is not None
    before, after = result_of(directory, job.load), result_of(directory, job.file)
    assert after["adapters"].keys() == before["updated"].keys()
    assert all(torch.equal(after["adapters"][n], t) for n, t in before["updated"].items())
    for name, tensor in before["updated_twice"].items():
        assert (after["updated"][name] - tensor).abs().max() < 5e-3 * UPDATE["lr"], name


@pytest.mark.parametrize("job", TRAINED[:1])
def test_a_checkpoint_holds_adapters_only(directory: Path, job: Job) -> None:
    """Each element four times: weight, master and two moments."""
    checkpoint = open_checkpoint(directory / f"{job.file}-checkpoint" / "step_00000001")
    stored = checkpoint.metadata.state_dict_metadata
    sizes = {name: entry.size.numel() for name, entry in stored.items() if hasattr(entry, "size")}
    assert all(".adapter." in name for name in sizes)
    assert sum(sizes.values()) == 4 * result_of(directory, job.file)["trained"]
