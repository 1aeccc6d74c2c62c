"""Every layout that tests prove on CPUs, with the settings of GPU runs: megatron-core accepts them.

CPU runs turn ten of these settings off, and a layout was refused on GPUs alone. Transformer Engine, which a
CPU lacks, is taken to be there: some checks ask for its release or for its functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.cases.gradient_cases import PROBES

from megatron_gvpo.megatron.model.megatron_bridge import open_bridge
from megatron_gvpo.megatron.model.routers import routing_settings
from megatron_gvpo.megatron.model.settings import fusions, model_settings
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig

LAYOUTS: dict[str, list[dict[str, Any]]] = {}
for _layout, _model in PROBES:
    if _layout.settings not in LAYOUTS.setdefault(_model, []):
        LAYOUTS[_model].append(_layout.settings)


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *_, **__: True)
    names = [name for name in vars(moe_utils) if name.startswith("fused_")]
    assert len(names) >= 5
    for name in names:
        monkeypatch.setattr(moe_utils, name, object())
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, object())


def finalized(model: ModelConfig, parallel: ParallelConfig, deterministic: bool = False) -> Any:
    """As `build` does on a GPU."""
    bridge = open_bridge(model)
    provider = bridge.to_megatron_provider(load_weights=False)
    settings = fusions(provider) | model_settings(model, parallel, on_cpu=False, deterministic=deterministic)
    settings |= routing_settings(bridge.hf_pretrained.config.get_text_config())
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    return provider


@pytest.mark.parametrize("model", LAYOUTS)
def test_megatron_accepts_every_proven_layout(model: str, directory: Path, transformer_engine: None) -> None:
    assert LAYOUTS[model]
    for settings in LAYOUTS[model]:
        chosen = ModelConfig(path=str(directory / model))
        assert chosen.dtype == "bfloat16"
        provider = finalized(chosen, ParallelConfig(**settings))
        assert provider.tensor_model_parallel_size == settings.get("tp", 1)


def test_shared_experts_that_are_recomputed_are_not_overlapped(
    directory: Path, transformer_engine: None
) -> None:
    """megatron-core refuses both together, and Megatron-Bridge overlaps them in DeepSeek-V3."""
    model = ModelConfig(path=str(directory / "deepseek_v3"))
    parallel = ParallelConfig(recompute="selective", recompute_modules=("shared_experts",))
    assert not finalized(model, parallel).moe_shared_expert_overlap
    for recompute in ("none", "selective", "full"):
        assert finalized(model, ParallelConfig(recompute=recompute)).moe_shared_expert_overlap


@pytest.mark.parametrize(
    ("model", "is_fused"),
    [("untied", False), ("qwen3_moe", True), ("deepseek_v2", False), ("deepseek_v3", True)],
)
def test_routers_are_fused_where_the_kernel_has_their_rule(
    model: str, is_fused: bool, directory: Path, transformer_engine: None
) -> None:
    """DeepSeek-V2's groups are judged by their best expert."""
    provider = finalized(ModelConfig(path=str(directory / model)), ParallelConfig())
    assert provider.moe_router_fusion is is_fused


def test_deepep_is_megatrons_flexible_dispatcher(directory: Path, transformer_engine: None) -> None:
    model = ModelConfig(path=str(directory / "deepseek_v3"))
    assert finalized(model, ParallelConfig(ep=2)).moe_token_dispatcher_type == "alltoall"
    provider = finalized(model, ParallelConfig(ep=2, ep_exchange="deepep"))
    assert (provider.moe_token_dispatcher_type, provider.moe_flex_dispatcher_backend) == ("flex", "deepep")
    assert provider.moe_router_dtype == "fp32" and not provider.moe_shared_expert_overlap
