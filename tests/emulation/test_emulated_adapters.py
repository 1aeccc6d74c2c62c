"""Adapters on emulated GPUs, in fp32 and bf16: Transformer Engine's layers under Megatron-Bridge's adapters.

The cases, the fp64 reference and the checks are those of test_adapters.py, which runs the layers of a CPU.
In bf16 the bound is twice the error of Hugging Face's peft in bf16, from the same fp64 gradient; for adapters
of experts, that of transformers with the merged weights in bf16. Under
sequence parallelism they found that Transformer Engine loses a gradient (docs/explanation/audit.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import test_adapters as on_cpu
import torch
from helpers.cases.adapter_cases import shared_in
from helpers.cases.gradient_cases import TEMPERATURE, sampled_for
from helpers.references import adapter_reference
from helpers.references import gradient_reference as reference
from helpers.references.adapter_reference import Expected
from helpers.references.bf16_errors import relative_errors, round_weights
from helpers.suite.selected import selected
from helpers.workers.adapter_worker import Job
from helpers.workers.gradient_worker import Layout

_SP = {"tp": 2, "sequence_parallel": True}
QUICK = [on_cpu.job("untied-all", Layout(2, **_SP))]
# Adapters of experts: in grouped experts gate and up have one A, under either type.
_EXPERTS = [Layout(1), Layout(2, ep=2), Layout(2, **_SP, ep=2)]
# Each also begins with new adapters, before it loads the checkpoint.
RESUMED = [
    on_cpu.job("qwen3_moe-grouped", after, load=on_cpu.job("qwen3_moe-grouped", before))
    for before, after in ((Layout(2, ep=2), Layout(1)), (Layout(1), Layout(2, **_SP, ep=2)))
]
JOBS = [
    *QUICK,
    *(on_cpu.job("untied-all", layout) for layout in (Layout(1), Layout(2, pp=2))),
    *(
        on_cpu.job(adapter, layout)
        for adapter in ("qwen3_moe-grouped", "qwen3_moe-fused")
        for layout in _EXPERTS
    ),
]
# Attention in fp32 has no context parallelism.
_LAYOUTS = [Layout(1), Layout(2, **_SP), Layout(2, pp=2), Layout(2, cp=2)]
JOBS_IN_BF16 = [on_cpu.job("untied-all", layout) for layout in _LAYOUTS]
EXPERTS_IN_BF16 = [
    *(on_cpu.job("qwen3_moe-grouped", layout) for layout in _EXPERTS),
    on_cpu.job("qwen3_moe-fused", Layout(2, ep=2)),
]
# In bf16 a router would send some tokens to other experts; with replay all sides have the same ones.
REPLAYED = replace(on_cpu.STEP["qwen3_moe"], replayed=True)
CHECKS: list[Callable[[Path, Job], None]] = [
    on_cpu.test_log_probs_with_and_without_adapters_are_those_of_transformers,
    on_cpu.test_gradients_and_their_norm_are_those_of_the_reference,
    on_cpu.test_an_update_is_that_of_torch_adamw_and_keeps_the_base,
    on_cpu.test_memory_is_lent_and_given_back,
    on_cpu.test_only_adapters_have_gradients_and_optimizer_states,
    on_cpu.test_adapters_and_merged_weights_are_exported_as_they_were_read,
    on_cpu.test_hugging_face_peft_loads_what_is_saved,
]


def needed_jobs(wanted: list[Job], first: list[Job]) -> list[Job]:
    """Return the jobs of `first` that are wanted or loaded by a wanted job, and those wanted of RESUMED."""
    loaded = {job.load for job in wanted}
    jobs = [job for job in first if job in wanted or job.file in loaded]
    return jobs + [job for job in RESUMED if job in wanted]


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, adapters, and the results of one launch of all jobs that the selected tests need."""
    path = tmp_path_factory.mktemp("emulated-adapters")
    jobs = needed_jobs([*selected(request, "job"), *selected(request, "resumed")], JOBS)
    on_cpu.save_inputs(path, jobs)
    on_cpu.run_jobs(path, jobs, emulated=True)
    return path


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
@pytest.mark.parametrize(
    "job", [pytest.param(j, id=j.name, marks=() if j in QUICK else pytest.mark.proof) for j in JOBS]
)
def test_in_fp32(directory: Path, job: Job, check: Callable[[Path, Job], None]) -> None:
    check(directory, job)


