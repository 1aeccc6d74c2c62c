"""The fused GPU operations that are chosen from Megatron-Bridge's configuration of every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from references import gradient_reference as reference

from megatron_gvpo.megatron.model.megatron_bridge import open_bridge
from megatron_gvpo.megatron.model.settings import fuse_weight_gradients, fusions, model_settings
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig

LATENT = ("deepseek_v2", "deepseek_v3")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fusions")
    reference.save_models(path)
    return path


@pytest.mark.parametrize("family", reference.CONFIGS)
def test_every_familys_rotation_and_activation_are_fused(family: str, directory: Path):
    """megatron-core rotates packs one sequence after the other unless told otherwise; latent attention has
    another way.
    """
    model = ModelConfig(path=str(directory / family))
    provider = open_bridge(model).to_megatron_provider(load_weights=False)
    found = fusions(provider)
    rotation = {} if family in LATENT else {"apply_rope_fusion": True}
    assert found == rotation | {"bias_activation_fusion": True}
    on_gpu = model_settings(model, ParallelConfig(), on_cpu=False, deterministic=False)
    assert not found.keys() & on_gpu.keys()
    on_cpu = model_settings(model, ParallelConfig(), on_cpu=True, deterministic=False)
    assert all(on_cpu[name] is False for name in found)


def test_layers_that_can_add_their_gradients_do():
    """Transformer Engine's layers, for example, read this attribute in every forward pass."""
    layer, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    layer.fuse_wgrad_accumulation = False  # type: ignore[assignment]
    fuse_weight_gradients([torch.nn.Sequential(layer), torch.nn.Sequential(other)])
    assert layer.fuse_wgrad_accumulation is True
    assert not hasattr(other, "fuse_wgrad_accumulation")
