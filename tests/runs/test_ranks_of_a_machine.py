"""Ranks of a run on a machine without a GPU: as many as cores, prompts, the layout and memory allow."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers.tiny_run import GVPO, configure

from megatron_gvpo.cli import main
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture
from megatron_gvpo.training import ranks
from megatron_gvpo.training.ranks import Choice, choose_ranks, rank_memory

GIB = 2**30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Sets what the machine has, as `machine(cores=4, gib=64)`; it has no GPU, no OMP_NUM_THREADS is set."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(ranks, "_has_gpu", lambda: False)

    def set_machine(cores: int, gib: float = 64) -> None:
        monkeypatch.setattr(ranks, "usable_cores", lambda: cores)
        monkeypatch.setattr(ranks, "free_memory", lambda: gib * GIB)

    return set_machine


@pytest.fixture
def config(task: Path, tmp_path: Path):
    return partial(configure, task, tmp_path / "run", *GVPO)


def test_each_core_gets_a_rank_of_one_thread(machine, config) -> None:
    machine(cores=2)
    chosen = choose_ranks(config())
    assert chosen.ranks == 2 and chosen.reason.startswith("2 ranks of one thread: 2 cores, no GPU")


def test_a_step_has_a_prompt_for_each_rank(machine, config) -> None:
    machine(cores=64)
    assert choose_ranks(config("train.prompts_per_step=4")).ranks == 4
    assert choose_ranks(config("train.prompts_per_step=256")).ranks == ranks.MOST


def test_the_layout_divides_the_ranks(machine, config) -> None:
    machine(cores=3)
    assert choose_ranks(config("parallel.tp=2")) == Choice(
        2, "2 ranks of one thread: 3 cores, no GPU (see --nproc)"
    )


def test_ranks_fit_into_memory(machine, config) -> None:
    three = 3 * rank_memory(config(), 3) / GIB
    machine(cores=3, gib=1.01 * three / ranks.ROOM)
    assert choose_ranks(config()).ranks == 3
    machine(cores=3, gib=0.99 * three / ranks.ROOM)
    assert choose_ranks(config()).ranks == 2
    machine(cores=3, gib=1)
    chosen = choose_ranks(config())
    assert chosen.ranks == 1 and "2 ranks would need" in chosen.reason and "0.9 GiB" in chosen.reason


@pytest.mark.parametrize("why", ["one core", "a GPU", "threads", "servers"])
def test_one_rank_stays_one(why: str, machine, config, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(cores=1 if why == "one core" else 4)
    if why == "a GPU":
        monkeypatch.setattr(ranks, "_has_gpu", lambda: True)
    if why == "threads":
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    served = ("rollout.engine=sglang", "rollout.servers.count=1") if why == "servers" else ()
    assert choose_ranks(config(*served)) == Choice(1, "")


def test_more_ranks_than_memory_are_refused_before_any_starts(
    machine, task: Path, tmp_path: Path, capsys
) -> None:
    machine(cores=2, gib=22)
    assert main(["train", f"{task}/run.yaml", f"output_dir={tmp_path}/run", "--nproc", "64"]) == 2
    error = capsys.readouterr().err
    assert "--nproc 64: the libraries of so many processes need 44.8 GiB, and 22.0 GiB are free" in error
    assert error.rstrip().endswith("start at most 31")
    ranks.check_ranks(31)
    with pytest.raises(ConfigError):
        ranks.check_ranks(32)


def test_more_ranks_than_cores_or_predicted_memory_give_a_warning(machine, config) -> None:
    machine(cores=2)
    assert ranks.warning(config(), 2) == ""
    assert ranks.warning(config(), 4) == "4 ranks share 2 cores, which is slower than 2 ranks"
    two = 2 * rank_memory(config(), 2) / GIB
    machine(cores=2, gib=0.99 * two)
    assert f"2 ranks need about {two:.1f} of {0.99 * two:.1f} GiB" in ranks.warning(config(), 2)


def test_memory_of_a_rank_is_that_of_its_parts(task: Path, config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SmolLM2 of 134.5 M parameters took 4.6 GiB a rank with micro-batches of 2,048 tokens."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    smollm2 = architecture.from_config(values, "SmolLM2")
    monkeypatch.setattr(architecture, "load", lambda *_: smollm2)
    without_reference = config("train.max_tokens_per_micro_batch=2048")
    assert smollm2.parameters == pytest.approx(134.5e6, rel=0.001)
    assert rank_memory(without_reference, 2) / GIB == pytest.approx(4.6, rel=0.2)
    # One more copy, of 4 bytes a weight, for a reference that the run keeps.
    with_reference = config("train.max_tokens_per_micro_batch=2048", "algorithm.loss.reference=fixed")
    assert rank_memory(with_reference, 2) - rank_memory(without_reference, 2) == pytest.approx(
        4 * smollm2.parameters
    )


def test_a_container_limits_cores_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert ranks.usable_cores() == 8
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    assert ranks.usable_cores() == 3
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert ranks.free_memory() == 600_000


def test_train_starts_them_and_says_so(task: Path, tmp_path: Path) -> None:
    program = f"""
import sys, megatron_gvpo.training.ranks as ranks, megatron_gvpo.core.launch as launch
from megatron_gvpo.cli import main
ranks.usable_cores = lambda: 2
ranks._has_gpu = lambda: False
launch.launch = lambda count, arguments: print(count, launch._environment(count)["OMP_NUM_THREADS"]) or 0
sys.exit(main(["train", "{task}/run.yaml", "output_dir={tmp_path}/run"]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    notice, started = done.stdout.splitlines()[-2:]
    assert notice.startswith("2 ranks of one thread") and started.split()[0] == "2"
    one = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert "ranks of" not in one.stdout


def test_threads_wait_passively() -> None:
    """They do in every process of the command line, however it is called, unless the user says otherwise."""
    module = "runpy.run_module('megatron_gvpo', run_name='__main__')"
    installed = "megatron_gvpo.cli.main()"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for call, policy in ((module, {}), (installed, {}), (module, {"OMP_WAIT_POLICY": "active"})):
        program = (
            f"import os, runpy, megatron_gvpo.cli\ntry: {call}\n"
            "except SystemExit: print(os.environ['OMP_WAIT_POLICY'])"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, "--version"],
            capture_output=True,
            text=True,
            env=environment | policy,
        )
        assert done.stdout.split()[-1] == policy.get("OMP_WAIT_POLICY", "passive"), done.stderr
