"""Requests to judges and teachers: a key stays with the address that was given, and answers are limited."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_gvpo.api_model import ApiModelError, prefers
from megatron_gvpo.core import web
from megatron_gvpo.groups import Prompt, Rollout

KEY = "k3y-of-the-judge"
OK = b"HTTP/1.0 200 OK\r\n\r\n"
FIRST = OK + json.dumps({"choices": [{"text": "A"}]}).encode()


def whole_request(client: socket.socket) -> bytes:
    """Head and body: a connection that is closed with a part unread is reset."""
    data = b""
    while part := client.recv(65536):
        data += part
        head, end, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.I)
        if end and len(body) >= (0 if length is None else int(length[1])):
            break
    return data


@contextmanager
def judge(answer: bytes, pause: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """(URL, requests) of a judge that gives this answer, byte by byte where it pauses in between."""
    requests: list[bytes] = []

    def run() -> None:
        try:
            while True:
                client, _ = server.accept()
                with client:
                    requests.append(whole_request(client))
                    for part in [answer] if not pause else [answer[i : i + 1] for i in range(len(answer))]:
                        client.sendall(part)
                        time.sleep(pause)
        except OSError:  # closed
            pass

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)
        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", requests
        server.shutdown(socket.SHUT_RDWR)


def asked_for_a_preference(url: str, **options: Any) -> float:
    prompt = Prompt(id=0, text="1+1=", token_ids=[1], answer="2", record={"prompt": "1+1="})
    a, b = (Rollout([1], [0.0], text, "stop", 0) for text in ("2", "3"))
    return prefers(prompt, a, b, url, "m", plain=True, **options)


@pytest.mark.parametrize(
    ("text", "reason", "won"),
    [
        ("B, not A", "stop", 0.0),
        ("<think>A is short, but B is right.</think>\n\n**B**", "stop", 0.0),
        ("<think>Is it A or", "length", 0.5),
        ("Let me see: A adds two", "length", 0.5),
        ("B. It is right, and", "length", 0.0),
    ],
)
def test_a_preference_is_read_behind_the_judges_thoughts(text: str, reason: str, won: float):
    answer = json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode()
    with judge(OK + answer) as (url, _):
        assert asked_for_a_preference(url) == won


def test_a_key_follows_no_redirect(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge(FIRST) as (elsewhere, stolen):
        for status in (301, 302, 303, 307, 308):
            moved = f"HTTP/1.0 {status} Moved\r\nLocation: {elsewhere}/x\r\n\r\n".encode()
            with judge(moved) as (url, requests), pytest.raises(ApiModelError, match=rf"HTTP Error {status}"):
                asked_for_a_preference(url, api_key_env="JUDGE_KEY")
            assert KEY.encode() in requests[0]
        assert stolen == []
        assert asked_for_a_preference(elsewhere, api_key_env="JUDGE_KEY") == 1.0


def test_a_user_in_the_url_goes_into_a_header_and_into_no_message():
    with judge(FIRST) as (url, requests):
        assert asked_for_a_preference(url.replace("//", "//me:p%40ss@")) == 1.0
        assert base64.b64encode(b"me:p@ss") in requests[0]
    with pytest.raises(ApiModelError) as failed:
        asked_for_a_preference("http://me:p%40ss@127.0.0.1:9/v1")
    assert "p%40ss" not in str(failed.value) and "127.0.0.1:9/v1" in str(failed.value)


def test_a_proxy_of_the_environment_gets_nothing_that_is_for_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with judge(OK) as (proxy, requests), judge(FIRST) as (url, _):
        monkeypatch.setenv("http_proxy", proxy)
        assert asked_for_a_preference(url) == 1.0 and requests == []


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file:///etc/passwd", "does not begin with http:// or https://"),
        ("ftp://127.0.0.1/x", "does not begin with http:// or https://"),
        ("judge/v1", "does not begin with http:// or https://"),
        ("http://no.such.host.invalid/v1", "URLError"),
        ("http://127.0.0.1:99999/v1", "Port out of range"),
    ],
)
def test_an_address_that_is_none_is_one_error_of_ours(url: str, problem: str):
    with pytest.raises(ApiModelError, match=problem):
        asked_for_a_preference(url)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{}",
        OK + b"[" * 100_000,
        OK + b"9" * 10_000,
        OK + b"\xff",
        OK + b'{"choices": [7]}',
        OK + b'{"choices": {"a": 1}}',
        OK + b'{"choices": []}',
        OK + b"null",
    ],
)
def test_an_answer_that_is_none_is_one_error_of_ours(answer: bytes):
    with judge(answer) as (url, _), pytest.raises(ApiModelError, match=r"^http://127"):
        asked_for_a_preference(url)


def test_an_endless_answer_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(web, "LONGEST", 1000)
    with judge(OK + b"x" * 5000) as (url, _), pytest.raises(ApiModelError, match=r"more than 1,000 bytes"):
        asked_for_a_preference(url)
    with judge(OK + b" " * 900, pause=0.01) as (url, _), pytest.raises(ApiModelError, match=r"within 0\.5 s"):
        asked_for_a_preference(url, timeout=0.5)


def test_a_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with judge(FIRST) as (url, requests):
        with pytest.raises(ApiModelError, match=r"api_key_env: \$JUDGE_KEY is not set"):
            asked_for_a_preference(url, api_key_env="JUDGE_KEY")
        assert requests == []
