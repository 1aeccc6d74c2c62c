"""Conversations of the tiny model with a real environment process, embedded and on real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.distributed import launch
from helpers.inputs.digits import ENVIRONMENT, TALK, talks
from helpers.servers.real_servers import SharedServer, logprobs, pool_of, served_config
from helpers.suite.real_parts import used
from helpers.tiny_run import GVPO, AskToStop, assert_same_run, configure, fit, records

from megatron_gvpo.conversations.conversations import Conversations
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Prompt
from megatron_gvpo.huggingface.tokenizer import end_token_id, load_tokenizer
from megatron_gvpo.observe import read_metrics
from megatron_gvpo.sampling.served import Speakers
from megatron_gvpo.servers.pool import METRIC
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.turns import segments

PAID_BY_TURN = ("algorithm=reinforce_pp", "train.mini_batches=2")


@pytest.mark.usefixtures("leave_the_process_group")
@pytest.mark.parametrize(
    "method",
    [GVPO, pytest.param(PAID_BY_TURN, marks=pytest.mark.proof)],
    ids=["gvpo", "rewards of turns"],
)
def test_a_resumed_run_of_conversations_equals_an_uninterrupted_one(
    task: Path, tmp_path: Path, method: tuple[str, ...]
) -> None:
    """The trainer is stopped while it holds a step's conversations."""
    used("environment workers")
    uninterrupted, parts, mark = tmp_path / "whole", tmp_path / "parts", tmp_path / "mark"
    fit(configure(task, uninterrupted, *method, *TALK, talks()))
    stopping = configure(task, parts, *method, *TALK, talks(stop=str(mark)))
    stopped = fit(stopping, [AskToStop(mark)])
    assert stopped.step == 2 and not mark.exists()
    fit(
        configure(task, parts, *method, *TALK, talks()),
        resume=True,
        allow_change=("rollout.conversation.options",),
    )
    assert_same_run(uninterrupted, parts)
    lines = records(uninterrupted)[1:]
    assert all(1 < line["env/turns"] < 4 and line["env/lost"] == 0 for line in lines)
    assert all(line["env/observation_tokens"] > 0 and 0 < line["env/even"] < 3 for line in lines)
    assert lines[0]["reward/mean"] == pytest.approx(lines[0]["env/environment_reward"])
    assert lines[-1]["eval/avg@n"] > 0, "held-out prompts meet the same environment"
    assert all(line["mismatch/kl"] < 1e-5 for line in lines), "scored in the contexts that were sampled"


@pytest.mark.proof
@pytest.mark.usefixtures("leave_the_process_group")
def test_arise_learns_skills_from_conversations_and_gives_them_to_others(task: Path, tmp_path: Path) -> None:
    """The environment is down for a third of them: of those for a skill, or for its summary, perhaps all."""
    used("environment workers")
    skills = (
        "[{name: skills, n: 2, after_step: 1, gate: 0, template: '={skill}', summary_template: '={best}'}]"
    )
    arise = ("algorithm=arise", f"algorithm.members={skills}", "data.max_prompt_tokens=200")
    down = talks(down=True).replace('"turns": 4', '"turns": 4, "max_lost": 0.9')
    settings = (*arise, *TALK, down, "data.eval=null", "train.steps=6")
    trainer = fit(configure(task, tmp_path / "run", *settings))
    [library] = trainer.components.members
    assert library.skills
    turns = [line["env/turns"] for line in records(tmp_path / "run")[1:]]
    assert len(turns) == 6 and min(turns) > 1


@pytest.mark.usefixtures("leave_the_process_group")
def test_conversations_that_outages_took_are_counted_and_not_trained(task: Path, tmp_path: Path) -> None:
    settings = talks(down=True).replace('"turns": 4', '"turns": 4, "max_lost": 0.9')
    fit(configure(task, tmp_path / "run", *GVPO, *TALK, settings, "data.eval=null", "train.steps=3"))
    lines = records(tmp_path / "run")[1:]
    lost, dropped = [line["env/lost"] for line in lines], [line["env/dropped_groups"] for line in lines]
    assert any(lost) and all(d == pytest.approx(4 * share) for d, share in zip(dropped, lost, strict=True)), (
        "the members of a group have one seed, and go together"
    )


