"""An engine from outside the package: a class with the protocol's methods, and one entry in `ENGINES`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from helpers.tiny_run import GVPO, configure, fit, records, weights

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.groups import Group, Rollout
from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints
from megatron_gvpo.settings.servers import ENGINES

pytestmark = pytest.mark.usefixtures("leave_the_process_group")

ANSWERS = ("1", "11", "1111", "1212")  # the reward is variety


class TableEngine:
    """Gives every prompt the same responses. While it waits in step `killed_in`, the run gets SIGTERM."""

    shares_gpus = False
    killed_in = None
    built = None

    def __init__(self, model, rollout, output_dir, cards, task, policy):
        self.version = -1
        self.metrics = {}
        self.table = [task.tokenizer(text)["input_ids"] + [task.end_token_ids[0]] for text in ANSWERS]
        self.policy, self.calls = policy, []
        self.built.append(self)

    def __enter__(self):
        self.calls.append("open")
        return self

    def __exit__(self, *error):
        self.calls.append("closed")

    def sync(self, version):
        size = sum(tensor.numel() for _, tensor in self.policy.weights(on_host=False))
        self.version, self.metrics = version, {"sync/elements": float(size)}
        self.calls.append(f"sync {version}")

    def submit(self, prompts, n, sampling, seed):
        return prompts, n

    def collect(self, tickets, on_wait=None):
        [(prompts, n)] = tickets
        if on_wait is not None:
            if self.killed_in == self.version + 1:
                os.kill(os.getpid(), signal.SIGTERM)
            on_wait()
        self.calls.append(f"{n} for {len(prompts)}")
        return [
            Group(prompt, [Rollout(list(ids), [], "", "stop", self.version) for ids in self.table[:n]])
            for prompt in prompts
        ]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[TableEngine]:
    """The engines that runs have built under the name "table"."""
    built: list[TableEngine] = []
    monkeypatch.setitem(ENGINES, "table", f"{__name__}:TableEngine")
    monkeypatch.setattr(TableEngine, "built", built)
    return built


def test_a_run_samples_from_an_engine_that_the_package_does_not_know(
    task: Path, tmp_path: Path, engines: list[TableEngine]
):
    trainer = fit(configure(task, tmp_path, *GVPO, "rollout.engine=table", "train.steps=2"))
    [engine] = engines
    assert trainer.components.engine is engine
    # Four responses to each of four prompts a step; two to each of four held-out ones before and after.
    evaluation = "2 for 4"
    steps = ["4 for 4", "sync 1", "4 for 4", "sync 2"]
    assert engine.calls == ["open", "sync 0", evaluation, *steps, evaluation, "closed"]
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["response/weight_version"] for line in lines[1:]] == [0, 1]
    assert all(line["train/grad_norm"] > 0 for line in lines[1:])
    exported = sum(tensor.numel() for tensor in weights(tmp_path).values())
    assert {line["sync/elements"] for line in lines[1:]} == {exported}


def test_a_signal_ends_its_waits(task: Path, tmp_path: Path, engines: list[TableEngine], monkeypatch):
    monkeypatch.setattr(TableEngine, "killed_in", 2)
    trainer = fit(configure(task, tmp_path, *GVPO, "rollout.engine=table", "data.eval=null"))
    assert trainer.step == 1 and engines[0].calls[-2:] == ["sync 1", "closed"]
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step_00000001"]


def test_a_name_without_an_engine_is_refused(task: Path, tmp_path: Path):
    problem = r"rollout\.engine: Input should be 'local', 'sglang' or 'vllm' \(given: 'tgi'\)"
    with pytest.raises(ConfigError, match=problem):
        configure(task, tmp_path, "rollout.engine=tgi")
