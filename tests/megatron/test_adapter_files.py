"""Files of adapters that are not what they should be: an error names the tensor, or the header."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_gvpo.cluster.job import MOST_RANKS
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.checked_weights import HEADER
from megatron_gvpo.megatron.adapters.directory import adapter_config, read_adapter
from megatron_gvpo.megatron.adapters.tensors import OwnElements
from megatron_gvpo.settings.adapter import AdapterConfig

OPTIONS = AdapterConfig(rank=2, alpha=4, targets=("q_proj",))
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WHOLE = torch.ones(2, 8)


def read(directory: Path, tensor: Tensor, header: str = "{}") -> dict[str, Tensor]:
    config = adapter_config(OPTIONS, ("q_proj",), "model")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file({NAME: tensor}, directory / "adapter_model.safetensors", metadata={HEADER: header})
    return read_adapter(directory, OPTIONS, ("q_proj",))


def test_a_whole_one_is_read(tmp_path: Path) -> None:
    assert torch.equal(read(tmp_path, WHOLE)[NAME], WHOLE)


@pytest.mark.parametrize(
    ("tensor", "header", "error"),
    [
        (WHOLE.to(torch.float8_e4m3fn), "{}", "is of torch.float8_e4m3fn: want float32"),
        (WHOLE.int(), "{}", "is of torch.int32: want float32"),
        (WHOLE / 0, "{}", "NaN or infinite"),
        (WHOLE, "5", "the checksums in its header are damaged"),
        (WHOLE, "[", "is not whole"),
        (WHOLE, json.dumps({NAME: "elements:0"}), "another checksum"),
    ],
)
def test_a_spoilt_one_is_named(tmp_path: Path, tensor: Tensor, header: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error) as refused:
        read(tmp_path, tensor, header)
    assert "adapter_model.safetensors" in str(refused.value)


def test_the_last_of_many_ranks_tells_its_elements_apart() -> None:
    adapter = torch.nn.Parameter(torch.zeros(3, 2))
    own, wanted = OwnElements([adapter], MOST_RANKS - 1), torch.arange(6.0).view(3, 2)
    with own.numbered():
        numbers = adapter.data.clone()
    assert own.take(wanted, numbers, is_drawn=False) and own.fill()
    assert torch.equal(adapter.data, wanted)