@pytest.mark.proof
def test_resume_of_conversations_on_two_ranks(task: Path, tmp_path: Path) -> None:
    settings = json.dumps([*GVPO, *TALK, talks()])
    launch("helpers.workers.trainer_worker:conversations", [2], str(task), str(tmp_path), settings)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_servers_hold_conversations_in_the_contexts_that_are_trained(
    served: SharedServer, task: Path
) -> None:
    """Every own token's log-prob is that of transformers in its segment, at the sampling temperature."""
    used("environment workers")
    tokenizer = load_tokenizer(str(task / "model"))
    material = Task(tokenizer, (end_token_id(tokenizer),), [], [])
    stops = [1, 6, 7, 8, 9]
    pool = pool_of(served.client, stops)
    prompts = [Prompt(name, tuple(tokenizer(name)["input_ids"]), name) for name in ("7+5=", "3-1+4=")]
    requests = [Request(p.token_ids, 6, seed=7 + i) for i, p in enumerate(prompts)]
    sampling = SamplingConfig(temperature=0.7, max_tokens=24)
    config = ConversationConfig(environment=ENVIRONMENT, turns=4, workers=2)
    with Conversations(config, material) as conversations:
        policy = Speakers(pool, sampling)
        groups = served.client.loop.run(conversations.run_all(policy, prompts, requests, sampling))
    served.client.loop.run(pool.stop())
    rollouts = [(p, r) for p, group in zip(prompts, groups, strict=True) for r in group]
    assert len(rollouts) == 12 and max(len(r.turns) for _, r in rollouts) > 1
    for prompt, rollout in rollouts:
        environment_tokens = sum(len(turn.given) for turn in rollout.turns)
        assert len(rollout.token_ids) + environment_tokens <= 24
        [segment] = segments(prompt.token_ids, rollout.token_ids, rollout.turns)
        for position, first, count in segment.own:
            context, sampled = segment.ids[:position], segment.ids[position : position + count]
            expected = logprobs(task / "model", context, sampled, temperature=0.7)
            recorded = torch.tensor(rollout.logprobs[first : first + count])
            assert torch.allclose(recorded, expected, atol=2e-4)
            assert sampled[-1] in stops or position + count == len(segment.ids)


@pytest.mark.proof
@pytest.mark.usefixtures("leave_the_process_group")
@pytest.mark.parametrize(
    ("engine", "more"),
    [("vllm", ()), ("vllm", ("rollout.speculation={method: ngram, tokens: 2}",)), ("sglang", ())],
    ids=["vllm", "vllm that speculates", "sglang"],
)
def test_a_run_on_servers_holds_conversations_while_it_trains(
    engine: str, more: tuple[str, ...], task: Path, tmp_path: Path
) -> None:
    """Conversations are carried over weight pushes; the trainer's log-probs are the engine's nevertheless."""
    ahead = ("rollout.async_steps=1", "rollout.weights.in_flight=carry", "algorithm=gvpo")
    small = ("train.mini_batches=2", "checkpoint.export_hf=false", "train.steps=3", "eval.every=0")
    fit(served_config(engine, task, tmp_path / "run", *TALK, talks(), *ahead, *small, *more))
    used(f"{engine} server")
    lines = records(tmp_path / "run")
    assert all(line["env/turns"] > 1 and line["env/lost"] == 0 for line in lines[1:])
    kl = [line["mismatch/kl"] for line in lines if "mismatch/kl" in line]  # of tokens by the present weights
    assert kl and max(kl) < 1e-4
    assert lines[-1]["response/staleness_max"] == 1 and "eval/avg@n" in lines[-1]
    assert bool(more) == any("speculation/acceptance" in line for line in lines)
    assert any(METRIC in line for line in read_metrics(tmp_path / "run" / "metrics.jsonl")[1:])


@pytest.mark.proof
@pytest.mark.usefixtures("leave_the_process_group")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_colocated_server_holds_conversations_in_its_turns(engine: str, task: Path, tmp_path: Path) -> None:
    """Trainer and server take turns with the memory; a push waits until the conversations have ended."""
    colocated = ("rollout.servers.colocated=true", "rollout.weights.transport=shared")
    waits = ("rollout.weights.in_flight=wait", "algorithm=gvpo", "train.steps=3", "eval.every=0")
    fit(served_config(engine, task, tmp_path / "run", *TALK, talks(), *colocated, *waits))
    used(f"{engine} server")
    lines = records(tmp_path / "run")[1:]
    assert len(lines) == 3
    assert all(1 < line["env/turns"] < 4 and line["env/lost"] == 0 for line in lines)
    assert all(line["mismatch/kl"] < 1e-4 for line in lines), "sampled by each step's weights"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("rollout.engine=vllm rollout.router_replay=true", "not possible with rollout.router_replay=true"),
        ("train.share_prompts=true", "rollout.conversation is not possible with train.share_prompts=true"),
        ("algorithm=remax", "rollout.conversation is not possible with algorithm.prior=greedy"),
        ('algorithm.members=[{"name":"replay"}]', "not possible with algorithm.members: replay"),
        ("rollout.conversation.tools=[tools.py:add]", "give one of environment, tools and program"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(
    task: Path, tmp_path: Path, change: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        configure(task, tmp_path / "out", *TALK, talks(), *change.split(" "))
