"""A run saved under one layout continues under another as if nothing had happened, on real megatron-core.

Adam's moments, its step, the master weights and the schedule must all arrive. With lost moments, or a step
that is counted once for every parameter, the next updates differ by a good part of the learning rate. Tensors
that are compared bit by bit are gathered by the export to Hugging Face names, not by the code that saves.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from helpers.cases.families import FAMILIES
from helpers.cases.gradient_cases import SPLIT, STEPS, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.suite.selected import selected
from helpers.workers.checkpoint_worker import MOVES, PARTS_OF_A_LOAD, PARTS_OF_A_SAVE, QUICK, Continuation
from helpers.workers.gradient_worker import UPDATE, Case, Layout

from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints
from megatron_gvpo.megatron.checkpoint.state import boxes, contiguous_parts
from megatron_gvpo.verify.shrink import save_tiny


def case_of(model: str, directory: Path) -> Case:
    has_rows = model in reference.CONFIGS and model != "untied"
    name = f"{model}, gvpo, groups split" if has_rows else "gvpo, groups split"
    rows, *_ = sampled_for(STEPS[name], directory)
    return Case(name, STEPS[name].algorithm, rows, SPLIT, model=model)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resharding")
    reference.save_models(path)
    for family in FAMILIES:
        if any(family.title == model for model, _ in MOVES):
            save_tiny(family.tiny, path / family.title, family.title)
    return path


EVERY_MOVE = [(model, source, layout) for (model, source), to in MOVES.items() for layout in to]


@pytest.fixture(scope="module")
def results(directory: Path, request: pytest.FixtureRequest) -> Path:
    """Results of one launch of the selected tests' layouts: first those that save, then the others."""
    wanted = selected(request, "model", "source", "layout")
    every = [move for move in EVERY_MOVE if move in wanted]
    cases = {model: case_of(model, directory) for model, _, _ in every}
    saves = [(source, source, cases[model]) for model, source in dict.fromkeys(move[:2] for move in every)]
    moves = [(layout, source, cases[model]) for model, source, layout in every]
    work = []
    for runs in (saves, moves):
        runs.sort(key=lambda run: run[0].ranks)
        work += [list(same) for _, same in groupby(runs, key=lambda run: run[0].ranks)]
    torch.save(work, directory / "work.pt")
    sizes = [runs[0][0].ranks for runs in work]
    launch("helpers.workers.checkpoint_worker:run", sizes, str(directory), timeout=1800)
    return directory


