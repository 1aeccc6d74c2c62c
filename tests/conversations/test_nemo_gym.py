"""Environments of NeMo-Gym by its released package: real servers, which also die, raise, lie or never answer.

Blackjack and the workplace assistant come with the package. COUNTER is another one, on the package's own base
classes, with the failures.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from helpers.inputs.chat_tokenizer import tokenizer as chat_tokenizer
from helpers.machine.processes import command_of
from helpers.servers.library_environments import Talks, library_python, serving
from helpers.suite.real_parts import used
from helpers.tiny_run import GVPO, configure, fit, records

from megatron_gvpo.conversations.adapters import nemo_gym_items as items
from megatron_gvpo.conversations.adapters.nemo_gym import record
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.groups import LOST
from megatron_gvpo.huggingface.tokenizer import load_tokenizer

ADAPTER = "megatron_gvpo.conversations.adapters.nemo_gym"
AGENT = f"{ADAPTER}:agent"
# The quickstart's tokenizer knows digits and signs: of a chat it reads these alone.
CONTENTS = (
    "{% for m in messages %}{{ m.content }}{{ '<|end|>' if m.role == 'assistant' else '=' }}{% endfor %}"
)
COUNTER = """
import os
import pathlib

from fastapi import HTTPException, Request
from pydantic import BaseModel, ConfigDict

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseSeedSessionRequest, BaseSeedSessionResponse, BaseVerifyRequest,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY


class Config(BaseResourcesServerConfig):
    step: int


class Seed(BaseSeedSessionRequest):
    start: int


class Add(BaseModel):
    count: int
    word: str = ""


class Row(BaseVerifyRequest):
    expected: int
    fault: str = ""
    mark: str = ""


class Score(BaseModel):
    model_config = ConfigDict(extra="allow")
    reward: float


class Counter(SimpleResourcesServer):
    config: Config
    counters: dict = {}

    def setup_webserver(self):
        app = super().setup_webserver()
        app.post("/add")(self.add)
        return app

    async def seed_session(self, request: Request, body: Seed) -> BaseSeedSessionResponse:
        self.counters[request.session[SESSION_ID_KEY]] = body.start
        return BaseSeedSessionResponse()

    async def add(self, request: Request, body: Add) -> dict:
        if body.word == "raise":
            raise RuntimeError("no counter is left")
        if body.word == "full":
            raise HTTPException(409, "the counter is full")
        session = request.session[SESSION_ID_KEY]
        self.counters[session] += body.count * self.config.step
        return {"now": self.counters[session]}

    async def verify(self, request: Request, body: Row) -> Score:
        if body.fault == "die" or (body.fault == "die once" and not pathlib.Path(body.mark).exists()):
            pathlib.Path(body.mark or "mark").touch()
            print("out of memory, perhaps", flush=True)
            os._exit(7)
        if body.fault == "raise":
            raise RuntimeError("the scale broke")
        counter = self.counters[request.session[SESSION_ID_KEY]]
        kinds = [item.type for item in body.response.output]
        return Score(reward=float(counter == body.expected), off=counter - body.expected, kinds=kinds)


if __name__ == "__main__":
    Counter.run_webserver()
"""
CONFIG = """
counter: {resources_servers: {counter: {entrypoint: app.py, domain: other, step: 2}}}
counter_agent:
  responses_api_agents:
    simple_agent: {entrypoint: app.py, resources_server: {type: resources_servers, name: counter}}
"""
IMAGE = {"role": "user", "content": [{"type": "input_image"}]}
ADD = {"type": "function", "name": "add", "strict": True, "parameters": {"type": "object", "properties": {}}}


def counted(fault: str = "", **more: Any) -> dict[str, Any]:
    """A data record of COUNTER."""
    parameters = {"input": [{"role": "user", "content": "Count to 9."}], "tools": [ADD]}
    values = {"start": 3, "expected": 9, "fault": fault, **more}
    return record({"responses_create_params": parameters, **values})


def call(name: str = "add", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with COUNTER, as NeMo-Gym lays environments out."""
    directory = tmp_path_factory.mktemp("nemo_gym")
    own = directory / "resources_servers" / "counter"
    own.mkdir(parents=True)
    (own / "app.py").write_text(COUNTER)
    (directory / "counter.yaml").write_text(CONFIG)
    return directory


