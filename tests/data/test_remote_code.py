"""Python files of a checkpoint run only where the configuration says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.servers.launch.start import DIALECTS
from megatron_gvpo.settings.config import load_config

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
Path({ran!r}).touch()
class Config(Qwen2Config): pass
class Model(Qwen2ForCausalLM): pass
class Tokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def malicious(task: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model whose configuration and tokenizer name classes of a Python file there."""
    model = tmp_path / "model"
    shutil.copytree(task / "model", model)
    (model / "code.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    named = {
        "config.json": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]},
    }
    for file, classes in named.items():
        values = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps(values | {"auto_map": classes}))
    return model


def test_a_checkpoints_code_does_not_run(malicious: Path, tmp_path: Path):
    values = json.loads((malicious / "tokenizer_config.json").read_text())
    (malicious / "tokenizer_config.json").write_text(json.dumps(values | {"tokenizer_class": "Tokenizer"}))
    try:
        load_tokenizer(str(malicious))
    except DataError as error:
        assert "model.trust_remote_code=true: read it first" in str(error)
    settings = {"device": "cpu", "dtype": torch.float32, "batch_size": 1, "end_token_ids": (1,)}
    made = LocalModel(str(malicious), None, **settings)
    assert type(made.model).__module__.startswith("transformers.models.qwen2")
    assert not (tmp_path / "ran").exists()
    load_tokenizer(str(malicious), trust_remote_code=True)
    assert (tmp_path / "ran").exists(), "otherwise this test could not fail"


@pytest.mark.parametrize("engine", DIALECTS)
def test_servers_get_the_option_from_one_key(engine: str, good: Path, task: Path):
    own = [good], [f"rollout.engine={engine}", f"model.path={task / 'model'}"]
    for is_trusted in (False, True):
        config = load_config(own[0], [*own[1], f"model.trust_remote_code={str(is_trusted).lower()}"])
        command = (
            DIALECTS[engine].launch(config.model, config.rollout, ModelCards(config), 1, None, False).command
        )
        assert ("--trust-remote-code" in command) is is_trusted
    with pytest.raises(
        ConfigError, match=r"servers\.args: --trust-remote-code, and model\.trust_remote_code"
    ):
        load_config(own[0], [*own[1], "rollout.servers.args=[--trust-remote-code]"])
