"""Agent programs with the real OpenAI client train the tiny model: embedded, and on real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.servers.real_servers import SharedServer, logprobs, pool_of, served_config
from helpers.suite.real_parts import used
from helpers.tiny_run import GVPO, AskToStop, assert_same_run, configure, fit, records

from megatron_gvpo.conversations.program_runner import ProgramRunner
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Prompt
from megatron_gvpo.huggingface.tokenizer import end_token_id, load_tokenizer
from megatron_gvpo.sampling.served import Speakers
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer
from megatron_gvpo.turns import ends_of, segments
from megatron_gvpo.types import TrainBatch

# A model that knows nothing says anything. The program answers with digits that depend on the seed and on all
# that was said, asks a sub-agent in the end, and pays for variety. Where the file `stop` lies, the first
# program to remove it stops the trainer in the middle of a rollout.
PROGRAM = """
import hashlib, os, pathlib, signal
import psutil
from openai import AsyncOpenAI
from megatron_gvpo.conversations import Reply

SHARED = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="-", max_retries=0)


async def run(prompt, endpoint, stop=""):
    client = SHARED.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages, answers = [{"role": "user", "content": prompt.text}], []
    while len(answers) < 3:
        answer = await client.chat.completions.create(model="policy", messages=messages)
        answers.append(answer.choices[0].message.content)
        if stop and len(answers) == 2:
            try:
                pathlib.Path(stop).unlink()
            except FileNotFoundError:  # another of the programs that run at once was first
                pass
            else:
                os.kill(psutil.Process(os.getppid()).parents()[1].pid, signal.SIGTERM)
        text = "/".join([str(endpoint.seed), *answers])
        number = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 100
        messages += [answer.choices[0].message, {"role": "user", "content": str(number)}]
        if number < 20:
            break
    sub = [{"role": "user", "content": prompt.text + str(number)}]
    answer = await client.chat.completions.create(model="policy", messages=sub, user="sub")
    answers.append(answer.choices[0].message.content)
    return Reply(None, sum(len(set(text)) for text in answers) / 10, {"asked": len(answers)})
