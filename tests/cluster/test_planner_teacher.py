"""The planner counts a teacher: numbers computed by hand, and layouts and passes as the trainer has them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from helpers.doc_blocks import blocks, commands
from helpers.tiny_run import configure, fit

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.cli import main
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.kernels import head
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.megatron.teacher import Teacher as HeldTeacher
from megatron_gvpo.planner import architecture, command, memory_model, search, step_time, workload
from megatron_gvpo.planner.architecture import GIB
from megatron_gvpo.planner.workload import Layout, Lengths, PlannedTeacher, Workload
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.settings.parallel import ParallelConfig

KNOWN = json.loads(resources.files("megatron_gvpo.planner").joinpath("models.json").read_text())
H100 = workload.gpu("h100")
SMALL, LARGE = architecture.load("Qwen/Qwen2.5-7B"), architecture.load("Qwen/Qwen2.5-32B")
LOGPROBS, FULL = PlannedTeacher(LARGE, passes=1), PlannedTeacher(LARGE, passes=0, divergence=True)

# 64 prompts of 200 tokens, 4 responses of 800 to each.
PROMPT, RESPONSE, COUNT = 200, 800, 256
WORK = Workload(64, 4, PROMPT, Lengths(RESPONSE - 1e-6, RESPONSE - 1e-7, RESPONSE), mini_batches=2)

# Qwen2.5-32B: 64 layers of 5120, 40 heads and 8 of keys and values of 128, MLP 27,648, vocabulary 152,064.
WEIGHTS = 2 * 5120 * 5120 + 2 * 5120 * 1024 + 5120 + 2 * 1024 + 3 * 5120 * 27648  # of a layer, but its norms
NORMS, TABLE = 2 * 5120, 152_064 * 5120
ALL = 64 * (WEIGHTS + NORMS) + 2 * TABLE + 5120
PAIRS = COUNT * (PROMPT + RESPONSE) ** 2 / 2
LAYERS = 2 * 64 * (WEIGHTS + NORMS) * COUNT * (PROMPT + RESPONSE) + 4 * 64 * 5120 * PAIRS  # operations
HEAD = 2 * TABLE * COUNT * RESPONSE
REACH = 989e12 * 0.36


def test_the_numbers_by_hand_are_those_of_the_model_and_the_gpu():
    assert ALL == LARGE.parameters == 32_763_876_352
    assert H100.flops(False) == pytest.approx(REACH, rel=1e-3)
    assert (H100.pcie_gb_per_s, H100.network_fraction) == (64, 0.7)
    assert memory_model.TILE_BYTES == head._CUDA_LOGITS


def seconds(layout: Layout, teacher: PlannedTeacher | None, work: Workload = WORK) -> step_time.Seconds:
    return step_time.seconds(SMALL, H100, layout, replace(work, teacher=teacher), 8192)


def test_a_held_teachers_log_probs_cost_a_pass_and_its_way_to_the_gpu_for_every_mini_batch():
    plain, took = seconds(Layout(8), None), seconds(Layout(8), LOGPROBS)
    moved = 2 * 2 * 2 * ALL / (64e9 * 0.7)  # two mini-batches, there and back, 2 bytes a weight
    assert took.teacher == pytest.approx((LAYERS + HEAD) / (8 * REACH) + moved, rel=1e-3)
    assert took.step == pytest.approx(plain.step + took.teacher)
    assert replace(took, teacher=0.0) == plain
    again = seconds(Layout(8), LOGPROBS, replace(WORK, batch_epochs=3))
    assert again.teacher == took.teacher, "the log-probs are read once a step"


def test_a_divergence_costs_a_pass_before_every_update_and_the_teachers_logits_in_the_head():
    once = seconds(Layout(8), FULL).teacher
    assert once == pytest.approx(seconds(Layout(8), LOGPROBS).teacher), "the head's product is in the update"
    thrice = seconds(Layout(8), FULL, replace(WORK, batch_epochs=3)).teacher
    assert thrice == pytest.approx(3 * once)
    beside = seconds(Layout(8), replace(FULL, beside=True)).teacher
    log_probs = 3 * 2 * 152_064 * 3584 * COUNT * RESPONSE / (8 * REACH)  # the policy's, and their gradients
    assert beside == pytest.approx(once + log_probs, rel=1e-3)


def test_a_pipeline_waits_for_its_fullest_stage_of_the_teacher():
    """4 stages, 16 layers of the teacher each, and a bubble of 3 of 2.5 micro-batches and 3."""
    layout = Layout(8, pp=4)
    micro_batches = COUNT * (PROMPT + RESPONSE) / (2 * 8192 * 2)
    moved = 2 * 2 * 2 * (16 * (WEIGHTS + NORMS) + TABLE + 5120) / (64e9 * 0.7)
    by_hand = (LAYERS + HEAD) / (8 * REACH) * (1 + 3 / micro_batches) + moved
    assert seconds(layout, LOGPROBS).teacher == pytest.approx(by_hand, rel=1e-3)


def test_a_held_teacher_fills_the_gpu_in_its_pass():
    """tp=4, pp=2: half of the layers, split in four but for norms, and an eighth of both tables."""
    layout, tokens = Layout(8, tp=4, pp=2), 4096
    weights = 2 * (32 * (WEIGHTS / 4 + NORMS) + TABLE / 4 + 5120)
    layer = 2 * (4 * 5120 + 128 * (2 * 40 + 2 * 8) + 3 * 27648) * tokens / 4
    layer += 4 * (40 + 2) * tokens / 4  # fp32 statistics of the softmax and of two norms
    assert memory_model.teacher_pass(LOGPROBS, layout, 1, tokens) == pytest.approx(weights + layer + 800e6)
    copy = 2 * TABLE / 4
    assert memory_model.teacher_pass(FULL, layout, 1, tokens) == pytest.approx(weights + layer + copy)
    first = weights - 2 * 5120 + layer
    assert memory_model.teacher_pass(FULL, layout, 0, tokens) == pytest.approx(first)
    in_head = copy + 2 * 5120 * tokens + 512 * 2**20
    assert memory_model.teacher_in_head(FULL, layout, tokens) == pytest.approx(in_head)

    alone = memory_model.memory(SMALL, layout, tokens, 4)
    both = memory_model.memory(SMALL, layout, tokens, 4, teacher=LOGPROBS)
    resident = alone.parameters + alone.gradients + alone.optimizer + alone.workspaces + alone.runtime
    assert both.total == pytest.approx(resident + weights + layer + 800e6, rel=0.01) and both.activations == 0
    assert both.total > alone.total
    # A small teacher's pass takes less than the policy's; its part in the head does not.
    small = PlannedTeacher(architecture.load("Qwen/Qwen2.5-0.5B"), 0, divergence=True)
    beside = memory_model.memory(SMALL, Layout(8), tokens, 4, teacher=small)
    assert beside.activations > 0 and beside.teacher == memory_model.teacher_in_head(small, Layout(8), tokens)


def test_the_host_keeps_a_teacher_of_every_rank():
    assert search._teacher_host_gib(LOGPROBS, Layout(8)) == pytest.approx(8 * 2 * ALL / GIB)
    stage = 2 * (16 * (WEIGHTS / 2 + NORMS) + TABLE / 2 + 5120)  # the last of four on two nodes
    before = stage - 2 * TABLE / 2 - 2 * 5120
    host_gib = search._teacher_host_gib(LOGPROBS, Layout(16, tp=2, pp=4))
    assert host_gib == pytest.approx(4 * (stage + before) / GIB)
    assert search._teacher_host_gib(replace(LOGPROBS, gpus=2), Layout(8)) == 0


def test_servers_score_every_token_while_the_trainer_scores():
    served = replace(LOGPROBS, gpus=4)
    alone = (LAYERS + 2 * TABLE * COUNT * (PROMPT + RESPONSE)) / (4 * REACH * 1.1)
    assert step_time.served_seconds(served, H100, WORK) == pytest.approx(alone, rel=1e-3)
    assert step_time.served_seconds(served, H100, replace(WORK, share_prompts=True)) == pytest.approx(
        alone, rel=1e-3
    )
    for scoring in (0.0, 1.0, 100.0):
        took = seconds(Layout(8), served, replace(WORK, scoring=scoring))
        assert took.teacher == pytest.approx(max(0.0, alone - took.scoring), rel=1e-3)
    assert memory_model.memory(SMALL, Layout(8), 4096, 4, teacher=served) == memory_model.memory(
        SMALL, Layout(8), 4096, 4
    )


@pytest.mark.parametrize(
    ("policy", "teacher"),
    [
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-72B"),
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"),
        ("Qwen/Qwen2.5-32B", "Qwen/Qwen3-32B"),
        ("Qwen/Qwen2.5-7B", "mistralai/Mistral-7B-v0.3"),
    ],
)
def test_a_teacher_is_planned_in_the_layouts_that_the_trainer_takes(
    policy: str, teacher: str, task: Path, tmp_path: Path
):
    values = {"policy": KNOWN[policy], "teacher": KNOWN[teacher] | {"sliding_window": None}}
    if teacher.startswith("mistral"):
        values["teacher"]["sliding_window"] = 4096
    for name, config in values.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    own, other = (architecture.load(str(tmp_path / name)) for name in values)
    overrides = ["algorithm=opd", f"teacher.path={tmp_path / 'teacher'}", f"model.path={tmp_path / 'policy'}"]
    base = load_config([task / "run.yaml"], [*overrides, f"output_dir={tmp_path}"])
    planned, refused = (
        set(search._layouts(own, Layout(16), False, Counter(), False, PlannedTeacher(other, 1))),
        0,
    )
    for layout in search._layouts(own, Layout(16), False, Counter()):
        parallel = ParallelConfig.model_validate(command.parallel(layout, own.layers))
        try:
            check_layout(base.model_copy(update={"parallel": parallel}), layout.gpus)
        except ConfigError:
            refused += 1
            assert layout not in planned
        else:
            assert layout in planned
    assert planned and (refused or policy == "Qwen/Qwen2.5-32B")


@pytest.mark.parametrize(
    ("recipe", "epochs"),
    [("opd", 2), ("gvpo_teacher_logprobs", 1), ("opd_full", 2)],
)
def test_a_teacher_passes_as_often_as_it_is_planned_to(
    recipe: str, epochs: int, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Responses that a held teacher scores, or gives hidden states of, per response trained in one pass."""
    seen: Counter[str] = Counter()
    score, states, update = HeldTeacher.score, HeldTeacher.states, Policy.update

    def scored(self, rows):
        seen["scored"] += len(rows)
        return score(self, rows)

    def counted_states(self, packs):
        seen["states"] += sum(map(len, packs))
        return states(self, packs)

    def updated(self, rows, **options):
        seen["trained"] += len(rows)
        return update(self, rows, **options)

    monkeypatch.setattr(HeldTeacher, "score", scored)
    monkeypatch.setattr(HeldTeacher, "states", counted_states)
    monkeypatch.setattr(Policy, "update", updated)
    overrides = [f"algorithm={recipe}", f"teacher.path={task / 'model'}", "train.steps=1", "data.eval=null"]
    fit(configure(task, tmp_path / "run", *overrides, "train.mini_batches=4", f"train.batch_epochs={epochs}"))
    asks = workload.method(recipe, mini_batches=4)
    assert epochs * seen["scored"] == seen["trained"] * asks.teacher_passes
    assert seen["states"] == seen["trained"] * asks.teacher_divergence
    assert seen["trained"] and asks.teacher_passes + asks.teacher_divergence == 1