def options_of(config: str, directory: Path | str = ".", **more: Any) -> dict[str, Any]:
    return {"python": library_python("nemo_gym"), "config": config, "directory": str(directory), **more}


@pytest.fixture(scope="module")
def counter(directory: Path) -> Iterator[Talks]:
    with Talks(None, options_of("counter.yaml", directory), AGENT) as talks:
        used("NeMo-Gym")
        yield talks


@pytest.mark.usefixtures("leave_the_process_group")
def test_gvpo_trains_in_an_environment_of_nemo_gym(task: Path, tmp_path: Path) -> None:
    """Blackjack. A model that knows nothing stands, and the cards decide."""
    python = Path(library_python("nemo_gym"))
    [installed] = python.parents[1].glob("lib/python*/site-packages/environments/blackjack")
    model = tmp_path / "model"
    shutil.copytree(task / "model", model)
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = CONTENTS
    tokenizer.save_pretrained(model)
    options = {"python": str(python), "config": "environments/blackjack/config.yaml"}
    settings = {"program": AGENT, "options": options, "turns": 5, "turn_tokens": 8, "step_timeout": 120}
    data = {"path": str(installed / "data" / "example.jsonl"), "convert": f"{ADAPTER}:record"}
    config = configure(
        task,
        tmp_path / "run",
        *GVPO,
        *("train.steps=3", "data.eval=null", "rollout.max_tokens=64", "rollout.stop_token_ids=[6,7,8,9]"),
        f"data.train={json.dumps({**data, 'answer_key': None, 'demonstration_key': None})}",
        f"model.path={model}",
        f"rollout.conversation={json.dumps(settings)}",
        "rewards.components=[{name: environment}]",
    )
    fit(config)
    used("NeMo-Gym")
    used("agent programs")
    _, *steps = records(tmp_path / "run")
    assert len(steps) == 3
    for step in steps:
        assert step["env/lost"] == 0 and step["env/turns"] >= 1
        assert step["reward/mean"] == pytest.approx(step["env/environment_reward"])
        assert -1 <= step["reward/mean"] <= 1
    assert any(step["train/grad_norm"] > 0 for step in steps), "some hands were won and others lost"
    assert not _servers("environments/blackjack/config.yaml"), "the server ends with the run"


@pytest.mark.proof
def test_the_workplace_assistant_scores_what_its_tools_did() -> None:
    """The first row of its data, with the calls that it wants, and with others."""
    options = options_of("environments/workplace_assistant/config.yaml", timeout=60)
    python = Path(options["python"])
    [file] = python.parents[1].glob(
        "lib/python*/site-packages/environments/workplace_assistant/data/example.jsonl"
    )
    row = json.loads(file.read_text().splitlines()[0])
    wanted = [call(want["name"], **json.loads(want["arguments"])) for want in row["ground_truth"]]
    look = call("email_get_email_information_by_id", email_id="00000057", field="subject")
    with Talks(None, options, AGENT, tokens=200_000) as talks:
        used("NeMo-Gym")
        [right] = talks.hold([look, *wanted, "Done."], **record(row))
        [wrong] = talks.hold([look, "Done."], **record(row))
        [unknown] = talks.hold([call("verify"), *wanted, "Done."], **record(row))
    assert right.finish_reason == wrong.finish_reason == "stop", right.text
    assert [r.counts["environment_reward"] for r in (right, wrong, unknown)] == [1, 0, 1]
    assert "Task Update" in right.messages[-2 * len(wanted) - 2]["content"], "the tool's own answer"
    assert unknown.counts["tool_errors"] == 1
    assert any("there is no tool 'verify'" in message["content"] for message in unknown.messages)
    shown = chat_tokenizer().decode(right.turns[0].given)
    assert all(tool["name"] in shown for tool in row["responses_create_params"]["tools"])


