"""No configuration that we ship runs out of memory on the GPUs that it names: each is rehearsed at true size.

Where servers take turns with the trainer, a part of the GPU stays with them (`planner/prediction.py`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import on_null_cuda
from helpers.paths import ROOT

pytestmark = pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs")

EXAMPLES = ROOT / "examples"
# The files, given in this order, the trainer's GPUs of 80 GB, and keys that the documentation changes.
REHEARSED: dict[str, tuple[list[str], int, list[str]]] = {
    "gvpo_math_7b": (["papers/gvpo_math_7b"], 8, []),
    "gvpo_math_1.5b": (["papers/gvpo_math_7b", "papers/gvpo_math_1.5b"], 8, []),
    "gpg_math_7b": (["papers/gpg_math_7b"], 8, []),
    "gpg_zero_7b": (["papers/gpg_math_7b", "papers/gpg_zero_7b"], 8, []),
    "gpg_1.5b": (["papers/gpg_1.5b"], 8, []),
    "gsm8k": (["recipes/gsm8k"], 8, []),
    "gsm8k, four train": (  # docs/howto/gpus.md
        ["recipes/gsm8k"],
        4,
        ["rollout.servers.colocated=false", "rollout.weights.transport=broadcast"],
    ),
    "gsm8k, adapters": (["recipes/gsm8k", "lora"], 8, []),
    "math": (["recipes/math"], 8, []),
    "deepscaler": (["recipes/deepscaler"], 8, []),
    "reasoning_gym": (["recipes/reasoning_gym"], 8, []),
    "dapo_math_17k": (["recipes/dapo_math_17k"], 16, []),
    "ultrafeedback_dpo": (["recipes/ultrafeedback_dpo"], 8, []),
    "ultrafeedback_reward_model": (["recipes/ultrafeedback_reward_model"], 4, []),
    "gpg_vl_geoqa_3b": (["papers/gpg_vl_geoqa_3b"], 8, []),
    "gpg_vl_classification_2b": (["papers/gpg_vl_geoqa_3b", "papers/gpg_vl_classification_2b"], 8, []),
    "gpg_vl_lisa_2b": (["papers/gpg_vl_geoqa_3b", "papers/gpg_vl_lisa_2b"], 8, []),
    "gpg_vl_sat_2b": (["papers/gpg_vl_geoqa_3b", "papers/gpg_vl_sat_2b"], 8, []),
}
IN_TEST = ("gvpo_math_7b",)  # the largest of the papers, and the fullest
# Not rehearsed: these only evaluate.
OTHERS = {"recipes/aime_2024", "recipes/aime_2025", "recipes/openmathreasoning"}


def test_there_are_no_others() -> None:
    named = {file for files, _, _ in REHEARSED.values() for file in files if "/" in file}
    shipped = {f"{file.parent.name}/{file.stem}" for kind in ("papers", "recipes") for file in _yaml(kind)}
    assert named | OTHERS == shipped and not named & OTHERS


def _yaml(kind: str) -> list[Path]:
    return sorted((EXAMPLES / kind).glob("*.yaml"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_TEST else pytest.mark.proof) for name in REHEARSED]
)
def test_it_fits(name: str) -> None:
    files, gpus, changes = REHEARSED[name]
    paths = [str(EXAMPLES / f"{file}.yaml") for file in files]
    result = on_null_cuda.rehearse(*paths, *changes, "--world", str(gpus))
    assert result["fits"], result["verdict"]
    updates = [phase for phase in result["ranks"][0]["phases"] if phase["name"].endswith("update")]
    assert len(updates) == 2 and not any(phase["results"]["skipped"] for phase in updates)


# Examples that make their own small models, as `NAME/FILE.yaml`; a GPU runs them in bf16.
SMALL: dict[str, list[str]] = {
    "quickstart": ["sft", "gvpo"],
    "calculator": ["gvpo"],
    "search": ["gvpo"],
    "agent_program": ["gvpo"],
    "mcp": ["gvpo"],
    "images": ["sft", "gvpo"],
}


@pytest.mark.proof
@pytest.mark.parametrize(("name", "file"), [(name, file) for name in SMALL for file in SMALL[name]])
def test_a_small_example_runs(name: str, file: str, tmp_path: Path) -> None:
    folder = EXAMPLES / name
    command = [sys.executable, str(folder / "make_task.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    changes = [f"model.path={tmp_path / 'model'}", "model.dtype=bfloat16"]
    result = on_null_cuda.rehearse(str(folder / f"{file}.yaml"), *changes, "--world", "1")
    updates = [phase for phase in result["ranks"][0]["phases"] if phase["name"].endswith("update")]
    assert len(updates) == 2 and not any(phase["results"]["skipped"] for phase in updates)