ASKED = ("plan", "--model", "Qwen/Qwen2.5-7B", "--gpus", "8", "--gpu", "h100", "--k", "4", "--prompts", "64")
LONG = ("--response-length", "800,p95=2000")
BY = ("--teacher", "Qwen/Qwen2.5-32B")


def test_a_plan_with_a_teacher_shows_it_and_becomes_a_configuration(task: Path, tmp_path: Path, capsys):
    out = tmp_path / "plan.yaml"
    written = ("--write", str(out))
    assert main([*ASKED, *LONG, "--recipe", "opd", *BY, *written]) == 0
    printed = capsys.readouterr().out
    assert "teacher s" in printed and ", teacher 1" in printed and "122 GiB of host memory a node" in printed
    (tmp_path / "given.yaml").write_text(
        "algorithm: opd\nteacher: {path: big, server: {parallel: 3}}\noutput_dir: x\n"
    )
    files = [task / "run.yaml", tmp_path / "given.yaml", out]
    assert load_config(files, []).teacher.server is None
    assert main([*ASKED, *LONG, "--recipe", "opd", *BY, "--teacher-gpus", "4", *written, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert best["predicted_gib"]["teacher"] == 0 < best["predicted_seconds"]["teacher"]
    config = load_config(files, [])
    assert (config.teacher.server.tp, config.teacher.server.count, config.teacher.server.parallel) == (
        1,
        4,
        3,
    )
    assert config.rollout.servers.count * config.rollout.servers.tp == 4, "the other four GPUs"

    assert main([*ASKED, *LONG]) == 0
    assert "teacher" not in capsys.readouterr().out
    assert main([*ASKED, *LONG, "--gpus", "24", "--recipe", "opd", *BY, "--teacher-gpus", "8"]) == 0
    assert "give their teacher.server.urls" in capsys.readouterr().out


def test_the_page_shows_what_its_commands_print(capsys: pytest.CaptureFixture):
    command_blocks = [
        block for block in blocks("docs/howto/distillation.md") if "megatron-gvpo plan" in block.text
    ]
    shown = [block for block in blocks("docs/howto/distillation.md") if block.language == "text"]
    assert len(command_blocks) == len(shown) == 2
    for block, printed in zip(command_blocks, shown, strict=True):
        [words] = commands(block)
        assert main(words[1:]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in printed.text.splitlines() if line not in lines] == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--recipe", "opd"], "--recipe opd: name the model that it compares with, --teacher"),
        ([*BY], "--recipe gvpo compares with no teacher; try --recipe opd"),
        (["--teacher-gpus", "2"], "--teacher-gpus 2: name the model of the servers, --teacher"),
        (["--recipe", "opd_full", *BY, "--teacher-gpus", "2"], "needs the teacher's hidden states, and serv"),
        (
            ["--recipe", "opd", *BY, "--teacher-gpus", "8"],
            "--teacher-gpus 8: --gpus 8 leaves none to train on",
        ),
        (["--recipe", "opd", *BY, "--teacher-gpus", "-1"], "--teacher-gpus -1: must be at least 0"),
        (["--recipe", "opd", "--teacher", "none"], "--teacher none: expected a directory with a config.json"),
        (["--recipe", "opd", "--teacher", "Qwen/Qwen2.5-72B", "--teacher-gpus", "1"], "135 GiB of weights"),
        (["--recipe", "opd", "--teacher", "Qwen/Qwen2.5-Math-7B"], "its max_position_embeddings=4096"),
        (
            ["--recipe", "opd", "--teacher", "deepseek-ai/DeepSeek-V3", "--share-prompts"],
            "--share-prompts: a teacher with latent attention cannot share prompts",
        ),
    ],
)
def test_a_teacher_that_cannot_be_planned_is_refused(options: list[str], problem: str, capsys):
    assert main([*ASKED, *LONG, *options]) == 2
    printed = capsys.readouterr().err
    assert problem in printed and printed.count("\n") == 1