def test_every_rollout_has_a_session_and_the_verifier_sees_its_turns(counter: Talks) -> None:
    turns = [call(count=2) + call(count=1), "<think>3+6</think>It is 9."]
    rollouts = counter.hold(turns, n=3, **counted())
    for rollout in rollouts:
        assert rollout.counts["environment_reward"] == 1 and rollout.counts["off"] == 0, rollout.text
        assert [m["content"] for m in rollout.messages if m["role"] == "tool"] == ['{"now":7}', '{"now":9}']
        assert rollout.counts["tool_calls"] == 2 and rollout.counts["tool_errors"] == 0


def test_the_policy_hears_of_its_mistakes(counter: Talks) -> None:
    turns = [
        call(count="many"),
        call(count=1, word="full"),
        call("seed_session", start=9),
        call(count=3),
        "9",
    ]
    [rollout] = counter.hold(turns, **counted())
    answers = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    for answer, part in zip(answers, ("int_parsing", "is full", "there is no tool", '"now":9'), strict=True):
        assert part in answer
    assert rollout.counts["tool_errors"] == 3 and rollout.counts["environment_reward"] == 1


@pytest.mark.usefixtures("counter")
def test_a_rollout_whose_limit_is_reached_is_scored_by_what_it_did() -> None:
    with Talks(None, {"url": _url("counter.yaml")}, AGENT, turns=1) as talks:
        [rollout] = talks.hold([call(count=3)], **counted())
        assert rollout.finish_reason == "length" and rollout.counts["environment_reward"] == 1
        [rollout] = talks.hold([call(count=3)] * 2, **counted("raise"))
        assert rollout.finish_reason == LOST and "/verify answered 500" in rollout.text, "not a reward of 0"


@pytest.mark.parametrize(
    ("turn", "values", "reason"),
    [
        pytest.param("9", counted("die"), "POST /verify failed", marks=pytest.mark.proof),  # a new start
        ("9", counted("raise"), "POST /verify answered 500"),
        (call(count=1, word="raise"), counted(), "the tool add answered 500"),
        ("9", counted(start="three"), "POST /seed_session answered 422"),
        ("9", {"row": 3}, "set data.train.convert"),
    ],
)
def test_a_server_that_fails_loses_the_rollout(
    counter: Talks, turn: str, values: dict[str, Any], reason: str
) -> None:
    [rollout] = counter.hold([turn] * 4, **values)
    assert rollout.finish_reason == LOST and reason in rollout.text, rollout.text


def test_a_rollout_survives_the_end_of_its_server(counter: Talks, tmp_path: Path) -> None:
    values = counted("die once", mark=str(tmp_path / "mark"), start=9)
    [rollout] = counter.hold(["one", "two"], **values)
    assert rollout.finish_reason == "stop" and rollout.counts["environment_reward"] == 1
    assert rollout.messages[-1]["content"] == "two", "a second attempt"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"python": "no/python"}, "python=no/python: there is no interpreter at"),
        ({"directory": "no"}, "directory=no: there is no such directory"),
        ({"url": "http://127.0.0.1:9"}, "give python and config"),
        ({"timeout": 0}, "timeout=0: want seconds, above 0"),
        ({"config": "absent.yaml"}, "there is no file absent.yaml in"),
        ({"config": "judged.yaml"}, "counter asks other servers, judge_model"),
        ({"config": "agent.yaml"}, "counter_agent is a tool_simulation_agent"),
        ({"config": "none.yaml"}, "it has the resources servers none: want one"),
    ],
)
def test_a_server_that_cannot_start_is_refused_before_the_run(
    directory: Path, change: dict[str, Any], reason: str
) -> None:
    judge = "step: 2, judge: {type: responses_api_models, name: judge_model}"
    (directory / "judged.yaml").write_text(CONFIG.replace("step: 2", judge))
    (directory / "agent.yaml").write_text(CONFIG.replace("simple_agent", "tool_simulation_agent"))
    (directory / "none.yaml").write_text("config_paths: [counter.yaml]")
    wrong = {**options_of("counter.yaml", directory), **change}
    with pytest.raises(ConfigError) as refused, Talks(None, wrong, AGENT):
        pass
    assert reason in str(refused.value) and "\n" not in str(refused.value)


