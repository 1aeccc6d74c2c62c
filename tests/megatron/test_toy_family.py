"""A model family that the package does not know, added from outside the package.

`Toy` is Qwen2 under another name. transformers and Megatron-Bridge learn it by their own registries, this
package by an entry in ARCHITECTURES, and nothing else is touched.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from helpers.inputs.rows import make_rows
from helpers.parts_of_a_run import scorer_of
from helpers.references import gradient_reference as reference
from helpers.suite.real_parts import used

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import ARCHITECTURES
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.cpu.bridge import import_bridge
from megatron_gvpo.settings.config import Config, load_config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


class ToyConfig(transformers.Qwen2Config):
    model_type = "toy"


class ToyForCausalLM(transformers.Qwen2ForCausalLM):
    config_class = ToyConfig


@pytest.fixture
def toy(task: Path, tmp_path: Path) -> Config:
    """A configuration with a checkpoint of the family, which transformers knows and this package does not."""
    transformers.AutoConfig.register("toy", ToyConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
    torch.manual_seed(0)
    model = ToyForCausalLM(ToyConfig(**SIZES))
    for name, tensor in model.named_parameters():
        if "norm" in name or "bias" in name:
            tensor.data += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(tmp_path / "model")
    overrides = [f"model.path={tmp_path / 'model'}", f"output_dir={tmp_path / 'run'}"]
    return load_config([task / "run.yaml"], overrides)


def test_a_family_from_outside_scores_as_transformers_does(toy: Config, monkeypatch: pytest.MonkeyPatch):
    saved = json.loads((Path(toy.model.path) / "config.json").read_text())
    assert saved["architectures"] == ["ToyForCausalLM"] and saved["model_type"] == "toy"
    with pytest.raises(ConfigError, match=r"architecture ToyForCausalLM in config\.json; supported: "):
        check_layout(toy, 1)

    monkeypatch.setitem(ARCHITECTURES, "ToyForCausalLM", {"hidden_act": "silu"})
    check_layout(toy, 1)
    rows = make_rows([[1.0, 0.0], [0.5, 0.25]])
    try:
        with parallel.megatron_device():
            if not torch.cuda.is_available():
                import_bridge()
            from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
            from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge
            from megatron.core.models.gpt.gpt_model import GPTModel

            register = MegatronModelBridge.register_bridge(
                source="ToyForCausalLM", target=GPTModel, model_type="toy"
            )
            register(type("ToyBridge", (Qwen2Bridge,), {}))
        logp_r = scorer_of(toy).score(rows, temperature=1.0)
    finally:
        parallel.shut_down()
    with torch.no_grad():
        expected = torch.cat(reference.log_probs(reference.load(Path(toy.model.path)), rows, 1.0))
    torch.testing.assert_close(logp_r.double(), expected, rtol=0, atol=1e-5)
    used("megatron-core and Megatron-Bridge, 1 rank")


def test_what_its_bridge_assumes_is_held_to(toy: Config, monkeypatch: pytest.MonkeyPatch):
    """The entry names the keys that Megatron-Bridge does not follow."""
    monkeypatch.setitem(ARCHITECTURES, "ToyForCausalLM", {"hidden_act": "silu"})
    file = Path(toy.model.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match="builds ToyForCausalLM with hidden_act=silu only"):
        check_layout(toy, 1)