@pytest.mark.parametrize(
    ("model", "source", "layout"),
    [pytest.param(*move, marks=() if move in QUICK else pytest.mark.proof) for move in EVERY_MOVE],
    ids=lambda value: str(value),
)
def test_another_layout_goes_on_as_the_one_that_saved(
    results: Path, model: str, source: Layout, layout: Layout
) -> None:
    stayed, moved = (
        torch.load(results / f"{of}-of-{source}-{model}.pt", weights_only=False) for of in (source, layout)
    )
    assert isinstance(moved, Continuation) and moved.states.keys() == stayed.states.keys()
    for kind, tensors in stayed.states.items():
        assert moved.states[kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(moved.states[kind][name], tensor), f"{kind} of {name}"
    moments = stayed.states["exp_avg"].items()  # to an expert may have come no token
    assert all(moment.any() for name, moment in moments if moment.dim() > 1 and "experts" not in name)
    assert moved.lrs == stayed.lrs
    assert moved.losses == pytest.approx(stayed.losses, rel=1e-4, abs=1e-5)
    assert moved.grad_norms == pytest.approx(stayed.grad_norms, rel=1e-4)
    assert moved.weights.keys() == stayed.weights.keys()
    for name, weight in moved.weights.items():
        assert (weight - stayed.weights[name]).abs().max() < 1e-2 * UPDATE["lr"], name


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5), (5, 1), (2, 1, 3)])
def test_boxes_are_the_run_of_elements(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(prod(shape)).view(shape)
    for begin in range(tensor.numel() + 1):
        for end in range(begin, tensor.numel() + 1):
            parts = []
            for offset, size in boxes(shape, begin, end):
                box = tensor[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
                assert box.shape == size and box.is_contiguous()
                parts.append(box.flatten())
            together = torch.cat(parts) if parts else tensor.flatten()[:0]
            assert torch.equal(together, tensor.flatten()[begin:end])
            assert len(parts) <= 2 * len(shape) - 1, "as few as possible"


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_half_is_cut_into_as_few_runs_as_possible(axis: int) -> None:
    """Grouped experts have gate and up in one tensor: the halves of its second axis."""
    tensor = torch.arange(48).view(2, 6, 4)
    for half in tensor.chunk(2, dim=axis):
        parts = dict(contiguous_parts(half))
        assert len(parts) == tensor.shape[:axis].numel()
        assert torch.equal(torch.cat([part.flatten() for part in parts.values()]), half.flatten())
        for index, part in parts.items():
            assert part.is_contiguous() and torch.equal(half[index], part)


def test_a_process_killed_while_saving_leaves_the_previous_checkpoint(directory: Path) -> None:
    torch.save(case_of("untied", directory), directory / "case.pt")
    with pytest.raises(AssertionError, match="SIGXFSZ"):
        launch("helpers.workers.checkpoint_worker:killed_while_saving", [1], str(directory))
    assert [path.name for path in complete_checkpoints(directory / "killed")] == ["step_00000001"]
    assert (directory / "killed" / "step_00000002.partial").is_dir()


def test_a_kill_at_any_instant_of_saving_a_step_again_leaves_one_of_the_two(directory: Path) -> None:
    torch.save(case_of("untied", directory), directory / "case.pt")
    launch("helpers.workers.checkpoint_worker:saved_again", [1], str(directory))
    loads = torch.load(directory / "again.pt")
    loaded = [number for number, _, _ in loads]
    assert loaded == sorted(loaded) and set(loaded) == {1, 2}, "the first, then the second, never none"
    assert loaded.count(1) > 3 < loaded.count(2), "before files of the new one, and while the old one goes"
    for _, same, names in loads:
        assert same, "weights and state are of one checkpoint"
        assert names == ["step_00000001", "step_00000002"], "the next saves clean up"


def test_a_rank_that_fails_alone_is_heard_of_by_all(directory: Path) -> None:
    """All ranks raise its error where they would have waited for it, and the files on disk stay."""
    ema = {"recipe": "gvpo", "loss": {"reference": {"name": "ema", "decay": 0.9}}}
    torch.save(replace(case_of("untied", directory), algorithm=ema), directory / "case.pt")
    launch("helpers.workers.checkpoint_worker:fails_on_one_rank", [2], str(directory))
    heard = [torch.load(directory / f"heard-{rank}.pt") for rank in (0, 1)]
    assert heard[0] == heard[1]
    ranks = [rank for _, rank in PARTS_OF_A_SAVE] + [rank for _, _, rank in PARTS_OF_A_LOAD]
    *parts, invalid, unread = heard[0]
    whats = [f"write {directory / 'alone' / 'step_00000002'}"] * len(PARTS_OF_A_SAVE)
    whats += [f"read {directory / 'alone' / 'step_00000001'}"] * len(PARTS_OF_A_LOAD)
    for what, rank, message in zip(whats, ranks, parts, strict=True):
        assert message == f"cannot {what}: OSError: [Errno 28] rank {rank} has no space left (on rank {rank})"
    assert re.search(r"Invalid sharding pattern validation(.|\n)*\(on rank 0\)$", invalid)
    assert re.search(r"not mounted/state\.json is missing \(on rank 1\)$", unread)
    assert [path.name for path in complete_checkpoints(directory / "alone")] == ["step_00000001"]


def test_saving_in_the_background_holds_no_copy_of_the_optimizer(directory: Path) -> None:
    """Peak memory rises by a few tensors of 8 MiB. A copy of the optimizer would take 130 MiB."""
    torch.manual_seed(0)
    wide = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    config = transformers.Qwen2Config(**{**reference.COMMON, **wide})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory / "wide")
    case = case_of("untied", directory)
    torch.save(Case(case.name, case.algorithm, case.rows, SPLIT, model="wide"), directory / "case.pt")
    launch("helpers.workers.checkpoint_worker:peak_of_a_save", [1], str(directory))
    sizes = torch.load(directory / "peak.pt")
    assert sizes["optimizer"] > 130 << 20
    assert sizes["rise"] < 40 << 20
