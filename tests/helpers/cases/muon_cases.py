"""The updates of test_muon.py: models and layouts."""

from __future__ import annotations

from typing import Any

from helpers.workers.gradient_worker import Layout
from helpers.workers.muon_worker import Job

SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
LORA = (("rank", 2), ("alpha", 4))  # with tp=2, a rank has one row of an A whose rows are divided
SMALL = Layout(2, overlap=True, small=True)
EVERY = [
    Job("untied", Layout(1)),
    Job("untied", Layout(1), (("scale", "shape_scaling"), ("nesterov", False))),
    Job("untied", Layout(1), (("scale", "unit_rms_norm"), ("steps", 3), ("momentum", 0.5))),
    Job("untied", Layout(2)),
    Job("untied", SMALL),
    Job("untied", Layout(2, tp=2)),
    Job("untied", Layout(2, **SP)),
    Job("untied", Layout(2, pp=2)),
    Job("untied", Layout(2, cp=2)),
    Job("tied", Layout(2, pp=2)),
    Job("qwen3_moe", Layout(1)),
    Job("qwen3_moe", Layout(2, ep=2)),
    Job("qwen3_moe", Layout(2, **SP, etp=2)),
    Job("deepseek_v3", Layout(2, **SP, ep=2)),
]
# `make test` runs these; the others are proofs.
QUICK = [
    Job("untied", Layout(1)),
    Job("untied", SMALL),
    Job("untied", Layout(2, **SP)),
    Job("tied", Layout(2, pp=2)),
    Job("deepseek_v3", Layout(2, **SP, ep=2)),
    Job("untied", Layout(2, tp=2), adapter=LORA),
    Job("untied", Layout(2, tp=2), load=Layout(1)),
    Job("untied", Layout(2), adapter=LORA, load=Layout(1)),
]
ADAPTERS = [Job("untied", layout, adapter=LORA) for layout in (Layout(1), Layout(2), Layout(2, tp=2))]
RESUMED = [
    Job("untied", Layout(1), load=Layout(1)),
    Job("untied", Layout(2, tp=2), load=Layout(1)),
    Job("untied", Layout(1), load=Layout(2)),
    Job("untied", Layout(2), load=Layout(2, pp=2)),
    Job("qwen3_moe", Layout(2, ep=2), load=Layout(1)),
    Job("untied", Layout(2), adapter=LORA, load=Layout(1)),
]
