"""Requests that no client of the SDK sends: the application answers each with a sentence, and lives on."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from megatron_gvpo.settings.tinker import load_tinker_config
from megatron_gvpo.tinker.app import TinkerApp
from megatron_gvpo.tinker.queue import FairQueue
from megatron_gvpo.tinker.served_model import ServedModel
from megatron_gvpo.tinker.sessions import Sessions, WireAnswer
from megatron_gvpo.tinker.wire import Refusal

KEY = "tml-of-a-test"
MODEL = ServedModel("name", "path", "Qwen2ForCausalLM", 50, 20, (7,), None, ())


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinkerApp:
    monkeypatch.setenv("KEY_OF_A_TEST", KEY)
    file = tmp_path / "server.yaml"
    file.write_text(
        f"{{output_dir: {tmp_path}, model: {{path: {tmp_path}}}, serve: {{key: {{env: KEY_OF_A_TEST}}}}}}"
    )
    return TinkerApp(load_tinker_config([file]), MODEL, FairQueue())


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