@pytest.mark.proof
@pytest.mark.parametrize("resumed", [pytest.param(job, id=job.name) for job in RESUMED])
def test_adapters_of_experts_resume_in_another_layout(directory: Path, resumed: Job) -> None:
    on_cpu.test_another_layout_resumes_bit_for_bit(directory, resumed)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        ("qwen3_moe-all", "gate and up of experts share one on GPUs under every type"),
        ("qwen3_moe-up", "gate_proj and up_proj of experts have one adapter on GPUs: name both or neither"),
    ],
)
def test_adapters_that_grouped_experts_cannot_have_are_refused(
    tmp_path: Path, adapter: str, problem: str
) -> None:
    job = on_cpu.job(adapter, Layout(1))
    on_cpu.save_inputs(tmp_path, [job])
    with pytest.raises(AssertionError, match=problem):
        on_cpu.run_jobs(tmp_path, [job], emulated=True)


@pytest.fixture(scope="module")
def rounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `directory`, in bf16, of models and adapters with weights that bf16 has."""
    path = tmp_path_factory.mktemp("emulated-adapters-bf16")
    jobs = selected(request, "job_in_bf16")
    on_cpu.save_inputs(path, jobs)
    round_weights(path)
    on_cpu.run_jobs(path, jobs, emulated=True, dtype="bfloat16")
    return path


@pytest.mark.proof
@pytest.mark.parametrize("job_in_bf16", [pytest.param(j, id=j.name) for j in JOBS_IN_BF16])
def test_in_bf16_the_error_is_that_of_peft(rounded: Path, job_in_bf16: Job) -> None:
    job = job_in_bf16
    result, exact = on_cpu.result_of(rounded, job.file), on_cpu.expected(rounded, job.adapter)
    logp_r, gradients = peft_in_bf16(rounded, job)
    bound = 2 * max(relative_errors(gradients, exact.gradients).values())
    errors = relative_errors(result["gradients"], exact.gradients)
    print(f"{job.name}: {max(errors.values()):.2g}, bound {bound:.2g}")
    assert max(errors.values()) <= bound, max(errors, key=errors.__getitem__)
    # The norm of a sum differs by at most the norm of the difference.
    assert result["grad_norm"] == pytest.approx(exact.norm, rel=bound)
    assert error_of(result["logp_r"], exact) <= 2 * error_of(logp_r, exact)
    assert result["base_kept"]
    on_cpu.test_memory_is_lent_and_given_back(rounded, job)
    on_cpu.test_only_adapters_have_gradients_and_optimizer_states(rounded, job)
    loaded = peft_weights(rounded, job)
    assert all(torch.equal(tensor.cpu(), loaded[name]) for name, tensor in result["adapters"].items())


@pytest.fixture(scope="module")
def rounded_experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `rounded`, for adapters of experts, with rows that name the tokens' experts."""
    path = tmp_path_factory.mktemp("emulated-experts-bf16")
    wanted = [*selected(request, "experts_in_bf16"), *selected(request, "resumed_in_bf16")]
    jobs = needed_jobs(wanted, EXPERTS_IN_BF16)
    on_cpu.save_inputs(path, jobs)
    round_weights(path)
    on_cpu.run_jobs(path, jobs, emulated=True, dtype="bfloat16", steps={"qwen3_moe": REPLAYED})
    return path


