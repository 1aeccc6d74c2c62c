"""The full-scale configurations of both papers load, and agree with the papers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cases.vision_cases import CONFIGS

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.cluster.job import Job, check
from megatron_gvpo.settings.config import load_config

PAPERS = Path(__file__).parents[2] / "examples" / "papers"
FILES = {  # each with the one that it is given after
    "gvpo_math_7b": [],
    "gvpo_math_1.5b": ["gvpo_math_7b"],
    "gpg_math_7b": [],
    "gpg_zero_7b": ["gpg_math_7b"],
    "gpg_1.5b": [],
    "gpg_vl_geoqa_3b": [],
    "gpg_vl_sat_2b": ["gpg_vl_geoqa_3b"],
    "gpg_vl_classification_2b": ["gpg_vl_geoqa_3b"],
    "gpg_vl_lisa_2b": ["gpg_vl_geoqa_3b"],
}


def load(name: str, *overrides: str):
    return load_config([PAPERS / f"{file}.yaml" for file in [*FILES[name], name]], overrides)


def test_there_are_no_others():
    assert sorted(file.stem for file in PAPERS.glob("*.yaml")) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_papers_configuration_loads_with_its_numbers_beside_it(name):
    config = load(name)
    recipe = "gvpo" if name.startswith("gvpo") else "gpg"
    method = AlgorithmConfig.model_validate(recipe)
    if "_vl_" in name:  # the scripts of the paper's code have another threshold for images
        policy = method.batch_policy.model_copy(update={"threshold": 0.4, "max_rounds": 20})
        method = method.model_copy(update={"batch_policy": policy})
    assert config.algorithm == method
    text = (PAPERS / f"{name}.yaml").read_text()
    assert "Published" in text and f"arXiv {'2504.19599' if recipe == 'gvpo' else '2504.02546'}" in text


@pytest.mark.parametrize("name", FILES)
def test_a_papers_servers_and_trainer_fit_on_a_node_of_eight_gpus(
    name: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Servers and trainer share the eight GPUs; a small model has room for as many tokens as the paper's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    # The paper's own rewards: a job without them is refused.
    rewards = "".join(f"def {name}(prompt, rollout): ...\n" for name in ("accuracy", "cosine", "iou"))
    (tmp_path / "data" / "rewards.py").write_text(rewards)
    model = json.loads((task / "model" / "config.json").read_text())
    if "_vl_" in name:
        model = json.loads(CONFIGS["qwen2_5_vl_tied"]().to_json_string())
        model["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    model.get("text_config", model)["max_position_embeddings"] = 131072
    (tmp_path / "config.json").write_text(json.dumps(model))
    check(load(name, f"model.path={tmp_path}", f"output_dir={tmp_path / 'run'}"), Job(nodes=1))


def test_gvpos_setting():
    config = load("gvpo_math_7b")
    assert (config.rollout.n, config.train.prompts_per_step, config.train.mini_batches) == (5, 1024, 4)
    assert config.train.steps == pytest.approx(10 * 7500 / 1024, abs=1)
    assert config.optimizer.lr == 5e-6 and config.algorithm.loss.beta == 0.1
    assert load("gvpo_math_1.5b").rollout.n == 8
    mixed = load("gvpo_math_1.5b", "algorithm=gvpo_history", "rollout.n=5", "algorithm.members.0.count=3")
    assert mixed.rollout.n + mixed.algorithm.members[0].count == 8


def test_gpgs_settings():
    assert load("gpg_math_7b").algorithm.batch_policy.threshold == 0.6
    assert load("gpg_math_7b").train.steps == pytest.approx(7500 / 32, abs=1)
    zero = load("gpg_zero_7b")
    assert (zero.train.steps, zero.train.prompts_per_step, zero.rollout.n) == (1100, 144, 8)
    small = load("gpg_1.5b")
    assert (small.rollout.n, small.rollout.temperature, small.rollout.max_tokens) == (6, 0.7, 3584)


def test_gpgs_settings_for_images():
    """Epochs of the data sets' sizes; the batch of eight GPUs is the product of the scripts' own sizes."""
    geometry, visual, flowers, lisa = map(load, [name for name in FILES if "_vl_" in name])
    assert geometry.train.steps == pytest.approx(8000 / 16, abs=1)
    assert visual.train.steps == pytest.approx(2 * 12000 / 8, abs=1)
    assert flowers.train.steps == pytest.approx(8 * 4 * 102 / 16, abs=1)
    assert lisa.train.steps == pytest.approx(6 * 239 / 16, abs=1)
    for config in (geometry, visual, flowers, lisa):
        assert config.model.train_vision and config.data.train.images_key == "image"
        assert (config.rollout.n, config.optimizer.lr, config.data.max_prompt_tokens) == (8, 1e-6, 1024)
    assert [c.rollout.max_tokens for c in (geometry, visual, flowers)] == [256, 700, 256]
    assert [c.rollout.temperature for c in (visual, lisa)] == [1.0, 0.9]