STEPS: dict[str, Any] = {
    "no JSON": "hello",
    "a list": "[1]",
    "no reward": '{"terminated": true, "truncated": false}',
    "text as reward": '{"reward": "1", "terminated": true, "truncated": false}',
    "NaN as reward": '{"reward": NaN, "terminated": true, "truncated": false}',
    "true as reward": '{"reward": true, "terminated": true, "truncated": false}',
    "number as end": '{"reward": 1, "terminated": 1, "truncated": false}',
    "no end": '{"reward": 1, "terminated": false, "truncated": false}',
    "a number said": '{"reward": 1, "terminated": false, "truncated": false, "observation": 3}',
    "outputs of no tool": (
        '{"reward": 1, "terminated": false, "truncated": false, "info": {"tool_outputs": [1]}}'
    ),
    "nested": "[" * 100_000,
    "bytes": b"\x00\xff",
    "hangs up": None,
    "never": 2,
}


@pytest.fixture(scope="module")
def liar() -> Iterator[Talks]:
    """A server whose step answers as the policy's text says: one of STEPS."""

    async def reset(request: web.Request) -> web.Response:
        return web.json_response({"observation": "Go.", "info": {}})

    async def step(request: web.Request) -> web.Response:
        body = await request.json()
        [message] = body["response"]["output"]
        lie = STEPS[message["content"][0]["text"]]
        if isinstance(lie, int):
            await asyncio.sleep(lie)
        if lie is None:
            assert request.transport is not None
            request.transport.close()
        return web.Response(body=lie if isinstance(lie, bytes) else str(lie).encode())

    app = web.Application()
    app.add_routes([web.post("/reset", reset), web.post("/step", step)])
    with serving(app) as url, Talks(None, {"url": url, "timeout": 1}, AGENT) as talks:
        yield talks


@pytest.mark.parametrize("lie", STEPS)
def test_garbage_is_a_failure_of_the_environment(liar: Talks, lie: str) -> None:
    [rollout] = liar.hold([lie, lie], **record({"responses_create_params": {"input": "Play."}}))
    assert rollout.finish_reason == LOST and "NeMo-Gym's server http" in rollout.text, rollout.text
    if lie == "never":
        assert "no answer to POST /step within 1 seconds (rollout.conversation.options" in rollout.text


def test_a_server_that_is_none_is_refused() -> None:
    async def reset(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/reset", reset), web.post("/verify", reset), web.get("/step", reset)])
    with (
        serving(app) as url,
        pytest.raises(ConfigError, match="it has neither /seed_session and /verify nor"),
    ):
        Talks(None, {"url": url}, AGENT).__enter__()
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9: GET /seed_session was not answered"):
        Talks(None, {"url": "http://127.0.0.1:9"}, AGENT).__enter__()


def test_inputs_become_chats_and_answers_become_items() -> None:
    calls = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    values = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Add"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": "Well."}]},
        calls,
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    first, second, third = items.chat(values)
    assert first == {"role": "developer", "content": "Add"} and third["tool_call_id"] == "c"
    assert second["content"] == "<think>so</think>Well." and second["tool_calls"][0]["id"] == "c"
    made = items.answer_items(second)
    assert [item["type"] for item in made] == ["reasoning", "message", "function_call"]
    assert made[0]["summary"] == values[1]["summary"] and made[1]["content"][0]["text"] == "Well."
    assert [item["type"] for item in items.answer_items({"content": None})] == ["message"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no responses_create_params"),
        ({"responses_create_params": {"input": "a", "instructions": "b"}}, "instructions"),
        (
            {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}},
            "text",
        ),
        ({"responses_create_params": {"input": [{"type": "file_search_call"}]}}, "file_search_call"),
        ({"responses_create_params": {"input": [3]}}, "'3'"),
        ({"responses_create_params": {"input": "a", "tools": [{"type": "web_search"}]}}, "web_search"),
    ],
)
def test_a_row_that_is_none_is_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        record(row)


def _servers(config: str) -> list[psutil.Process]:
    """The running servers of this configuration that descend from this process."""
    return [p for p in psutil.Process().children(recursive=True) if config in command_of(p)]


def _url(config: str) -> str:
    [server] = _servers(config)
    return f"http://127.0.0.1:{command_of(server)[-1]}"
