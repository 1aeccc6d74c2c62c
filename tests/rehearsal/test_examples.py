"""No configuration that we ship runs out of memory on the GPUs that it names: each is rehearsed at true size.

Where servers take turns with the trainer, a part of the GPU stays with them (`planner/prediction.py`).
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers import on_null_cuda
from helpers.paths import ROOT

EXAMPLES = ROOT / "examples"
# The files, given in this order, the trainer's GPUs of 80 GB, and keys that the documentation changes.
REHEARSED: dict[str, tuple[list[str], int, list[str]]] = {
    "gvpo_math_7b": (["papers/gvpo_math_7b"], 8, []),
    "gvpo_math_7b, entropy bonus": (["papers/gvpo_math_7b"], 8, ["algorithm.loss.entropy_coef=0.001"]),
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
    "gsm8k, adapters": (["recipes/gsm8k", "lora"], 8, ["rollout.weights.transport=shared"]),
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


@dataclass(frozen=True)
class Small:
    """Files given in this order, and what the directories of their models are in the material that
    `maker`/make_task.py makes; a GPU runs them in bf16.
    """

    files: list[str]
    maker: str = ""  # its directory in examples/, if that is not the last file's
    models: dict[str, str] = field(default_factory=lambda: {"model.path": "model"})

    @property
    def folder(self) -> Path:
        return EXAMPLES / (self.maker or Path(self.files[-1]).parent)


_STUDENT = {"model.path": "student"}
_TEACHER = {"model.path": "teacher"}
_BOTH = {**_STUDENT, "teacher.path": "teacher"}
SMALL = [
    Small(["quickstart/sft"]),
    Small(["quickstart/gvpo"]),
    Small(["calculator/sft"]),
    Small(["calculator/gvpo"]),
    Small(["search/sft"]),
    Small(["search/gvpo"]),
    Small(["agent_program/sft"]),
    Small(["agent_program/gvpo"]),
    Small(["mcp/sft"]),
    Small(["mcp/gvpo"]),
    Small(["images/sft"]),
    Small(["images/gvpo"]),
    Small(["distill/sft"], models=_STUDENT),
    Small(["distill/sft", "distill/teacher_sft"], models=_TEACHER),
    Small(["distill/rewards"], models=_STUDENT),
    Small(["distill/rewards", "distill/teacher_rewards"], models=_TEACHER),
    Small(["distill/rewards", "distill/opd"], models=_BOTH),
    Small(["distill/rewards", "distill/opd", "distill/opd_full"], models=_BOTH),
    Small(["quickstart/gvpo", "own_method/run"], maker="quickstart"),
    # The quickstart's models stand for the pretrained ones, which are not at hand.
    Small(["smollm2/gvpo"], maker="quickstart"),
    Small(["smollm2/gvpo", "smollm2/reading"], maker="quickstart"),
    Small(
        ["smollm2/gvpo", "smollm2/teach"],
        maker="quickstart",
        models={"model.path": "model", "teacher.path": "model"},
    ),
]


@pytest.mark.proof
@pytest.mark.parametrize("example", SMALL, ids=lambda example: " ".join(example.files))
def test_a_small_example_runs(example: Small, tmp_path: Path) -> None:
    command = [sys.executable, str(example.folder / "make_task.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    changes = [f"{key}={tmp_path / name}" for key, name in example.models.items()]
    paths = [str(EXAMPLES / f"{file}.yaml") for file in example.files]
    result = on_null_cuda.rehearse(*paths, *changes, "model.dtype=bfloat16", "--world", "1")
    updates = [phase for phase in result["ranks"][0]["phases"] if phase["name"].endswith("update")]
    assert len(updates) == 2 and not any(phase["results"]["skipped"] for phase in updates)


NOT_REHEARSED = {
    "recipes/aime_2024": "evaluates only",
    "recipes/aime_2025": "evaluates only",
    "recipes/openmathreasoning": "evaluates only",
    "cpu": "for machines without a GPU",
    "reward_model": "its models are on servers, beside any trainer",
    "tinker/server": "clients choose the steps, so that no step can be made up",
}


def test_every_configuration_is_rehearsed_or_has_a_reason() -> None:
    shipped = {str(file.relative_to(EXAMPLES).with_suffix("")) for file in EXAMPLES.rglob("*.yaml")}
    rehearsed = {file for files, _, _ in REHEARSED.values() for file in files}
    rehearsed |= {file for example in SMALL for file in example.files}
    assert rehearsed | NOT_REHEARSED.keys() == shipped
    assert not rehearsed & NOT_REHEARSED.keys()