"""
TALK = (
    "rollout.max_tokens=32",
    "rollout.stop_token_ids=[6,7,8,9]",
    "rewards.components=[{name: environment}]",
    "data.eval=null",
    "train.steps=3",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("program") / "digits_program.py"
    file.write_text(PROGRAM)
    return file


def talks(program: Path, **options: object) -> str:
    settings = {"program": f"{program}:run", "turns": 6, "turn_tokens": 6, "workers": 2, "options": options}
    return f"rollout.conversation={json.dumps({**settings, 'step_timeout': 200})}"


@pytest.mark.usefixtures("leave_the_process_group")
def test_a_resumed_run_of_programs_equals_an_uninterrupted_one(
    task: Path, program: Path, tmp_path: Path
) -> None:
    used("agent programs")
    uninterrupted, parts, mark = tmp_path / "whole", tmp_path / "parts", tmp_path / "mark"
    fit(configure(task, uninterrupted, *GVPO, *TALK, talks(program)))
    stopped = fit(configure(task, parts, *GVPO, *TALK, talks(program, stop=str(mark))), [AskToStop(mark)])
    assert stopped.step == 2 and not mark.exists()
    allowed = ("rollout.conversation.options",)
    fit(configure(task, parts, *GVPO, *TALK, talks(program)), resume=True, allow_change=allowed)
    assert_same_run(uninterrupted, parts)
    lines = records(uninterrupted)[1:]
    assert len(lines) == 3 and all(line["env/lost"] == 0 for line in lines)
    assert all(1 < line["env/turns"] == line["env/asked"] <= 4 for line in lines)
    assert lines[0]["reward/mean"] == pytest.approx(lines[0]["env/environment_reward"])
    assert all(line["mismatch/kl"] < 1e-5 for line in lines), "scored in the contexts that were sampled"


@pytest.mark.proof
@pytest.mark.usefixtures("leave_the_process_group")
def test_m_grpo_compares_the_sub_agents_calls_with_one_another(
    task: Path, program: Path, tmp_path: Path
) -> None:
    """The program's turns and the sub-agent's have advantages of their own, and every reward counts."""
    used("agent programs")
    batches: list[TrainBatch] = []

    class Keep(Callback):
        def on_start(self, trainer: Trainer) -> None:
            update = trainer._update

            def recording_update(rows: TrainBatch, *more: object) -> object:
                batches.append(rows)
                return update(rows, *more)  # type: ignore[arg-type]

            trainer._update = recording_update  # type: ignore[method-assign, assignment]

    fit(configure(task, tmp_path / "run", "algorithm=m_grpo", *TALK, talks(program)), [Keep()])
    assert len(records(tmp_path / "run")) == 4
    differ = 0
    for rows in batches:
        assert rows.advantage_r is not None
        for row, turns in enumerate(rows.turns):
            values_i = rows.advantage_r[rows.offsets[row] : rows.offsets[row + 1]].tolist()
            by_agent: dict[str, set[float]] = {}
            for turn, end in zip(turns, ends_of(turns, len(values_i)), strict=True):
                values = values_i[turn.begin : end]
                by_agent.setdefault(turn.agent, set()).update(values)
            assert {*by_agent} == {"", "sub"}
            differ += by_agent[""] != by_agent["sub"]
    assert differ > len(batches)


def test_servers_answer_programs_in_the_contexts_that_are_trained(
    served: SharedServer, task: Path, program: Path
) -> None:
    """Every own token's log-prob is that of transformers in its segment, at the sampling temperature."""
    used("agent programs")
    tokenizer = load_tokenizer(str(task / "model"))
    material = Task(tokenizer, (end_token_id(tokenizer),), [], [])
    pool = pool_of(served.client, [1, 6, 7, 8, 9])
    prompts = [Prompt(name, tuple(tokenizer(name)["input_ids"]), name) for name in ("7+5=", "3-1+4=")]
    requests = [Request(p.token_ids, 3, seed=7 + i) for i, p in enumerate(prompts)]
    sampling = SamplingConfig(temperature=0.7, max_tokens=32)
    spec = f"{program}:run"
    config = ConversationConfig(program=spec, turns=6, turn_tokens=6, workers=2, step_timeout=200)
    with ProgramRunner(config, spec, material) as programs:
        policy = Speakers(pool, sampling)
        groups = served.client.loop.run(programs.run_all(policy, prompts, requests, sampling))
    served.client.loop.run(pool.stop())
    rollouts = [(p, r) for p, group in zip(prompts, groups, strict=True) for r in group]
    assert len(rollouts) == 6 and all(r.turns[-1].agent == "sub" for _, r in rollouts)
    for prompt, rollout in rollouts:
        assert len(rollout.token_ids) + sum(len(turn.given) for turn in rollout.turns) <= 32
        sequences = segments(prompt.token_ids, rollout.token_ids, rollout.turns)
        assert len(sequences) == 2
        for segment in sequences:
            for position, first, count in segment.own:
                context, sampled = segment.ids[:position], segment.ids[position : position + count]
                expected = logprobs(task / "model", context, sampled, temperature=0.7)
                assert torch.allclose(
                    torch.tensor(rollout.logprobs[first : first + count]), expected, atol=2e-4
                )


@pytest.mark.proof
@pytest.mark.usefixtures("leave_the_process_group")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_run_on_servers_trains_programs(engine: str, task: Path, program: Path, tmp_path: Path) -> None:
    """Programs run while the trainer trains; the trainer's log-probs are the engine's nevertheless."""
    ahead = ("rollout.async_steps=1", "rollout.weights.in_flight=carry", "algorithm=gvpo")
    small = ("train.mini_batches=2", "checkpoint.export_hf=false")
    fit(served_config(engine, task, tmp_path / "run", *TALK, talks(program), *ahead, *small))
    used(f"{engine} server")
    lines = records(tmp_path / "run")[1:]
    assert all(line["env/turns"] > 1 and line["env/lost"] == 0 for line in lines)
    kl = [line["mismatch/kl"] for line in lines if "mismatch/kl" in line]
    assert kl and max(kl) < 1e-4
