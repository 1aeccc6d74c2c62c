"""DeepEP beside all-to-all: the same update, and one line where it cannot be.

megatron-core's own dispatcher runs, over a stand-in of DeepEP's Buffer on CPUs (deep_ep_on_cpu.py). DeepEP's
kernels have not run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.gradient_cases import STEPS, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.workers.exchange_worker import LAYOUTS
from helpers.workers.gradient_worker import Case
from pydantic import ValidationError

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.megatron import parallel  # noqa: F401 - before megatron.core
from megatron_gvpo.megatron.model.settings import check_exchange
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig

MODELS = ("qwen3_moe", "deepseek_v3")
DEEPEP = ParallelConfig(ep=2, ep_exchange="deepep")


def test_gradients_are_those_of_all_to_all(tmp_path: Path) -> None:
    reference.save_models(tmp_path, MODELS)
    cases = []
    for model in MODELS:
        step = STEPS[f"{model}, gvpo, groups split"]
        rows, *_ = sampled_for(step, tmp_path)
        cases.append(Case("update", step.algorithm, rows, step.budget, model=model, replays=False))
    torch.save(cases, tmp_path / "work.pt")
    launch("helpers.workers.exchange_worker:run", [layout.ranks for layout in LAYOUTS], str(tmp_path))
    for layout in LAYOUTS:
        results = torch.load(tmp_path / f"results-{layout}.pt", weights_only=False)
        for model in MODELS:
            (logp_r, own), (wanted_r, wanted) = (results[model, name] for name in ("deepep", "a2a"))
            torch.testing.assert_close(logp_r, wanted_r, rtol=0, atol=1e-6)
            assert own.metrics["loss"] == pytest.approx(wanted.metrics["loss"], rel=1e-6)
            assert own.gradients.keys() == wanted.gradients.keys()
            for key, gradient in wanted.gradients.items():
                difference = (own.gradients[key] - gradient).abs().max()
                assert difference <= 1e-6 * gradient.abs().max() + 1e-9, (model, key)


@pytest.mark.parametrize("sizes", [{"ep": 1}, {"ep": 6}, {"ep": 2, "etp": 2}])
def test_sizes_without_kernels_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"ep_exchange=deepep with ep=\d and etp=\d: DeepEP's kernels"):
        ParallelConfig(**sizes, ep_exchange="deepep")


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "message"),
    [
        ("bfloat16", True, "parallel.ep_exchange=deepep: DeepEP's kernels need GPUs"),
        ("float32", False, "in bfloat16 only, not model.dtype=float32"),
        ("bfloat16", False, "megatron-core cannot import DeepEP 1.2 here"),
    ],
)
def test_a_machine_that_cannot_have_it_is_told_in_one_line(dtype: Any, on_cpu: bool, message: str) -> None:
    model = ModelConfig(path="unused", dtype=dtype)
    check_exchange(model, ParallelConfig(ep=2), on_cpu)
    with pytest.raises(ConfigError, match=message) as error:
        check_exchange(model, DEEPEP, on_cpu)
    assert "\n" not in str(error.value)
