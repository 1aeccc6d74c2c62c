"""Sessions of clients end when their clients are silent, and answers stay until they have been fetched."""

import asyncio
import json
import shutil
import time
from pathlib import Path

import pytest

from megatron_gvpo.core import clock
from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.tinker import checkpoints
from megatron_gvpo.tinker import sessions as sessions_of_tinker
from megatron_gvpo.tinker.checkpoints import CheckpointPath, list_checkpoints, read_info, remove
from megatron_gvpo.tinker.sessions import KEPT_SECONDS, ClientModel, PendingResult, Sessions, WireAnswer
from megatron_gvpo.tinker.wire import Refusal


def test_a_silent_session_ends_and_one_that_speaks_lives(monkeypatch: pytest.MonkeyPatch):
    sessions, now = Sessions(seconds=10), running_seconds()
    monkeypatch.setattr(sessions_of_tinker, "running_seconds", lambda: now)
    silent, alive = sessions.open(), sessions.open()
    monkeypatch.setattr(sessions_of_tinker, "running_seconds", lambda: now + 8)
    sessions.get(alive.session_id)
    monkeypatch.setattr(sessions_of_tinker, "running_seconds", lambda: now + 11)
    assert sessions.silent() == [silent.session_id]
    sessions.end(silent.session_id, "its client was silent")
    with pytest.raises(Refusal, match="its client was silent") as refusal:
        sessions.get(silent.session_id)
    assert refusal.value.status == 410


def test_a_session_outlives_the_time_in_which_the_server_is_stopped(monkeypatch: pytest.MonkeyPatch):
    """After Ctrl-Z or `scontrol suspend` the clock leaps: the server could hear none of its clients."""
    monkeypatch.setattr(clock, "_clock", clock._Clock())
    sessions, now = Sessions(seconds=10), time.monotonic()
    sessions.open()
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    assert sessions.silent() == []


def test_what_a_session_does_not_have_is_not_found():
    sessions = Sessions(seconds=10)
    session = sessions.open()
    model_id = f"{session.session_id}:train:0"
    session.models[model_id] = ClientModel(model_id, rank=4)
    assert sessions.of_model(model_id)[1].rank == 4
    assert sessions.models == 1
    for look in (sessions.of_model, sessions.of_sampler):
        with pytest.raises(Refusal) as refusal:
            look(f"{session.session_id}:other:1")
        assert refusal.value.status == 404
    with pytest.raises(Refusal, match="there is no session"):
        sessions.of_model("another:train:0")


def test_answers_stay_until_they_were_fetched_long_ago(monkeypatch: pytest.MonkeyPatch):
    sessions, loop, now = Sessions(seconds=10), asyncio.new_event_loop(), running_seconds()
    session = sessions.open()
    for name in ("waits", "is new", "was fetched", "was given up"):
        session.pending[name] = PendingResult(name, loop.create_future())
    session.pending["is new"].answer.set_result(WireAnswer(b""))
    session.pending["was fetched"].answer.set_result(WireAnswer(b"", fetched=now))
    session.pending["was given up"].answer.cancel()
    sessions.drop_fetched()
    assert set(session.pending) == {"waits", "is new", "was fetched"}
    monkeypatch.setattr(sessions_of_tinker, "running_seconds", lambda: now + KEPT_SECONDS + 1)
    sessions.drop_fetched()
    assert set(session.pending) == {"waits", "is new"}
    loop.close()


@pytest.mark.parametrize(
    "uri",
    [
        "tinker://model/weights/../../etc",
        "tinker://../weights/one",
        "tinker://model/weights/..",
        "tinker://model/other/one",
        "tinker://model/weights/",
        "tinker://model/weights/\u00e9",
        "tinker://model/weights/one.partial",  # where a save of `one` is not finished yet
        "tinker://model/weights/one.replaced",  # and where the checkpoint before it waits for its end
        "/etc/passwd",
    ],
)
def test_a_path_does_not_leave_the_directory_of_checkpoints(uri: str):
    with pytest.raises(Refusal):
        CheckpointPath.parse(uri)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"expires": null}', '{"time": "now", "expires": null}', '{"time": 1, "expires": "never"}'],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, text: str):
    path = CheckpointPath.parse("tinker://model/weights/one")
    file = path.directory(tmp_path) / "info.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    for read in (lambda: read_info(tmp_path, path), lambda: list_checkpoints(tmp_path, "model")):
        with pytest.raises(Refusal, match=r"a checkpoint is damaged: .*info\.json"):
            read()


def test_an_expired_checkpoint_is_hidden_and_can_be_removed(tmp_path: Path):
    unexpired, expired = (CheckpointPath.parse(f"tinker://model/weights/{name}") for name in ("one", "two"))
    for path, expires in ((unexpired, time.time() + 3600), (expired, time.time() - 1)):
        path.directory(tmp_path).mkdir(parents=True)
        info = {"time": 1.0, "expires": expires}
        (path.directory(tmp_path) / "info.json").write_text(json.dumps(info))
    assert [path for path, _ in list_checkpoints(tmp_path, "model")] == [unexpired]
    with pytest.raises(Refusal, match="two has expired"):
        read_info(tmp_path, expired)
    remove(tmp_path, expired)
    assert not expired.directory(tmp_path).exists() and unexpired.directory(tmp_path).exists()
    with pytest.raises(Refusal, match="there is no checkpoint"):
        remove(tmp_path, expired)


def test_expired_checkpoints_of_all_models_are_removed_before_a_save(tmp_path: Path):
    soon, past = time.time() + 3600, time.time() - 1
    for model, name, text in (
        ("a", "stays", json.dumps({"time": 1.0, "expires": None})),
        ("a", "later", json.dumps({"time": 1.0, "expires": soon})),
        ("a", "gone", json.dumps({"time": 1.0, "expires": past})),
        ("b", "gone", json.dumps({"time": 1.0, "expires": past})),
        ("b", "damaged", "{"),
        ("b", "one.partial", json.dumps({"time": 1.0, "expires": past})),
    ):
        directory = tmp_path / model / "weights" / name
        (directory / "weights").mkdir(parents=True)
        (directory / "info.json").write_text(text)
    checkpoints.remove_expired(tmp_path)
    remaining = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/*"))
    assert remaining == ["a/weights/later", "a/weights/stays", "b/weights/damaged", "b/weights/one.partial"]


def test_a_kill_while_a_checkpoint_is_replaced_loses_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = CheckpointPath.parse("tinker://model/weights/one")
    final = path.directory(tmp_path)
    partial = final.with_name("one.partial")

    def save(content: str) -> None:
        partial.mkdir(parents=True)
        (partial / "weights").write_text(content)
        checkpoints._finish(partial, final, {"time": 1.0, "expires": None})

    def killed(directory: Path, **_: object) -> None:
        rmtree(directory, ignore_errors=True)
        if directory.name == "one":
            raise InterruptedError

    save("first")
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", killed)
    save("second")
    assert (final / "weights").read_text() == "second"
    assert [file.name for file in final.parent.iterdir()] == ["one"]
    (final.parent / "one.replaced").mkdir()
    (final / "info.json").rename(final.parent / "one.replaced" / "info.json")
    assert list_checkpoints(tmp_path, "model") == []


def test_a_path_is_read_as_it_is_written():
    uri = "tinker://0f-1:train:0/sampler_weights/step_10"
    assert CheckpointPath.parse(uri).uri == uri
