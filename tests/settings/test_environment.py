"""The environment that trainer and servers get where there are GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import on_null_cuda
from helpers.parts_of_a_run import prepared

from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.launch.start import start_servers
from megatron_gvpo.servers.launch.supervise import ServerProcess, Supervisor
from megatron_gvpo.servers.server import Launch
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.settings.servers import ServersConfig

NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_CUMEM_ENABLE", "NVTE_CPU_OFFLOAD_V1", "PYTORCH_ALLOC_CONF")
SERVED = ("rollout.engine=sglang",)
COLOCATED = ("rollout.servers.colocated=true", "rollout.weights.transport=shared")
PINNED = "pinned_max_round_threshold_mb:64"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is taken away again
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {}),
        (("parallel.tp=2",), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (("parallel.cp=2",), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (("parallel.offload_modules=[qkv_linear]",), {"NVTE_CPU_OFFLOAD_V1": "1"}),
        (SERVED, {"NCCL_CUMEM_ENABLE": "0"}),
        ((*SERVED, "rollout.weights.transport=delta"), {"NCCL_CUMEM_ENABLE": "0"}),
        ((*SERVED, "rollout.weights.transport=disk"), {}),
        ((*SERVED, *COLOCATED), {}),
        (("rollout.engine=vllm",), {}),
    ],
)
def test_the_trainer_gets_what_its_settings_need(
    good: Path, overrides: tuple[str, ...], expected: dict[str, str]
):
    """Any run may keep something in pinned memory: reference weights, a teacher, an optimizer."""
    prepared(load_config([good], overrides))
    expected = {"PYTORCH_ALLOC_CONF": PINNED, **expected}
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == expected


def test_what_the_user_set_stays(good: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    prepared(load_config([good], SERVED))
    assert os.environ["NCCL_CUMEM_ENABLE"] == "1"


def test_the_users_own_allocator_stays(good: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    prepared(load_config([good], [*SERVED, *COLOCATED]))
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(("setting", "expected"), [("", 4096), (PINNED, 2100)])
def test_pinned_memory_is_as_large_as_was_asked_for(
    setting: str, expected: int, monkeypatch: pytest.MonkeyPatch
):
    """PyTorch's own allocator on the null CUDA: 2,100 MiB take 4 GiB of the host unless it is told."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    code = """
    import torch
    torch.cuda.init()
    pinned = torch.empty(2100 * 2**20, dtype=torch.uint8, pin_memory=True)
    result = torch.cuda.host_memory_stats()["allocated_bytes.current"] // 2**20
    """
    assert on_null_cuda.run_code(code) == expected


def test_a_server_does_not_get_what_is_megatrons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_CUMEM_ENABLE", "OWN")
    program = f"import os; print(*(os.environ.get(name) for name in {names}))"
    launch = Launch([sys.executable, "-c", program], {"OWN": "2"})
    process = ServerProcess(launch, "http://127.0.0.1:1", tmp_path / "log")
    process.start()
    deadline = time.monotonic() + 60.0
    while process.exit_status() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "log").read_text().split() == ["None", "1", "2"]


@pytest.mark.parametrize(
    ("trainer_gpus", "colocated", "expected"),
    [
        (None, True, ["0,1", "2,3"]),
        ("4,5,6,7", True, ["4,5", "6,7"]),
        ("GPU-a, GPU-b,GPU-c", False, ["GPU-c"]),
    ],
)
def test_servers_get_gpus_that_the_trainer_may_see(
    good: Path,
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer_gpus: str | None,
    colocated: bool,
    expected: list[str],
):
    """CUDA_VISIBLE_DEVICES counts the machine's GPUs; torch counts those that it leaves visible."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if trainer_gpus is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", trainer_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4 if colocated else 3)
    monkeypatch.setattr(Supervisor, "start", lambda self: None)
    servers = ServersConfig(count=len(expected), tp=2 if colocated else 1, colocated=colocated)
    own = (f"model.path={task}/model", "rollout.weights.transport=shared", f"output_dir={tmp_path}")
    config = load_config([good], [*SERVED, *own])
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"servers": servers})})
    launched = [
        process._launch.environment
        for process in start_servers(
            config.model, config.rollout, config.output_dir, ModelCards(config), None, print
        ).processes
    ]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in launched] == expected
    settings = {environment.get("PYTORCH_CUDA_ALLOC_CONF") for environment in launched}
    assert settings == ({"expandable_segments:False"} if colocated else {None})


@pytest.mark.parametrize(
    ("limits", "printed"),
    [
        ((64, 4096), "(256, 4096)"),
        ((64, 64), "this process may open 64 files, and a run needs 256: raise the limit (ulimit -n)"),
    ],
)
def test_a_process_that_may_open_few_files(good: Path, limits: tuple[int, int], printed: str):
    """Fails on the old code: a reward's worker ended with a traceback."""
    program = (
        "import resource\nfrom megatron_gvpo.core.errors import ConfigError\n"
        "from megatron_gvpo.settings.config import load_config\n"
        "from megatron_gvpo.training.environment import prepare\n"
        f"config = load_config([{str(good)!r}])\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
        "try: prepare(config.parallel, config.rollout); print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [printed], done.stderr
