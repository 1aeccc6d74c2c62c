"""Models that take images: what is not proven for them is refused by name, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.vision_cases import CONFIGS, PROCESSOR
from transformers import AutoModelForImageTextToText

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.image_families import FAMILIES
from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.memory_model import shard, trained_shard
from megatron_gvpo.planner.search import search
from megatron_gvpo.planner.step_time import model_flops
from megatron_gvpo.planner.workload import Layout, Workload, gpu, parse_lengths
from megatron_gvpo.settings.config import Config, build_config


def config_of(path: Path, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "output_dir": str(path / "run"),
        "model": {"path": str(path)},
        "data": {"train": {"path": "unused"}, "max_prompt_tokens": 64},
        "algorithm": "gvpo",
        "rollout": {"max_tokens": 32},
        "rewards": {"components": [{"name": "math"}]},
        "train": {"steps": 1, "prompts_per_step": 2, "mini_batches": 2},
        "optimizer": {"lr": 1e-4},
    }
    for name, section in sections.items():
        old = values.get(name)
        values[name] = {**old, **section} if isinstance(old, dict) else section
    return build_config(values)


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl_tied"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A config.json as transformers writes it."""
    config = CONFIGS[request.param]()
    kinds = [name for name in FAMILIES if name.startswith("Qwen3" if "qwen3" in request.param else "Qwen2")]
    config.architectures = kinds
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("recipe", ["gvpo", "gpg", "grpo_care", "vspo", "tempsamp_r1", "reg_grpo", "sft"])
def test_methods_accept_a_model_with_images(directory: Path, recipe: str) -> None:
    """The image and video methods of the papers among them; DeepVideo-R1's is reg_grpo."""
    data = {"train": {"path": "unused", "images_key": "images", "demonstration_key": "solution"}}
    check_layout(config_of(directory, algorithm=recipe, data=data), 2)
    split = {"tp": 2, "sequence_parallel": True, "pp": 2}
    check_layout(config_of(directory, algorithm=recipe, data=data, parallel=split), 4)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"parallel": {"cp": 2}}, "parallel.cp=2 is not supported with images"),
        ({"parallel": {"pp": 2, "vpp": 2}}, "parallel.vpp=2 is not supported with images"),
        ({"train": {"share_prompts": True}}, "train.share_prompts=true is not supported with images"),
        (
            {"model": {"train_vision": True}, "parallel": {"overlap_grad_reduce": True}},
            "model.train_vision=true with parallel.overlap_grad_reduce=true",
        ),
        (
            {"algorithm": {"members": [{"name": "exemplars"}]}},
            "algorithm.members: exemplars is not supported with images",
        ),
        ({"algorithm": "ppo"}, "algorithm.critic is not supported with images"),
    ],
)
def test_refused_by_name(directory: Path, sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_layout(config_of(directory, **sections), 4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"image_token_id": 0}, "image_token_id=0 in config.json: expected a token above 0"),
        ({"video_token_id": 10**6}, "video_token_id=1000000 in config.json"),
        ({"vision_config": None}, "no vision_config in config.json"),
        ({"rope_parameters": {"rope_type": "default"}}, "no mrope_section"),
        ({"vocab_size": 131}, "parallel.tp=2 does not divide vocab_size=131"),
    ],
)
def test_a_config_json_that_cannot_be_right(directory: Path, changes: dict[str, Any], problem: str) -> None:
    file = directory / "config.json"
    values = json.loads(file.read_text())
    text = {key: changes[key] for key in changes if key in values["text_config"]}
    values |= {key: value for key, value in changes.items() if key not in text}
    values["text_config"] |= text
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=problem):
        check_layout(config_of(directory, parallel={"tp": 2}), 2)


def test_a_processor_of_another_model(directory: Path) -> None:
    """Servers and the trainer would fail at the first image, with the shapes of some tensor."""
    patch = json.loads((directory / "config.json").read_text())["vision_config"]["patch_size"]
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps(PROCESSOR | {"patch_size": patch}))
    check_layout(config_of(directory), 1)
    file.write_text(json.dumps(PROCESSOR | {"patch_size": 7}))
    problem = f"patch_size=7 in preprocessor_config.json, and vision_config.patch_size={patch} in config.json"
    with pytest.raises(ConfigError, match=problem):
        check_layout(config_of(directory), 1)


def test_axes_of_qwen3_vl_are_interleaved(tmp_path: Path) -> None:
    """Without the key, SGLang and vLLM give the axes other frequencies than transformers and Megatron."""
    config = CONFIGS["qwen3_vl"]()
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    del config.text_config.rope_parameters["mrope_interleaved"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="lack mrope_interleaved=true"):
        check_layout(config_of(tmp_path), 1)


def test_features_go_into_layers_of_the_first_stage(directory: Path) -> None:
    file = directory / "config.json"
    values = json.loads(file.read_text())
    values["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    file.write_text(json.dumps(values))
    config = config_of(directory, parallel={"pp": 2, "stage_layers": [1, 3]})
    with pytest.raises(ConfigError, match=r"the first stage has 1 layers, and .* go into the first 2"):
        check_layout(config, 2)


def test_recomputation_would_lose_gradients_of_features_for_first_layers(directory: Path) -> None:
    file = directory / "config.json"
    values = json.loads(file.read_text())
    values["vision_config"]["deepstack_visual_indexes"] = [0]
    file.write_text(json.dumps(values))
    model = {"path": str(directory), "train_vision": True}
    with pytest.raises(ConfigError, match=r"model\.train_vision=true with parallel\.recompute=full"):
        check_layout(config_of(directory, model=model, parallel={"recompute": "full"}), 1)
    check_layout(config_of(directory, parallel={"recompute": "full"}), 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_planner_counts_their_parameters(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    values["architectures"] = [type(model).__name__]
    (tmp_path / "config.json").write_text(json.dumps(values))
    planned = architecture.load(str(tmp_path))
    assert planned.parameters == sum(p.numel() for p in model.parameters())
    assert planned.vision.parameters == sum(p.numel() for p in model.model.visual.parameters())


def test_a_plan_with_images(directory: Path) -> None:
    """The tower is on the first stage alone, has no gradients, and encodes once in the forward pass."""
    model = architecture.load(str(directory))
    layout = Layout(4, pp=2)
    first, text = (shard(m, layout, 0).dense for m in (model, replace(model, vision=None)))
    assert first - text == model.vision.parameters
    assert trained_shard(model, layout, 0).dense == text
    assert shard(model, layout, 1) == shard(replace(model, vision=None), layout, 1)
    work = Workload(8, 4, 100, parse_lengths("20,max=100"), image_tokens=64)
    added = model_flops(model, work) - model_flops(model, replace(work, image_tokens=0))
    assert added == pytest.approx(model.vision.flops(8 * 4 * 64, 64 * 4))
    best = search(model, gpu("h100"), 4, work).best
    assert {c.layout.cp for c in best} == {c.layout.vpp for c in best} == {1}


def test_a_text_model_has_no_tower_to_train(task: Path) -> None:
    path = task / "model"
    with pytest.raises(ConfigError, match=r"model.train_vision=true: .* has no vision tower"):
        check_layout(config_of(path, model={"path": str(path), "train_vision": True}), 1)
