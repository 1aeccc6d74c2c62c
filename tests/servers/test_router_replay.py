"""Router replay: real servers return their experts, and the trainer computes log-probs through them.

test_gradient_invariance.py tests the gradient, on every layout.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.inputs import moe_task
from helpers.inputs.rows import make_group
from helpers.references import gradient_reference as reference
from helpers.servers.real_servers import engine_with, served_config
from helpers.tiny_run import configure, fit, records

from megatron_gvpo.algorithms.curriculum.batch_policy import Accumulator
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.groups import Group, Prompt, Rollout, Routing
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.observe.mismatch import MismatchWatch
from megatron_gvpo.servers.answers import Routers
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.parallel import Padding
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer
from megatron_gvpo.types import TrainBatch

REPLAY = ("rollout.router_replay=true",)


@pytest.fixture(scope="module")
def moe(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe_task.make(task, tmp_path_factory.mktemp("moe") / "task", pairs=True)


def unpacked(routing: Routing) -> np.ndarray:
    return np.frombuffer(routing.ids, np.uint8).reshape(-1, routing.layers, routing.per_token)


class OwnChoice(Callback):
    """Records the mismatch that the trainer would have if its own routers chose, and samples the last step's
    responses once more, when the server has their prompts in its cache."""

    def __init__(self) -> None:
        self.mismatches: list[dict[str, float]] = []
        self.rows: list[TrainBatch] = []
        self.again: list[list[Rollout]] = []

    def on_start(self, trainer: Trainer) -> None:
        update = trainer._update

        def noted(rows: TrainBatch, *more: Any) -> Any:
            own_r = trainer.components.policy.score(rows.with_columns(routing=None))
            watch = MismatchWatch(1.0)
            watch.compare(rows, own_r, trainer.step)
            self.mismatches.append(watch.take())
            self.rows.append(rows)
            return update(rows, *more)

        trainer._update = noted  # type: ignore[method-assign]

    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        if step == trainer.config.train.steps:
            servers = trainer.components.engine.servers
            prompts = dict.fromkeys(tuple(ids) for ids in self.rows[-1].prompt_ids)
            requests = [Request(prompt, 2, seed=5) for prompt in prompts]
            self.again = servers.loop.run(servers.pool.generate(requests, trainer.config.rollout))


# The plugin lets the engine report experts on a CPU (tests/helpers/on_cpu/PLUGIN).
@pytest.mark.parametrize(
    ("engine", "plugin", "cached"),
    [
        pytest.param("sglang", "pinning_on_cpu", False, marks=pytest.mark.proof),
        pytest.param("sglang", "pinning_on_cpu", True, marks=pytest.mark.proof),
        ("vllm", "triton_on_cpu", True),
    ],
)
def test_a_trainer_that_replays_agrees_with_the_server(
    moe: Path, tmp_path: Path, engine: str, plugin: str, cached: bool
):
    """In every step of a run, whose learning rate is too small to change weights, log-probs agree.

    transformers agrees, too, if the same experts are forced: so they belong to the right tokens and layers,
    also for cached prompts. With SGLang's cache a response's first token may have had other experts: SGLang
    computes a prompt that many requests bring at once for each of them, keeps one copy, and returns the
    experts of that copy.
    """
    own = OwnChoice()
    short = ("train.steps=2", "eval.every=0", "optimizer.lr=1e-30", "optimizer.warmup_steps=0")
    more = [engine_with(plugin, engine, tmp_path)]
    more += [] if cached else ['rollout.servers.args=["--disable-radix-cache"]']
    twins = cached and engine == "sglang"  # of a pair whose experts differ by 0.2 %
    fit(served_config(engine, moe, tmp_path / "run", *REPLAY, *short, *more), [own])
    steps = [record for record in records(tmp_path / "run") if record["step"] > 0]
    assert len(steps) == len(own.mismatches) == 2
    for record, alone in zip(steps, own.mismatches, strict=True):
        assert record["mismatch/abs_mean"] < (1e-4 if twins else 1e-5)
        assert twins or alone["mismatch/abs_mean"] > 10 * record["mismatch/abs_mean"]
    prompts = dict.fromkeys(tuple(ids) for ids in own.rows[-1].prompt_ids)
    again = [Group(Prompt("", ids, ""), responses) for ids, responses in zip(prompts, own.again, strict=True)]
    exact = reference.load(moe / "model")
    for rows in (*own.rows, TrainBatch.from_groups(again)):
        assert rows.routing is not None and None not in rows.routing
        logp_r = torch.cat(reference.log_probs(exact, rows, temperature=1.0)).detach()
        difference_r = (rows.engine_logp_r - logp_r).abs()
        first = torch.tensor([i == 0 for ids in rows.response_ids for i in range(len(ids))])
        assert difference_r[~first].max() < 2e-4 and difference_r[first].median() < 2e-4
        assert difference_r[first].max() < (5e-3 if twins else 2e-4)


# --- without a server ---------------------------------------------------------------------------------------


def test_routers_are_those_of_config_json():
    qwen = {"num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [3]}
    assert Routers.of(ModelCard(qwen | {"decoder_sparse_step": 2})) == Routers(6, (1, 5), 2, 8)
    deepseek = {"num_hidden_layers": 4, "n_routed_experts": 300, "num_experts_per_tok": 2}
    assert Routers.of(ModelCard(deepseek | {"first_k_dense_replace": 1})) == Routers(4, (1, 2, 3), 2, 300)


def test_what_no_router_of_the_model_chose_is_refused():
    routers = Routers(2, (1,), 2, 4)
    good = np.array([[[0, 0], [1, 3]], [[0, 0], [2, 0]]])
    packed = routers.pack(good.flatten(), 3)
    assert packed.width == 1 and (unpacked(packed) == good).all()
    wide = replace(routers, experts=300).pack(good + 290 * (good > 0), 3)
    assert wide.width == 2 and np.frombuffer(wide.ids, "<i2").max() == 293
    with pytest.raises(ValueError, match="8 experts for 4 tokens: want 2 in each of 2 layers for every"):
        routers.pack(good, 4)
    with pytest.raises(ValueError, match="expert 4 is out of range: the model has 4"):
        routers.pack(good + (good == 3), 3)
    with pytest.raises(ValueError, match="the same expert twice: the server recorded none"):
        routers.pack(np.zeros_like(good), 3)


def rollout(prompt: list[int], response: list[int]) -> tuple[Rollout, torch.Tensor]:
    tokens = len(prompt) + len(response) - 1
    ids = torch.randint(200, (tokens, 2, 3), dtype=torch.uint8)
    routing = Routing(2, 3, 1, ids.numpy().tobytes())
    return Rollout(response, [-1.0] * len(response), "", "stop", routing=routing), ids.to(torch.int16)


def test_packs_carry_experts_where_their_tokens_are():
    prompt = [1, 2, 3]
    (first, first_ids), (second, second_ids) = rollout(prompt, [4, 5, 6, 7]), rollout(prompt, [8])
    demonstration = Rollout([9, 10], [], "", "stop", source="demonstration")
    rows = TrainBatch.from_groups([Group(Prompt("p", tuple(prompt), ""), [first, demonstration, second])])
    batch = PackedBatch.pack(rows, Padding(4, 16))
    own = torch.full((1, 2, 3), -1, dtype=torch.int16)
    wanted = [second_ids, own, *[own] * 4, first_ids, *[own] * 2]  # sequences of 4, 4 and 8
    assert torch.equal(batch.experts_t, torch.cat(wanted))
    parts = [batch.cut(2, part) for part in range(2)]
    for part in parts:
        positions = [int((batch.token_t == t).nonzero()[0]) for t in part.token_t.unique() if t > 3]
        for position in positions:
            here = int((part.token_t == batch.token_t[position]).nonzero()[0])
            assert torch.equal(part.experts_t[here], batch.experts_t[position])
    assert PackedBatch.pack(rows.select([1]), Padding(1, 1)).experts_t is None
    assert PackedBatch.pack(rows.with_columns(routing=None), Padding(1, 1)).experts_t is None


def test_experts_of_another_length_are_refused():
    response, _ = rollout([1, 2, 3], [4, 5, 6])
    response.token_ids.append(7)
    response.logprobs.append(-1.0)
    with pytest.raises(
        ValueError, match=r"response 0 .* has 6 tokens before its last, .* 30 bytes .* want 36"
    ):
        TrainBatch.from_groups([Group(Prompt("p", (1, 2, 3), ""), [response])])


def test_groups_that_wait_for_a_batch_keep_their_experts_in_a_checkpoint():
    policy = Accumulator(2, threshold=1.0, max_rounds=4)
    group = make_group([0.0, 1.0])
    for member in group.rollouts:
        member.routing = rollout(list(group.prompt.token_ids), member.token_ids)[0].routing
    assert policy.offer([group, make_group([1.0, 1.0])]) is None
    state = json.loads(json.dumps(policy.state_dict()))
    resumed = Accumulator(2, threshold=1.0, max_rounds=4)
    resumed.load_state_dict(state)
    assert [r.routing for r in resumed._pending[0].rollouts] == [r.routing for r in group.rollouts]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "rollout.engine=local does not tell experts: choose sglang or vllm"),
        (("rollout.engine=sglang", "train.share_prompts=true"), "train.share_prompts computes a prompt once"),
        (("rollout.engine=vllm", "algorithm=sft"), "algorithm.sampler=dataset has no engine"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    task: Path, tmp_path: Path, overrides: tuple[str, ...], reason: str
):
    with pytest.raises(ConfigError, match=f"rollout.router_replay=true is not possible here: {reason}"):
        configure(task, tmp_path, *REPLAY, *overrides)


def test_a_dense_model_has_nothing_to_replay(task: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"router_replay=true: .* has no experts to choose from"):
        Trainer(configure(task, tmp_path, *REPLAY, "rollout.engine=sglang"))