@pytest.mark.proof
@pytest.mark.parametrize("experts_in_bf16", [pytest.param(j, id=j.name) for j in EXPERTS_IN_BF16])
def test_in_bf16_experts_err_as_transformers_does(rounded_experts: Path, experts_in_bf16: Job) -> None:
    """The worst tensor, and all together, where a small one that cancels does not count, err as there."""
    job, directory = experts_in_bf16, rounded_experts
    result = on_cpu.result_of(directory, job.file)
    inputs = (directory / job.model, directory / job.adapter, REPLAYED, shared_in(job.adapter))
    exact = adapter_reference.expected(*inputs)
    logp_r, gradients = adapter_reference.merged_in_bf16(*inputs)
    for measure in (worst_error, whole_error):
        bound, error = 2 * measure(gradients, exact), measure(result["gradients"], exact)
        print(f"{job.name}, {measure.__name__}: {error:.2g}, bound {bound:.2g}")
        assert error <= bound
    assert result["grad_norm"] == pytest.approx(exact.norm, rel=2 * whole_error(gradients, exact))
    assert error_of(result["logp_r"], exact) <= 2 * error_of(logp_r, exact)
    assert result["base_kept"]
    on_cpu.test_memory_is_lent_and_given_back(directory, job)
    on_cpu.test_only_adapters_have_gradients_and_optimizer_states(directory, job)
    loaded = peft_weights(directory, job)
    assert result["adapters"].keys() == loaded.keys()
    assert all(torch.equal(tensor.cpu(), loaded[name]) for name, tensor in result["adapters"].items())
    assert_merged(result["merged"], exact, directory / job.model)


@pytest.mark.proof
@pytest.mark.parametrize("resumed_in_bf16", [pytest.param(job, id=job.name) for job in RESUMED])
def test_in_bf16_adapters_of_experts_resume_in_another_layout(
    rounded_experts: Path, resumed_in_bf16: Job
) -> None:
    """The next update differs by rounding: by less than a tenth, in the length of all moves."""
    job = resumed_in_bf16
    assert job.load is not None
    before, after = on_cpu.result_of(rounded_experts, job.load), on_cpu.result_of(rounded_experts, job.file)
    assert after["adapters"].keys() == before["updated"].keys()
    assert all(torch.equal(after["adapters"][n], t) for n, t in before["updated"].items())
    moved = distance(before["updated_twice"], before["updated"])
    apart = distance(after["updated"], before["updated_twice"])
    print(f"{job.name}: moved {moved:.3g}, apart {apart:.3g}")
    assert apart < 0.1 * moved


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    squares = [(tensor.double() - other[name].double()).square().sum() for name, tensor in one.items()]
    return torch.stack(squares).sum().sqrt().item()


def worst_error(gradients: dict[str, torch.Tensor], exact: Expected) -> float:
    return max(relative_errors(gradients, exact.gradients).values())


def whole_error(gradients: dict[str, torch.Tensor], exact: Expected) -> float:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in exact.gradients.items()}
    return distance(exact.gradients, gradients) / distance(exact.gradients, zeros)


def assert_merged(merged: dict[str, torch.Tensor], exact: Expected, base: Path) -> None:
    """bf16 rounds the product of an adapter and the sum by 2^-9 of themselves; the bound is twice that."""
    from safetensors.torch import load_file

    before = load_file(base / "model.safetensors")
    assert merged.keys() == exact.merged.keys()
    for name, wanted in exact.merged.items():
        added = (wanted - before[name].double()).abs()
        assert ((merged[name].double() - wanted).abs() <= 2**-8 * (wanted.abs() + added)).all(), name


def error_of(logp_r: torch.Tensor, exact: Expected) -> float:
    return (logp_r.cpu().double() - exact.logp_r).norm().item()


def peft_weights(directory: Path, job: Job) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / job.adapter / "adapter_model.safetensors")


def peft_in_bf16(directory: Path, job: Job) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs and gradients by Hugging Face's peft in bf16, with the loss in fp64."""
    import peft

    step = on_cpu.STEP[job.model]
    base = reference.load(directory / job.model)
    model = peft.PeftModel.from_pretrained(
        base, directory / job.adapter, autocast_adapter_dtype=False, is_trainable=True
    ).bfloat16()
    rows, *_ = sampled_for(step, directory)
    logp = [logp.double() for logp in reference.log_probs(model, rows, TEMPERATURE)]
    step.loss(reference.sample_of(rows, logp)).backward()
    gradients = {
        name.replace(".default.", "."): parameter.grad.double()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return torch.cat(logp).detach(), gradients
