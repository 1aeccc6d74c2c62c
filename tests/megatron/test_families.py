"""Families of models against transformers, as `megatron-gvpo verify` compares them.

A released configuration is shrunk to tiny sizes. Log-probs, every parameter's gradient, the norm that clips,
one update and the exported weights are compared in every layout, and again with overlapped communication and
the sizes of small_constants.py; test_gradient_invariance.py adds methods and many more layouts for the older
families.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from helpers.cases.families import FAMILIES, Family
from helpers.distributed import launch
from helpers.suite.selected import selected

from megatron_gvpo.huggingface.architectures import add_model_types, check_family
from megatron_gvpo.megatron.model.megatron_bridge import open_bridge
from megatron_gvpo.planner.architecture import from_config
from megatron_gvpo.settings.sections import ModelConfig
from megatron_gvpo.verify.layout import ParallelLayout
from megatron_gvpo.verify.measures import Computed, Limits, compare
from megatron_gvpo.verify.run import read_result

each_layout = pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            family,
            layout,
            id=f"{family.architecture}: {layout}",
            marks=() if layout == family.quick else pytest.mark.proof,
        )
        for family in FAMILIES
        for layout in [*family.layouts, *family.small_layouts]
    ],
)
each_small_layout = pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, id=f"{family.architecture}: {layout}", marks=pytest.mark.proof)
        for family in FAMILIES
        for layout in family.small_layouts
    ],
)


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sides' results: one launch runs every family and layout that the selected tests need."""
    path = tmp_path_factory.mktemp("families")
    wanted = selected(request, "family", "layout")
    jobs: list[tuple[str, ParallelLayout | None]] = []
    for family in dict.fromkeys(family for family, _ in wanted):
        folder = path / family.architecture
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(family.tiny))
        jobs.append((family.architecture, None))
        jobs += [(family.architecture, layout) for of, layout in wanted if of == family]
    torch.save(jobs, path / "jobs.pt")
    sizes = [1 if layout is None else layout.ranks for _, layout in jobs]
    launch("helpers.workers.family_worker:run", sizes, str(path), timeout=3600)
    return path


@each_layout
def test_a_family_is_equal_to_transformers(directory: Path, family: Family, layout: ParallelLayout) -> None:
    assert read_result(layout, directory / family.architecture).problem is None


@each_small_layout
def test_a_score_waits_for_the_weights_of_an_update(
    directory: Path, family: Family, layout: ParallelLayout
) -> None:
    scores, late = torch.load(directory / family.architecture / f"{layout}-scores.pt", weights_only=False)
    assert late > 2, "the first stage has several buckets"
    before, after, settled = scores
    assert (after - settled).abs().max() < 1e-4 * (after - before).abs().max()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_a_released_configuration_is_supported(family: Family) -> None:
    assert check_family(family.released, "model.path=m") == family.architecture
    assert check_family(family.tiny, "model.path=m") == family.architecture


@pytest.mark.proof  # it imports Megatron-Bridge
def test_a_released_kimi_k2_is_read_without_its_python_files(tmp_path: Path) -> None:
    [kimi] = [family.released for family in FAMILIES if family.title == "Kimi K2"]
    code = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps(kimi | code))
    read = open_bridge(ModelConfig(path=str(tmp_path), trust_remote_code=True)).hf_pretrained.config
    assert type(read) is transformers.DeepseekV3Config and read.n_routed_experts == 384


def test_what_is_wrong_would_be_seen(tmp_path: Path) -> None:
    """Each quantity alone is moved just beyond its limit."""
    grid = torch.linspace(-1, 1, 8, dtype=torch.float64).view(4, 2)
    right = Computed(torch.zeros(5), {"a": grid, "b": grid}, 2.0, {"a": grid}, {"a": grid})
    limits = Limits()
    assert compare(right, right).problem(limits) is None
    wrong = {
        "log-probs differ": replace(right, logp_r=right.logp_r + 2 * limits.logp),
        "gradient of b differs": replace(right, gradients={"a": grid, "b": grid * (1 + 2 * limits.gradient)}),
        "gradient of a differs by inf": replace(right, gradients={"b": grid}),
        "gradient norm differs": replace(right, norm=2.0 * (1 + 2 * limits.norm)),
        "update of a differs": replace(right, updated={"a": grid + 2 * limits.update * 1e-2}),
        "export changes a": replace(right, exported={"a": grid + 1e-15}),
        "export changes c": replace(right, exported={"a": grid, "c": grid}),
    }
    for message, computed in wrong.items():
        problem = compare(computed, right).problem(limits)
        assert problem is not None and problem.startswith(message) and ";" not in problem


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_the_planner_counts_its_parameters_exactly(family: Family, tmp_path: Path) -> None:
    """Both of the released sizes and of the tiny ones, which differ in their ratios."""
    add_model_types()
    for config in (family.released, family.tiny):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with torch.device("meta"):
            hf_config = transformers.AutoConfig.from_pretrained(tmp_path)
            model = transformers.AutoModelForCausalLM.from_config(hf_config)
        assert from_config(config, "m").parameters == sum(p.numel() for p in model.parameters())
