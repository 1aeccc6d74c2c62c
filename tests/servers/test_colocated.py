"""A trainer and a rollout server take turns with the same memory."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.servers.real_servers import VLLM_FIRST, logprobs, reference, served_config
from helpers.tiny_run import KeepGroups, StopAfter, configure, fit, records

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.groups import Rollout
from megatron_gvpo.observe.rollouts.table import Responses
from megatron_gvpo.servers.launch.start import server_gpus
from megatron_gvpo.servers.launch.supervise import is_healthy
from megatron_gvpo.settings.servers import ServersConfig
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer


def bytes_held(trainer: Trainer) -> tuple[int, int]:
    """(bytes of weights, bytes of optimizer states and gradients that are not the weights' own storage)."""
    policy = trainer.components.policy
    trained = [policy] if policy.critic is None else [policy, policy.critic]
    weights = {t.untyped_storage()._cdata: t.untyped_storage() for p in trained for t in p.model.weights()}
    others = {
        t.untyped_storage()._cdata: t.untyped_storage()
        for part in trained
        for t in (*part.optimizer.tensors(), *part.model.gradient_buffers())
        if t.dim()  # PyTorch's Adam counts its steps on the host
    }
    total = [sum(s.nbytes() for s in storages.values()) for storages in (weights, others)]
    shared = sum(s.nbytes() for key, s in others.items() if key in weights)
    return total[0], total[1] - shared


class LendAfterEveryStep(Callback):
    sizes: tuple[int, int] = (0, 0)

    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        memory = trainer.components.policy.memory
        self.sizes = bytes_held(trainer)
        memory.release("training")
        assert bytes_held(trainer) == (self.sizes[0], 0)
        memory.release("weights")
        memory.release("weights")  # idempotent
        assert bytes_held(trainer) == (0, 0)
        memory.restore("weights")
        memory.restore("training")
        assert bytes_held(trainer) == self.sizes


@pytest.mark.parametrize(
    ("recipe", "dtype", "offload", "rest_by_weights"),
    [
        # Adam's two moments and the gradients in fp32; in bf16 the master weights too.
        ("gvpo", "float32", 0, 3),
        ("gvpo", "bfloat16", 0, 8),
        ("ppo", "float32", 0, 3),
        ("gvpo", "bfloat16", 1, 2),  # gradients: the rest is on the host all the time
    ],
)
def test_lent_memory_comes_back_with_what_was_in_it(
    task: Path, tmp_path: Path, recipe: str, dtype: str, offload: float, rest_by_weights: int
):
    """The run equals, bit for bit, that of a trainer that never lent anything."""
    lender = LendAfterEveryStep()
    for name, callbacks in (("keeps", []), ("lends", [lender])):
        settings = (f"algorithm={recipe}", f"model.dtype={dtype}", f"optimizer.offload_fraction={offload}")
        fit(configure(task, tmp_path / name, *settings), callbacks)
    assert records(tmp_path / "lends") == records(tmp_path / "keeps")
    parameters, rest = lender.sizes
    assert rest == pytest.approx(parameters * rest_by_weights, rel=0.02)


class WhileTraining(Callback):
    """Records the bytes that both sides hold, and kills the sleeping server after the step `kill_in`."""

    def __init__(self, kill_in: int | None) -> None:
        self.kill_in = kill_in
        self.while_generating: list[tuple[int, int]] = []
        self.while_training: list[tuple[int, int]] = []

    def on_start(self, trainer: Trainer) -> None:
        engine = trainer.components.engine
        assert engine.asleep and bytes_held(trainer) != (0, 0)
        led = engine._led

        def noted(result, on_wait):  # type: ignore[no-untyped-def]
            self.while_generating.append(bytes_held(trainer))
            return led(result, on_wait)

        engine._led = noted

    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        [handle] = trainer.components.engine.servers.pool.handles
        [process] = trainer.components.engine.servers.supervisor.processes
        assert handle.asleep.parts == ("weights", "cache")
        assert is_healthy(process.url, 60.0), "`serve`, which knows of no turns, would start it anew"
        self.while_training.append(bytes_held(trainer))
        if step == self.kill_in:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("engine", VLLM_FIRST)
@pytest.mark.parametrize("kill_in", [None, pytest.param(2, marks=pytest.mark.proof)])
@pytest.mark.parametrize("transport", ["colocated", pytest.param("shared", marks=pytest.mark.proof)])
def test_a_run_with_a_colocated_server(
    engine: str, transport: str, kill_in: int | None, task: Path, tmp_path: Path
):
    """Each side holds memory only in its turn, the server has every step's weights, and a server that dies
    while the trainer trains comes back in its own turn.
    """
    colocated = ("rollout.servers.colocated=true", f"rollout.weights.transport={transport}")
    watch = WhileTraining(kill_in)
    fit(served_config(engine, task, tmp_path, *colocated), [watch])
    assert set(watch.while_generating) == {(0, 0)} and len(watch.while_generating) == 4 + 3
    assert all(weights > 0 and rest > 0 for weights, rest in watch.while_training)
    steps = [record for record in records(tmp_path) if record["step"] > 0]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record in steps:  # sampled from the weights that the trainer has, after each of its updates
        assert record["mismatch/abs_max"] < 1e-3


class Versions(Callback):
    """Keeps a transformers model with each version of the weights, and what each step has trained on."""

    def __init__(self) -> None:
        self.models: dict[int, Any] = {}
        self.trained: dict[int, list[tuple[list[int], Rollout]]] = {}  # prompts and responses, by step

    def on_start(self, trainer: Trainer) -> None:
        self.on_step(trainer, trainer.step, None)

    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        self.models[step] = model = reference(Path(trainer.config.model.path))
        model.load_state_dict(dict(trainer.components.policy.weights(on_host=True)), strict=False)

    def on_responses(self, trainer: Trainer, responses: Responses) -> None:
        pairs = [(list(g.prompt.token_ids), rollout) for g in responses.groups for rollout in g.rollouts]
        self.trained[responses.step] = pairs

    def error(self, version: int, span: tuple[int, int], prompt: list[int], rollout: Rollout) -> float:
        """The largest error of a span's log-probs, if the weights of `version` sampled it."""
        expected = logprobs(Path(), prompt, rollout.token_ids, loaded=self.models[version])
        sampled = torch.tensor(rollout.logprobs)
        return float((sampled - expected)[slice(*span)].abs().max())


PARTIAL = (
    *("rollout.servers.colocated=true", "rollout.weights.transport=colocated", "rollout.async_steps=1"),
    *("rollout.over_sampling_prompts=4", "rollout.max_tokens=200", "optimizer.lr=3.0e-3"),
    *("train.max_tokens_per_micro_batch=1024", "data.eval=null", "logging.rollouts.every=1"),
)


@pytest.mark.proof  # test_partial_rollouts.py stops and continues responses on servers of their own
@pytest.mark.parametrize("engine", VLLM_FIRST)
def test_colocated_servers_carry_responses_over_to_the_next_step(engine: str, task: Path, tmp_path: Path):
    """Each part of a carried response has the log-probs of the weights that sampled it, by transformers."""
    watch = Versions()
    fit(served_config(engine, task, tmp_path, *PARTIAL), [watch])
    steps = {record["step"]: record for record in records(tmp_path) if record["step"] > 0}
    assert [*steps] == [*watch.trained] == [1, 2, 3, 4]
    assert steps[1]["response/staleness_max"] == 0
    assert max(record["response/staleness_max"] for record in steps.values()) == 1
    others = []  # errors of carried responses' last parts, by the weights of their first parts
    for step, pairs in watch.trained.items():
        assert len(pairs) == 16
        for prompt, rollout in pairs:
            spans = rollout.spans
            assert spans[0][1] == 0 and spans[-1][2] == len(rollout.token_ids) == len(rollout.logprobs)
            assert all(end == begin for (_, _, end), (_, begin, _) in pairwise(spans))
            versions = [version for version, _, _ in spans]
            assert versions in ([step - 1], [step - 2, step - 1], [step - 2])
            assert all(watch.error(version, (i, j), prompt, rollout) < 5e-4 for version, i, j in spans)
            if len(spans) > 1:
                others.append(watch.error(step - 2, spans[-1][1:], prompt, rollout))
    assert max(others) > 5e-3, "the error does not tell the versions apart"


@pytest.mark.proof
@pytest.mark.parametrize("engine", VLLM_FIRST)
def test_a_run_that_is_resumed_asks_again_for_the_carried_prompts(engine: str, task: Path, tmp_path: Path):
    """The same prompts are trained as often as in a run without an interruption."""
    config = served_config(engine, task, tmp_path, *PARTIAL, "train.steps=12")
    first, second = KeepGroups(), KeepGroups()
    trainer = fit(config, [first, StopAfter(5)])
    assert trainer.step == 5
    fit(config, [second], resume=True)
    ids = [group.prompt.id for group in (*first.groups, *second.groups)]
    assert len(ids) == len(set(ids)) == 48  # one pass over the data
    assert max(record["response/staleness_max"] for record in records(tmp_path) if record["step"]) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.async_steps=0", "rollout.async_steps bounds the age of responses that are carried over"),
        ("rollout.over_sampling_prompts=5", "at most train.prompts_per_step=4"),
        ("rollout.over_sampling_prompts=-1", "greater than or equal to 0"),
        ("rollout.weights.in_flight=wait", "in_flight=wait finishes them: set that to carry"),
        ("rollout.servers.colocated=false", "servers with GPUs of their own"),
        ("rollout.conversation={program: 'agent:run'}", "a program .* would wait for an answer"),
        ("algorithm.allocation=knapsack", "knapsack shares out the responses of a whole step"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(override: str, message: str, task: Path, tmp_path: Path):
    configure(task, tmp_path, "rollout.engine=sglang", *PARTIAL)
    with pytest.raises(ConfigError, match=message):
        configure(task, tmp_path, "rollout.engine=sglang", *PARTIAL, override)


def test_what_cannot_share_a_gpu_is_refused(task: Path, tmp_path: Path):
    colocated = ("rollout.engine=sglang", "rollout.servers.colocated=true")
    with pytest.raises(ConfigError, match=r"transport=broadcast.*same GPU.*shared"):
        configure(task, tmp_path, *colocated)
    with pytest.raises(ConfigError, match=r"async_steps=1.*set it to 0"):
        configure(task, tmp_path, *colocated, "rollout.weights.transport=shared", "rollout.async_steps=1")
    with pytest.raises(ConfigError, match="learned_hint asks the policy for log-probs while responses come"):
        configure(task, tmp_path, *colocated, "rollout.weights.transport=shared", "algorithm=hill")


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        ({"count": 2, "tp": 2}, 4, [[4, 5], [6, 7]]),  # after the trainer's
        ({"count": 2, "tp": 2}, 0, [[0, 1], [2, 3]]),  # `serve`: no trainer here
        ({"count": 4, "tp": 2, "colocated": True}, 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_servers_have_gpus_of_their_own_unless_colocated(
    settings: dict[str, object], ranks: int, expected: list[list[int]]
):
    assert [list(gpus) for gpus in server_gpus(ServersConfig(**settings), 8, ranks)] == expected


def test_too_few_gpus_are_said_before_anything_starts():
    with pytest.raises(ConfigError, match=r"4 GPUs beside the trainer's 6, and this machine has 8"):
        server_gpus(ServersConfig(count=2, tp=2), 8, 6)
