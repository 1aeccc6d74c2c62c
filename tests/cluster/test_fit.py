"""A configuration that the planner expects not to fit is told before a start; those that we ship fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers.paths import ROOT

from megatron_gvpo.cli import main
from megatron_gvpo.core.gpus import LocalGpu
from megatron_gvpo.planner.architecture import CONTEXT_BYTES, NCCL_BYTES, RUNTIME_BYTES
from megatron_gvpo.planner.prediction import (
    COMMON_GIB,
    excess,
    least,
    predict,
    reservable_gib,
    smallest_gpu_gib,
    usable_gib,
)
from megatron_gvpo.rehearsal import made_model
from megatron_gvpo.settings.config import Config, load_config

EXAMPLES = ROOT / "examples"
PAPERS = ("gvpo_math_7b", "gpg_math_7b")
# GPUs of the trainer where a file's text does not say eight, and the file before a file that is an overlay.
GPUS = {"recipes/dapo_math_17k": 16}
BASES = {"papers/gvpo_math_1.5b": "papers/gvpo_math_7b", "papers/gpg_zero_7b": "papers/gpg_math_7b"}
EVALUATE = {"recipes/aime_2024", "recipes/aime_2025"}  # they train nothing
KEPT = ["parallel.recompute=none", "train.max_tokens_per_micro_batch=32768", "train.share_prompts=false"]


def shipped() -> list[str]:
    """Files in examples/ of a model that is known by name: the others train tiny models that they make."""
    known = {name.rpartition("/")[2] for name in made_model.known_models()}
    names = []
    for file in sorted(EXAMPLES.rglob("*.yaml")):
        path = (yaml.safe_load(file.read_text()).get("model") or {}).get("path", "")
        if Path(path).name in known:
            names.append(str(file.relative_to(EXAMPLES).with_suffix("")))
    return [name for name in names if name not in EVALUATE]


def loaded(name: str, folder: Path, *changes: str) -> Config:
    files = [str(EXAMPLES / f"{file}.yaml") for file in (BASES.get(name), name) if file is not None]
    path = load_config(files, changes).model.path
    return load_config(files, [*changes, f"model.path={made_model.prepare(path, 'model.path', folder)}"])


def test_the_papers_are_among_them():
    assert {f"papers/{name}" for name in PAPERS} <= set(shipped())


@pytest.mark.parametrize("name", shipped())
def test_every_example_fits_the_gpus_that_it_names(name: str, tmp_path: Path):
    config, gpus = loaded(name, tmp_path), GPUS.get(name, 8)
    assert excess(config, gpus, COMMON_GIB) is None
    assert least(config, gpus) < 74  # GiB: what sleeping servers leave of 80 GB


def test_the_papers_step_did_not_fit_before_the_mlp_was_recomputed(tmp_path: Path):
    """The example was shipped so: 105 of 79.6 GiB, for 32,768 tokens a micro-batch."""
    config = loaded("papers/gpg_math_7b", tmp_path, *KEPT)
    assert "the update needs about 1" in excess(config, 8, COMMON_GIB)
    assert excess(config, 8, 139.8) is None  # an H200
    assert excess(config, 7, COMMON_GIB) is None  # tp=2 does not divide 7 ranks: another check's error


def test_a_sleeping_server_takes_its_part():
    assert usable_gib(79.6, colocated=True) == pytest.approx(74.0, abs=0.1)
    assert usable_gib(79.6, colocated=False) == pytest.approx(74.8, abs=0.1)


@pytest.mark.parametrize("colocated", [False, True])
def test_plan_and_rehearsal_differ_by_fragmentation_alone(colocated: bool):
    """Tensors that just fit a plan, with the fragmentation that it assumes, just fit a rehearsal."""
    assumed = (RUNTIME_BYTES - CONTEXT_BYTES - NCCL_BYTES) / 2**30
    tensors = usable_gib(79.6, colocated) - RUNTIME_BYTES / 2**30
    assert tensors + assumed == pytest.approx(reservable_gib(79.6, colocated)) and 2.2 < assumed < 2.3
    for gpu_gib in (2.7, 40.0, 79.6, 139.8):
        reserved = reservable_gib(gpu_gib, colocated)
        assert smallest_gpu_gib(reserved, colocated) == pytest.approx(gpu_gib)


def test_train_warns_on_a_gpu_that_is_too_small(monkeypatch, tmp_path, capsys):
    from megatron_gvpo.cli import train

    config = loaded("papers/gpg_math_7b", tmp_path, *KEPT)
    for memory, warning in ((79.6, "warning: the update needs about 1"), (139.8, "")):
        monkeypatch.setattr(
            "megatron_gvpo.checks.preflight.torch_gpus",
            lambda memory=memory: [LocalGpu(0, "H", memory, (9, 0), 18)],
        )
        train._warn_of_memory(config, 8)
        assert capsys.readouterr().err.startswith(warning) and bool(warning) == (memory < 100)


@pytest.mark.parametrize("changes", [KEPT, []], ids=["kept", "recomputed"])
def test_slurm_warns_before_the_job_waits(changes, tmp_path, capsys):
    path = made_model.prepare("Qwen2.5-Math-7B", "model.path", tmp_path)
    (tmp_path / "p.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    values = [f"model.path={path}", f"data.train.path={tmp_path / 'p.jsonl'}", "eval.every=0"]
    values += [f"output_dir={tmp_path / 'run'}", "data.eval=null", *changes]
    file = str(EXAMPLES / "papers/gpg_math_7b.yaml")
    code = main(["slurm", file, *values, "--nodes", "1", "--dry-run"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert ("warning: on a GPU of 80 GB the update needs about 1" in captured.err) == bool(changes)


QWEN_7B = """
output_dir: runs/x
model: {path: Qwen2.5-7B}
data: {train: {path: train.jsonl}}
parallel: {tp: 2, sequence_parallel: true}
train: {steps: 20, prompts_per_step: 64, mini_batches: 2}
optimizer: {lr: 1e-5}
"""


def of_qwen_7b(folder: Path, *changes: str) -> Config:
    """Qwen2.5-7B with tp 2; `changes` may name a known model as its critic or teacher."""
    (folder / "run.yaml").write_text(QWEN_7B)
    return made_model.with_directories(load_config([folder / "run.yaml"], changes), folder / "models")


@pytest.mark.parametrize("recipe", ["opd", "opd_full"])
def test_a_teacher_that_the_trainer_holds_counts(tmp_path: Path, recipe: str):
    """2 bytes for each of 72.7e9 parameters on two ranks are 68 GiB, beside the policy's 27."""
    changes = [f"algorithm={recipe}", "rewards.components=[]"]
    large = of_qwen_7b(tmp_path, "teacher.path=Qwen2.5-72B", *changes)
    assert predict(large, 16)["teacher"] > 68
    assert "the update needs about 1" in excess(large, 16, COMMON_GIB)
    assert excess(of_qwen_7b(tmp_path, "teacher.path=Qwen2.5-0.5B", *changes), 16, COMMON_GIB) is None


def test_a_critic_of_another_directory_has_its_own_size(tmp_path: Path):
    small, equal, large = (
        predict(of_qwen_7b(tmp_path, "algorithm=ppo", f"algorithm.critic.path=Qwen2.5-{size}"), 16)
        for size in ("0.5B", "7B", "32B")
    )
    assert small["critic"] < 2 < 24 < equal["critic"] < 25 < 100 < large["critic"]
    assert large["activations"] > equal["activations"]


def test_the_head_keeps_what_train_head_stash_mb_says(tmp_path: Path):
    heads = []
    for mib in (1024, 2048):
        changes = [f"train.head_stash_mb={mib}", "train.max_tokens_per_micro_batch=32768"]
        heads.append(predict(of_qwen_7b(tmp_path, "algorithm=grpo", *changes), 16)["head"])
    assert [round(head - heads[0], 1) for head in heads] == [0, 1]
