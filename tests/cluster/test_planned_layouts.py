"""Each layout that a plan writes is accepted by `slurm` and by a start, whatever the files before it say."""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
import yaml
from helpers.cases.families import EVERY_FAMILY, Family

from megatron_gvpo.checks.layout import check_division
from megatron_gvpo.cli import main
from megatron_gvpo.cluster.job import Job, check
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture, command, workload
from megatron_gvpo.planner.search import Candidate, _layouts, search
from megatron_gvpo.servers.launch.start import server_gpus
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.settings.parallel import ParallelConfig

KNOWN = json.loads(resources.files("megatron_gvpo.planner").joinpath("models.json").read_text())
GPU = "h100"
WORK = workload.Workload(1024, 8, 256, workload.parse_lengths("850,p95=2000"), 1, 0, False)
# Sections of a file before the plan, each of a layout that no plan chooses.
EARLIER = {
    "nothing": {},
    "stages": {"parallel": {"pp": 2, "stage_layers": [1, 1], "vpp": 1}},
    "experts": {"parallel": {"ep": 2, "ep_exchange": "deepep"}},
    "chunks": {"parallel": {"pp": 4, "vpp": 2, "cp": 2}},
    "recomputed layers": {"parallel": {"recompute": "full", "recompute_layers": 1}},
    "recomputed parts": {"parallel": {"recompute": "selective", "recompute_modules": ["layernorm"]}},
    "offloaded layers": {"parallel": {"offload_layers": 1}},
    "offloaded parts": {"parallel": {"offload_modules": ["qkv_linear"]}},
    "one server on two nodes": {"rollout": {"servers": {"nodes": 2, "tp": 16}}},
    "running servers": {"rollout": {"servers": {"urls": ["http://node1:30000", "http://node2:30000"]}}},
    "carried responses": {
        "rollout": {
            "over_sampling_prompts": 8,
            "async_steps": 2,
            "servers": {"colocated": True},
            "weights": {"transport": "colocated"},
        }
    },
    "shared prompts": {"train": {"share_prompts": True}},
}


def _options(gpus: int, engine: str, **more: object) -> Namespace:
    values = {"engine": engine, "gpu": GPU, "gpus": gpus, "named": "a model", "model": "a model"}
    values |= {"adapter_rank": 0, "over_sampling_prompts": 0, "async_steps": 1}
    return Namespace(**values | more)


def _refusal(files: list[Path], overrides: list[str], gpus: int) -> str | None:
    """The error of `slurm`, or of `train` before it starts servers, for the command that the plan names."""
    command_line = shlex.split(files[-1].read_text().splitlines()[1].removeprefix("# megatron-gvpo"))
    counts = {name: int(count) for name, count in re.findall(r"--([\w-]+) (\d+)", " ".join(command_line))}
    try:
        config = load_config(files, overrides)
        if command_line[0] == "train":
            check(config, Job(1, ranks_per_node=counts["nproc"], gpus=False), shown=True)
            server_gpus(config.rollout.servers, gpus, counts["nproc"])
        else:
            ranks = counts.get("ranks-per-node", 8)
            check(config, Job(counts["nodes"], counts.get("rollout-nodes", 0), ranks), shown=True)
            assert counts["nodes"] * ranks + 8 * counts.get("rollout-nodes", 0) == gpus, command_line
    except ConfigError as error:
        return str(error)
    return None


