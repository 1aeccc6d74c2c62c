"""The fused GPU operations that are chosen from Megatron-Bridge's configuration of every family."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.references import gradient_reference as reference

from megatron_gvpo.megatron.model.megatron_bridge import open_bridge
from megatron_gvpo.megatron.model.settings import fuse_weight_gradients, fusions, model_settings
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig

LATENT = ("deepseek_v2", "deepseek_v3")  # tiny: their v_head_dim=12 is not a power of two
WITH_EXPERTS = (*LATENT, "qwen3_moe")


@pytest.mark.parametrize("family", reference.CONFIGS)
def test_every_familys_rotation_activation_and_router_are_fused(family: str, directory: Path):
    """megatron-core rotates packs one sequence after the other unless told otherwise."""
    model = ModelConfig(path=str(directory / family))
    provider = open_bridge(model).to_megatron_provider(load_weights=False)
    fused = fusions(provider)
    rotation = {} if family in LATENT else {"apply_rope_fusion": True}
    router = {"moe_router_fusion": True} if family in WITH_EXPERTS else {}
    assert fused == rotation | {"bias_activation_fusion": True} | router
    on_gpu = model_settings(model, ParallelConfig(), on_cpu=False, deterministic=False)
    assert not fused.keys() & on_gpu.keys()
    on_cpu = model_settings(model, ParallelConfig(), on_cpu=True, deterministic=False)
    assert all(on_cpu[name] is False for name in fused)


@pytest.mark.parametrize(
    "change",
    [{"rope_type": "rope"}, {"num_attention_heads": 20}, {"qk_head_dim": 192}, {"v_head_dim": 96}],
)
def test_latent_attention_that_the_fused_rotation_cannot_serve(change: dict[str, Any]):
    """Its blocks of heads are powers of two, and their mask does not know the last block."""
    sizes = {"num_attention_heads": 16, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    latent = {"position_embedding_type": "rope", "multi_latent_attention": True, "rope_type": "yarn", **sizes}
    latent |= {"gated_linear_unit": False, "num_moe_experts": None}
    assert fusions(SimpleNamespace(**latent)) == {"apply_rope_fusion": True}
    assert fusions(SimpleNamespace(**(latent | change))) == {}


def test_layers_that_can_add_their_gradients_do():
    """Transformer Engine's layers, for example, read this attribute in every forward pass."""
    layer, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    layer.fuse_wgrad_accumulation = False  # type: ignore[assignment]
    fuse_weight_gradients([torch.nn.Sequential(layer), torch.nn.Sequential(other)])
    assert layer.fuse_wgrad_accumulation is True
    assert not hasattr(other, "fuse_wgrad_accumulation")
