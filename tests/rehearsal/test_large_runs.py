"""The runs on docs/howto/rehearse.md that no example has: hundreds of GPUs, rehearsed on one core."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers import on_null_cuda
from helpers.doc_blocks import blocks

pytestmark = pytest.mark.proof
DEEPSEEK = [
    "model.path=DeepSeek-V3",
    "train.max_tokens_per_micro_batch=4096",
    *("parallel.tp=1", "parallel.pp=8", "parallel.sequence_parallel=false"),
    "parallel.stage_layers=[7, 8, 8, 8, 8, 8, 8, 6]",
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    [text] = (block.text for block in blocks("docs/howto/rehearse.md") if block.language == "yaml")
    assert yaml.safe_load(text)["model"]["path"] == "Qwen3-235B-A22B"
    path = tmp_path / "qwen3_235b.yaml"
    path.write_text(text)
    return path


def test_qwen3_235b_on_256_gpus(file: Path) -> None:
    result = on_null_cuda.rehearse(str(file), "--world", "256", "--ranks", "all-kinds")
    assert result["fits"] and [one["rank"] for one in result["ranks"]] == [0, 255]
    assert on_null_cuda.phase(result, "export")["results"]["parameters"] == 235_093_634_560
    for one in result["ranks"]:
        assert one["host_gib"] < 6
        exact = {part: round(one["parts"][part], 2) for part in ("weights", "gradients", "optimizer")}
        assert exact == {part: one["predicted"][part] for part in exact}


def test_deepseek_v3_on_512_gpus(file: Path) -> None:
    result = on_null_cuda.rehearse(
        str(file), *DEEPSEEK, "--world", "512", "--ranks", "all-kinds", timeout=1200
    )
    assert result["fits"] and [one["rank"] for one in result["ranks"]] == [0, 63, 64, 127, 448, 511]
    # The embedding and three dense layers are on the first stage, the output layer is on the last.
    first, middle, last = (one["parts"]["weights"] for one in result["ranks"][::2])
    assert first > middle and last > middle