def _walked(name: str, gpus: int, colocated: bool) -> list[Candidate]:
    """The best candidate of each kind of layout that a plan finds."""
    model, gpu = architecture.load(name), workload.gpu(GPU)
    try:
        best = search(model, gpu, gpus, WORK, ahead=1, colocated=colocated).best
    except ConfigError:
        return []
    kinds = {
        (*(size > 1 for size in (at.tp, at.pp, at.vpp, at.cp, at.ep)), at.rollout_gpus > 0, at.recompute): one
        for one in reversed(best)
        for at in (one.layout,)
    }
    return list(kinds.values())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Qwen/Qwen2.5-1.5B", (1, 3, 6, 7)),
        ("Qwen/Qwen2.5-7B", (4, 8, 24)),
        pytest.param("Qwen/Qwen2.5-72B", (32, 64), marks=pytest.mark.proof),
        pytest.param("Qwen/Qwen3-30B-A3B", (8, 16), marks=pytest.mark.proof),
        pytest.param("deepseek-ai/DeepSeek-V3", (256,), marks=pytest.mark.proof),
    ],
)
def test_every_layout_of_a_plan_is_accepted(
    name: str, sizes: tuple[int, ...], task: Path, tmp_path: Path
) -> None:
    """From each layout to the next, the files before the plan change from one of `EARLIER` to the next."""
    card = tmp_path / "model" / "config.json"
    card.parent.mkdir()
    card.write_text(json.dumps(KNOWN[name]))
    overrides = [f"model.path={card.parent}", "model.dtype=bfloat16", f"output_dir={tmp_path / 'run'}"]
    earlier = tmp_path / "earlier.yaml"
    plan = tmp_path / "plan.yaml"
    layers, walked, refused = architecture.load(name).layers, 0, []
    for gpus in sizes:
        for colocated in (True, False):
            for candidate in _walked(name, gpus, colocated):
                before = [*EARLIER][walked % len(EARLIER)]
                earlier.write_text(yaml.safe_dump(EARLIER[before]))
                options = _options(gpus, ("sglang", "vllm")[walked % 2])
                plan.write_text(command.overlay(candidate, layers, WORK, options))
                why = _refusal([task / "run.yaml", earlier, plan], overrides, gpus)
                refused += [f"{candidate.layout.name} after {before}: {why}"] if why else []
                walked += 1
    assert walked >= 4 and not refused, f"{len(refused)} of {walked}:\n" + "\n".join(refused[:10])


@pytest.mark.parametrize("before", EARLIER)
def test_a_plan_replaces_each_layout_before_it(before: str, task: Path, tmp_path: Path) -> None:
    """The same plan means the same run after every file."""
    [candidate] = _walked("Qwen/Qwen2.5-7B", 8, True)[:1]
    earlier, plan = tmp_path / "earlier.yaml", tmp_path / "plan.yaml"
    earlier.write_text(yaml.safe_dump(EARLIER[before]))
    plan.write_text(command.overlay(candidate, 28, WORK, _options(8, "vllm")))
    overrides = [f"output_dir={tmp_path / 'run'}", "train.share_prompts=false"]
    alone = load_config([task / "run.yaml", plan], overrides)
    assert load_config([task / "run.yaml", earlier, plan], overrides) == alone


def test_servers_that_a_run_starts_for_itself_leave_fewer_gpus(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job of a node of 8 GPUs with a judge of 2 has 6 ranks, and as many GPUs for rollout servers."""
    card, plan = tmp_path / "model" / "config.json", tmp_path / "plan.yaml"
    card.parent.mkdir()
    card.write_text(json.dumps(KNOWN["Qwen/Qwen2.5-1.5B"]))
    judged = tmp_path / "judged.yaml"
    servers = {"count": 2, "python": "python"}
    judge = {"path": str(card.parent), "servers": servers}
    judged.write_text(
        yaml.safe_dump({"rewards": {"components": [{"name": "math"}, {"name": "grade", "judge": judge}]}})
    )
    files = [str(task / "run.yaml"), str(judged)]
    overrides = [f"model.path={card.parent}", "model.dtype=bfloat16", f"output_dir={tmp_path / 'run'}"]
    own = ["rollout.engine=vllm", "rollout.servers.colocated=true", "rollout.weights.transport=colocated"]
    arguments = ["plan", *files, *overrides, *own, "--write", str(plan)]
    for size in (["--nodes", "1"], ["--nodes", "2"]):
        assert main([*arguments, *size]) == 2
        refusal = capsys.readouterr().err
        assert "servers on 2 GPUs (rewards.components.1.judge.servers) beside its ranks" in refusal
        assert "give --gpus 6, or start these servers elsewhere" in refusal
    assert main([*arguments, "--gpus", "6"]) == 0
    assert _refusal([*map(Path, files), plan], overrides, 6) is None


@pytest.mark.parametrize("family", EVERY_FAMILY, ids=lambda family: family.title)
def test_every_layout_of_a_family_is_one_that_its_model_can_have(family: Family) -> None:
    """With tensor parallelism for a norm over all heads, a plan was refused by its run."""
    card = family.released
    model = architecture.from_config(card, family.title)
    layouts = list(_layouts(model, workload.Layout(64), False, Counter()))
    assert {1, 2} <= {layout.pp for layout in layouts} or model.vision is not None
    for layout in layouts:
        check_division(ParallelConfig.model_validate(command.parallel(layout, model.layers)), card)
