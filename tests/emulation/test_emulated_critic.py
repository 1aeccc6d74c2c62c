"""PPO's critic on emulated GPUs, in fp32 and bf16: values, loss, gradients, updates and a checkpoint.

The fp64 reference and the check in fp32 are those of test_critic.py, which runs on a CPU. In bf16 the bound
is twice the error of transformers in bf16, from the same fp64 numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import test_critic as on_cpu
import torch
from helpers.references.bf16_errors import relative_errors
from helpers.workers.critic_worker import CriticResult
from helpers.workers.gradient_worker import Layout

MODEL = "untied"
LAYOUTS = [Layout(1), Layout(2, tp=2, sequence_parallel=True), Layout(2, pp=2)]
IN_BF16 = [*LAYOUTS, Layout(2, cp=2)]  # attention in fp32 has no context parallelism
each_part = pytest.mark.parametrize(
    "layouts",
    [pytest.param(LAYOUTS[:1], id="single"), pytest.param(LAYOUTS, id="all", marks=pytest.mark.proof)],
)


@each_part
def test_values_gradients_and_checkpoints_do_not_know_the_machine(
    tmp_path: Path, layouts: list[Layout]
) -> None:
    on_cpu.run_layouts(tmp_path, [(layout, MODEL) for layout in layouts], emulated=True)
    wanted = {MODEL: on_cpu.plain(tmp_path, MODEL, on_cpu.HEAD, on_cpu.BIAS)}
    for layout in layouts:
        on_cpu.test_values_gradients_and_checkpoints_do_not_know_the_machine(tmp_path, wanted, layout, MODEL)


@pytest.mark.proof
def test_in_bf16_the_error_is_that_of_transformers(tmp_path: Path) -> None:
    on_cpu.run_layouts(tmp_path, [(layout, MODEL) for layout in IN_BF16], emulated=True, dtype="bfloat16")
    value_r, _, exact = on_cpu.plain(tmp_path, MODEL, on_cpu.HEAD, on_cpu.BIAS)
    other_r, _, other = on_cpu.plain(tmp_path, MODEL, on_cpu.HEAD, on_cpu.BIAS, torch.bfloat16)
    bound = 2 * max(relative_errors(other, exact).values())
    for layout in IN_BF16:
        result: CriticResult = torch.load(tmp_path / f"{layout}-{MODEL}.pt", weights_only=False)
        errors = relative_errors(result.gradients, exact)
        of_values, wanted = ((r.cpu().double() - value_r).norm().item() for r in (result.value_r, other_r))
        print(f"{layout}: gradients {max(errors.values()):.2g}, bound {bound:.2g}")
        print(f"{layout}: values {of_values:.2g}, bound {2 * wanted:.2g}")
        assert result.gradients.keys() == exact.keys()
        assert max(errors.values()) <= bound, (layout, max(errors, key=errors.__getitem__))
        assert of_values <= 2 * wanted, layout
        assert result.at_first_r.abs().max() == 0, "a new head expects nothing"
        assert result.resumed_metrics == result.next_metrics, layout
        assert all(
            torch.equal(result.resumed_weights[name], weight) for name, weight in result.weights.items()
        )
