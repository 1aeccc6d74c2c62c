"""`model.freeze`: weights that match keep their values, the others train; what matches nothing is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.distributed import launch
from helpers.inputs import family_task
from helpers.tiny_run import GVPO, SHORT, configure, fit
from safetensors.torch import load_file

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.megatron.frozen import matches
from megatron_gvpo.settings.config import Config

EXPORTED = tuple(word for word in SHORT if not word.startswith("checkpoint"))


def changed(task: Path, config: Config) -> set[str]:
    """Names of the exported weights that are not those of the model."""
    before = load_file(task / "model" / "model.safetensors")
    after = load_file(Path(config.output_dir) / "hf" / "model.safetensors")
    return {name for name, weight in before.items() if not torch.equal(weight, after[name])}


def test_frozen_weights_keep_their_values_and_the_others_train(task: Path, tmp_path: Path):
    unfrozen = configure(task, tmp_path / "whole", *GVPO, *EXPORTED)
    fit(unfrozen)
    everything = changed(task, unfrozen)
    frozen = "model.freeze=[embedding, decoder.layers.0, '*.linear_fc2']"
    config = configure(task, tmp_path / "run", *GVPO, *EXPORTED, frozen)
    fit(config)
    unchanged = everything - changed(task, config)
    expected = {
        name for name in everything if "embed_tokens" in name or ".layers.0." in name or "down_proj" in name
    }
    assert unchanged == expected and len(unchanged) < len(everything)


def test_the_gradient_passes_a_frozen_embedding_where_layers_are_computed_again(task: Path, tmp_path: Path):
    # With Adam's own eps a gradient of almost 0, which is rounding, would move its weight by the whole rate.
    words = ("model.freeze=[embedding]", "train.steps=1", "optimizer.eps=1.0e-3")
    plain = configure(task, tmp_path / "plain", *GVPO, *EXPORTED, *words)
    fit(plain)
    again = configure(task, tmp_path / "again", *GVPO, *EXPORTED, *words, "parallel.recompute=full")
    fit(again)
    first, second = (
        load_file(Path(config.output_dir) / "hf" / "model.safetensors") for config in (plain, again)
    )
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=1e-5, atol=1e-7)


def test_a_frozen_tied_embedding_is_frozen_on_the_last_stage_of_a_pipeline_too(task: Path, tmp_path: Path):
    """The last stage has a copy as its output layer; Megatron adds its gradient to the first stage's."""
    tied = family_task.make(task, tmp_path / "tied", "Qwen2 (tied)")
    words = ("train.steps=1", "model.freeze=[embedding]", "optimizer.eps=1.0e-3")
    fit(single := configure(tied, tmp_path / "single", *GVPO, *EXPORTED, *words))
    staged = tmp_path / "staged"
    arguments = (str(tied), str(staged), *GVPO, *EXPORTED, *words, "parallel.pp=2")
    launch("helpers.workers.trainer_worker:fit_once", [2], *arguments)
    before, alone = (
        load_file(out / "model.safetensors") for out in (tied / "model", tmp_path / "single" / "hf")
    )
    for name, weight in load_file(staged / "hf" / "model.safetensors").items():
        assert torch.equal(weight, before[name]) == ("embed_tokens" in name), name
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-2 * single.optimizer.lr)


def test_muon_without_a_matrix_to_train_is_refused(task: Path, tmp_path: Path):
    words = ("model.freeze=['*.linear_*']", "optimizer.muon={}")
    with pytest.raises(ConfigError, match=r"optimizer\.muon has no effect: model\.freeze leaves no matrix"):
        fit(configure(task, tmp_path, *GVPO, *EXPORTED, *words))


@pytest.mark.parametrize(
    ("freeze", "error"),
    [
        ("[embeding]", r"model\.freeze: nothing in the model matches 'embeding'; names are such as \w+"),
        ("['*']", r"model\.freeze: a rank would have nothing to train"),
    ],
)
def test_refused(task: Path, tmp_path: Path, freeze: str, error: str):
    with pytest.raises(ConfigError, match=error):
        fit(configure(task, tmp_path / "run", *GVPO, *SHORT, f"model.freeze={freeze}"))


def test_with_adapters_it_has_no_effect(task: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="freeze has no effect with adapter"):
        configure(task, tmp_path / "run", *GVPO, "model.freeze=[embedding]", "model.adapter={rank: 2}")


def test_patterns():
    assert matches("decoder.layers.0.mlp.router.weight", "*.router")
    assert matches("decoder.layers.0.mlp.router.weight", "decoder.layers.0")
    assert not matches("decoder.layers.10.mlp.router.weight", "decoder.layers.1")
    assert matches("embedding.word_embeddings.weight", "embedding.word_embeddings.weight")
