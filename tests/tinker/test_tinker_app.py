"""Requests that no client of the SDK sends: the application answers each with a sentence, and lives on."""

import asyncio
import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_gvpo.settings.tinker import TinkerConfig, load_tinker_config
from megatron_gvpo.tinker import serve
from megatron_gvpo.tinker.app import TinkerApp
from megatron_gvpo.tinker.queue import FairQueue
from megatron_gvpo.tinker.served_model import ServedModel
from megatron_gvpo.tinker.sessions import Sessions, WireAnswer
from megatron_gvpo.tinker.wire import Refusal

KEY = "tml-of-a-test"
MODEL = ServedModel("name", "path", "Qwen2ForCausalLM", 50, 20, (7,), None, ())


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinkerConfig:
    monkeypatch.setenv("KEY_OF_A_TEST", KEY)
    file, serving = tmp_path / "server.yaml", "serve: {port: 0, key: {env: KEY_OF_A_TEST}}"
    file.write_text(f"{{output_dir: {tmp_path}, model: {{path: {tmp_path}}}, {serving}}}")
    return load_tinker_config([file])


@pytest.fixture
def app(config: TinkerConfig) -> TinkerApp:
    return TinkerApp(config, MODEL, FairQueue())


async def answers(app: TinkerApp, *requests: bytes) -> list[tuple[int, str]]:
    """The statuses and the bodies of requests as they go over the wire."""
    runner = web.AppRunner(app.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    results = []
    try:
        for request in requests:
            reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
            writer.write(request)
            head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
            results.append((int(head.split()[1]), body.decode()))
            writer.close()
    finally:
        await runner.cleanup()
    return results


def request(path: str, body: bytes, key: bytes = KEY.encode()) -> bytes:
    lines = (
        b"POST /api/v1/%s HTTP/1.1" % path.encode(),
        b"Host: test",
        b"Connection: close",
        b"X-API-Key: " + key,
        b"Content-Length: %d" % len(body),
    )
    return b"\r\n".join((*lines, b"", body))


def test_every_request_is_answered_with_a_sentence(app: TinkerApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinkerApp, "_heartbeat", broken)
    results = asyncio.run(
        answers(
            app,
            request("create_session", b"{}", key=b"\xff\xfe"),
            request("create_session", b'{"tags": [' + b"[" * 100_000),
            request("create_session", '{"tags": []}'.encode("utf-16")),
            request("forward_backward", b"\xff" * 100),
            request("session_heartbeat", b"{}"),
            request("create_session", b"{}"),
        )
    )
    assert [status for status, _ in results] == [401, 422, 422, 400, 500, 200], results
    assert all(body.startswith('{"') for _, body in results)
    assert "the server failed: ZeroDivisionError" in results[4][1]


async def broken(*_: object) -> web.Response:
    raise ZeroDivisionError


@pytest.mark.parametrize(("status", "category"), [(404, "user"), (503, "server"), (None, "server")])
def test_a_failed_operation_names_whose_fault_it_is(
    app: TinkerApp, status: int | None, category: str
) -> None:
    """It is the category of the RequestFailedError that the SDK raises."""
    failure = ZeroDivisionError() if status is None else Refusal("it cannot be", status)

    async def settled() -> dict[str, str]:
        pending = Sessions(60).open()
        app._later(pending, "x:1", {"kind": "idle"}, lambda _: WireAnswer({}))
        [job] = app._queue.take(1)
        job.finish(failure)
        body = (await pending.pending["x:1"].answer).body
        assert isinstance(body, dict)
        return body

    assert asyncio.run(settled())["category"] == category


def test_a_sampler_keeps_its_number_and_its_weights(app: TinkerApp) -> None:
    """Weights under the number of the base model's sampler would become the base model of all clients."""
    session = app._sessions.open().session_id
    model = {"model_id": f"{session}:train:0"}
    sent = [
        ("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "name"}),
        *[("create_sampling_session", of_base(session, 0))] * 2,  # repeated, as if its answer had been lost
        ("save_weights_for_sampler", {**model, "seq_id": 1, "sampling_session_seq_id": 0}),
        ("save_weights_for_sampler", {**model, "seq_id": 2}),
        ("save_weights_for_sampler", {**model, "seq_id": 3, "sampling_session_seq_id": 1}),
        ("create_sampling_session", of_base(session, 1)),
    ]
    results = asyncio.run(answers(app, *(request(path, json.dumps(body).encode()) for path, body in sent)))
    assert [status for status, _ in results] == [200, 200, 200, 400, 422, 200, 400], results
    assert "sampling_session_seq_id=0: the session has another sampler" in results[3][1]
    created, saved = [job.operation for _ in range(2) for job in app._queue.take(1)]
    assert created["kind"] == "create"
    assert saved["kind"] == "snapshot" and saved["snapshot"].startswith(f"{session}:train:0/unnamed-")


def test_a_model_is_unloaded_once_however_often_its_client_asks(app: TinkerApp) -> None:
    session = app._sessions.open().session_id
    created = {"session_id": session, "model_seq_id": 0, "base_model": "name"}
    sent = [
        ("create_model", created),
        *[("unload_model", {"model_id": f"{session}:train:0"})] * 2,  # as if its answer had been lost
        ("unload_model", {"model_id": f"{session}:train:1"}),
    ]
    results = asyncio.run(answers(app, *(request(path, json.dumps(body).encode()) for path, body in sent)))
    assert [status for status, _ in results] == [200, 200, 200, 404], results
    assert results[1] == results[2]
    operations = [job.operation["kind"] for _ in range(2) for job in app._queue.take(1)]
    assert operations == ["create", "forget"] and not app._queue.take(0)


def posted(app: TinkerApp, *sent: tuple[str, dict[str, Any]]) -> list[tuple[int, str]]:
    return asyncio.run(answers(app, *(request(path, json.dumps(body).encode()) for path, body in sent)))


def forgotten(app: TinkerApp) -> dict[str, list[str]]:
    """The models and the snapshots that the waiting operations forget."""
    names: dict[str, list[str]] = {"models": [], "snapshots": []}
    while jobs := app._queue.take(0):
        for job in jobs:
            if job.operation["kind"] == "forget":
                for key, own in names.items():
                    own += job.operation[key]
    return names


def unnamed_sampler(model: dict[str, str], number: int) -> tuple[str, dict[str, Any]]:
    return "save_weights_for_sampler", {**model, "seq_id": 100 + number, "sampling_session_seq_id": number}


def test_an_unnamed_sampler_stays_while_it_is_used(app: TinkerApp) -> None:
    """Recipes make their reference policy once, at the start, and a new sampler at every step."""
    session = app._sessions.open().session_id
    model, model_id = {"model_id": f"{session}:train:0"}, f"{session}:train:0"
    sent = [("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "name"})]
    for number in range(MODEL.most_snapshots + 3):
        sent += [unnamed_sampler(model, number), sample_of(session, 0, 2 * number)]
        sent += [sample_of(session, number, 2 * number + 1)]
    results = posted(app, *sent, sample_of(session, 1, 99))
    assert [status for status, _ in results] == [200] * len(sent) + [404], results
    message = "its model keeps the 4 unnamed samplers that were used last: save weights that you use later"
    assert message in results[-1][1]
    assert forgotten(app)["snapshots"] == [f"{model_id}/unnamed-{number}" for number in (2, 3, 4)]


def sample_of(session: str, number: int, seq_id: int) -> tuple[str, dict[str, Any]]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}
    body = {"prompt": prompt, "sampling_params": {}, "seq_id": seq_id}
    return "asample", body | {"sampling_session_id": f"{session}:sample:{number}"}


@pytest.mark.parametrize("is_unloaded", [False, True])
def test_a_session_that_ends_leaves_nothing_in_memory(app: TinkerApp, is_unloaded: bool) -> None:
    """Its client may end it while weights wait to be forgotten."""
    session = app._sessions.open().session_id
    model, model_id = {"model_id": f"{session}:train:0"}, f"{session}:train:0"
    sent = [("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "name"})]
    sent += [unnamed_sampler(model, number) for number in range(MODEL.most_snapshots + 2)]
    sent += [("unload_model", model)] if is_unloaded else []
    results = posted(app, *sent, (f"sessions/{session}/finish", {}))
    assert {status for status, _ in results} == {200}, results
    names = forgotten(app)
    assert names["models"] == [model_id]
    assert sorted(names["snapshots"]) == [
        f"{model_id}/unnamed-{i + 1}" for i in range(MODEL.most_snapshots + 2)
    ]


def test_a_models_checkpoints_know_its_clients_metadata(config: TinkerConfig, app: TinkerApp) -> None:
    """tinker-cookbook reads there which renderer a model was trained with; every value is a text."""
    session = app._sessions.open().session_id
    metadata = {"renderer_name": "role_colon", "number": 2**70}
    created = {"session_id": session, "model_seq_id": 0, "base_model": "name", "user_metadata": metadata}
    model_id = f"{session}:train:0"
    posted(app, ("create_model", created), ("save_weights", {"model_id": model_id, "path": "one"}))
    [_, saved] = [job.operation for _ in range(2) for job in app._queue.take(0)]
    file = Path(config.output_dir) / "checkpoints" / model_id / "weights" / "one" / "info.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(saved["info"]))
    head = b"GET /api/v1/training_runs/%s HTTP/1.1\r\nHost: test\r\nConnection: close\r\n" % model_id.encode()
    [(status, body)] = asyncio.run(answers(app, head + b"X-API-Key: " + KEY.encode() + b"\r\n\r\n"))
    assert status == 200, body
    assert json.loads(body)["user_metadata"] == {"renderer_name": "role_colon", "number": str(2**70)}


@pytest.mark.parametrize("path", ["create_model", "load_weights"])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_model_that_could_not_be_made_takes_no_place(
    config: TinkerConfig, app: TinkerApp, path: str, is_cancelled: bool
) -> None:
    """A damaged checkpoint, tried again and again, would keep all clients from making models."""
    session, most = app._sessions.open(), config.serve.most_models
    weights_in(Path(config.output_dir))

    async def tried(number: int, failure: Refusal | None) -> tuple[int, str]:
        body = {"session_id": session.session_id, "model_seq_id": number, "base_model": "name"}
        sent = request(path, json.dumps(body | (WEIGHTS if path == "load_weights" else {})).encode())
        [first] = await answers(app, sent)
        for job in app._queue.take(0):
            if is_cancelled:
                session.pending[json.loads(first[1])["request_id"]].answer.cancel()
            job.finish({} if failure is None else failure)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await answers(app, sent) == [first]  # repeated, as if its answer had been lost
        assert not app._queue.take(0)
        return first

    async def all_tries() -> list[tuple[int, str]]:
        failed = [await tried(number, Refusal("the checkpoint is damaged")) for number in range(most + 1)]
        return [*failed, *[await tried(number, None) for number in range(most + 1, 2 * most + 1)]]

    assert [status for status, _ in asyncio.run(all_tries())] == [200] * (2 * most + 1)
    assert list(session.models) == [
        f"{session.session_id}:train:{number}" for number in range(most + 1, 2 * most + 1)
    ]


def test_a_model_stays_when_a_load_into_it_fails(config: TinkerConfig, app: TinkerApp) -> None:
    session = app._sessions.open()
    weights_in(Path(config.output_dir))
    created = {"session_id": session.session_id, "model_seq_id": 0, "base_model": "name"}
    model_id = f"{session.session_id}:train:0"

    async def tried() -> list[int]:
        statuses = []
        for path, body in (
            ("create_model", created),
            ("load_weights", created | WEIGHTS),
            ("load_weights", {"model_id": model_id} | WEIGHTS | {"seq_id": 2}),
        ):
            [(status, _)] = await answers(app, request(path, json.dumps(body).encode()))
            [job] = app._queue.take(0)
            job.finish({} if path == "create_model" else Refusal("the checkpoint is damaged"))
            await asyncio.sleep(0)
            statuses.append(status)
        return statuses

    assert asyncio.run(tried()) == [200, 200, 200]
    assert list(session.models) == [model_id]


WEIGHTS = {"path": "tinker://other/weights/one", "optimizer": False, "seq_id": 1}


def weights_in(output_dir: Path) -> None:
    """Write the checkpoint that WEIGHTS loads, as far as the application reads it."""
    file = output_dir / "checkpoints" / "other" / "weights" / "one" / "info.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(MODEL.weights_info() | {"time": 1.0, "expires": None}))


def of_base(session: str, number: int) -> dict[str, Any]:
    return {"session_id": session, "sampling_session_seq_id": number, "base_model": "name"}


def test_the_server_ends_while_a_client_waits_for_a_result(
    config: TinkerConfig, app: TinkerApp, capsys: pytest.CaptureFixture[str]
) -> None:
    session = app._sessions.open()
    model = {"session_id": session.session_id, "model_seq_id": 0, "base_model": "name"}
    request_id = f"{session.session_id}:train:0:create"
    with serve._http(config, app):
        printed = re.search(r"http://(.*):(\d+)", capsys.readouterr().out)
        assert printed is not None
        address = printed[1], int(printed[2])
        with socket.create_connection(address) as client:
            client.sendall(request("create_model", json.dumps(model).encode()))
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        session.seen = 0.0  # the request for the result sets it
        waiting = socket.create_connection(address)
        waiting.sendall(request("retrieve_future", json.dumps({"request_id": request_id}).encode()))
        deadline = time.monotonic() + 60
        while not session.seen and time.monotonic() < deadline:
            time.sleep(0.01)
        assert session.seen
        begin = time.monotonic()
    assert time.monotonic() - begin < 5  # not the 20 s for which the client may wait
    waiting.close()
