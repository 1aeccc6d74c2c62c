"""The service of a teacher or judge that hangs, floods, lies or is something else: one line, in time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.inputs.rows import make_group

from megatron_gvpo import api_model

KEY = "s3cr3t of the judge"  # in no other text: all later messages of this process hide it
HTML = b"<!DOCTYPE html>\n<html><body>Please log in</body></html>"
heard: list[str | None] = []  # the keys that requests brought to /elsewhere


ASKED = {"prompt": "1+1="}
CUT = [{"message": {"content": t}, "finish_reason": reason} for t, reason in (("a", "stop"), ("b", "length"))]


def choices(*contents: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}} for content in contents]}).encode()


ANSWERS = {
    "html": HTML,
    "nothing": b"",
    "number": b"7",
    "list": b'{"choices": 7}',
    "empty": b'{"choices": [{}]}',
    "refuses": choices(None),
    "too many": choices("a", "b"),
    "deep": b"[" * 100_000,
    "cut": json.dumps({"choices": CUT}).encode(),
    "recovers": choices("at last"),
}
outages: list[int | None] = []  # the next answers to the model "recovers": statuses, or None for no answer


class Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        model = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
        if model == "recovers" and outages:
            if (status := outages.pop()) is None:
                return self.connection.close()
            return self._send(status, b"later")
        if model == "fails":
            return self._send(500, b"<html>\n  out of memory\n</html>")
        if model == "redirects":
            self.send_response(302)
            self.send_header("Location", f"http://{self.headers['Host']}/elsewhere")
            return self.end_headers()
        if model == "hangs":
            time.sleep(60)
        if model == "drips":
            self.send_response(200)
            self.end_headers()
            for _ in range(600):
                self.wfile.write(b" ")
                time.sleep(0.1)
        if model == "floods":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b" " * (1 << 20))
        if model in ANSWERS:
            self._send(200, ANSWERS[model])

    def do_GET(self) -> None:
        heard.append(self.headers["Authorization"])
        self._send(200, choices("stolen"))

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients that hang up are expected."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Server(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("html", "no JSON: <!DOCTYPE html> <html><body>Please log in</body></html>"),
        ("nothing", "no JSON: (nothing)"),
        ("number", "TypeError: 'int' object is not subscriptable"),
        ("list", "TypeError: "),
        ("empty", "KeyError: 'message'"),
        ("refuses", "a response without text"),
        ("too many", "2 responses, and 1 were asked for"),
        ("deep", "RecursionError: "),
        ("fails", "HTTPError: HTTP Error 500: Internal Server Error"),
        ("redirects", "HTTPError: HTTP Error 302: Found"),
        ("hangs", "TimeoutError: "),
        ("drips", "TimeoutError: no whole answer within 1 s"),
    ],
)
def test_a_service_that_gives_no_answer_is_told_in_one_line(url, model, problem, monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_JUDGE", KEY)
    begin, timeout = time.monotonic(), 1 if model in ("fails", "hangs", "drips") else 30
    with pytest.raises(api_model.ApiModelError) as error:
        api_model.chat(
            [make_group([1.0], record=ASKED)], 1, url, model, timeout=timeout, api_key_env="KEY_OF_THE_JUDGE"
        )
    text = str(error.value)
    assert text.startswith(f"{url}: prompt p: {problem}") and "\n" not in text and len(text) < 500
    assert time.monotonic() - begin < 30 and KEY not in text
    assert heard == [], "the key does not follow a redirect"


def test_a_request_is_repeated_after_an_outage(url, monkeypatch):
    """A service that is busy or restarts for a moment would have ended a run of many hours."""
    monkeypatch.setattr(api_model, "PAUSE", 0.01)
    outages.extend([503, None, 429])
    group = make_group([1.0], record=ASKED)
    assert api_model.chat([group], 1, url, "recovers", timeout=30) == [["at last"]] and not outages
    outages.extend([503, 404])
    with pytest.raises(api_model.ApiModelError, match="HTTP Error 404"):
        api_model.chat([group], 1, url, "recovers", timeout=30)
    assert outages == [503], "a request that the service refuses is not repeated"
    outages.clear()


def test_a_service_that_floods(url):
    problem = "an answer of more than 67,108,864 bytes"
    with pytest.raises(api_model.ApiModelError, match=problem):
        api_model.chat([make_group([1.0], record=ASKED)], 1, url=url, model="floods", timeout=60)


def test_a_response_that_was_cut_off_is_none(url, caplog):
    """It would get an end token, and teach the policy to end in the middle of a sentence."""
    assert api_model.chat([make_group([1.0], record=ASKED)], 2, url, "cut", max_tokens=9) == [["a", None]]
    assert caplog.messages == [f"{url}: 1 of 2 responses were cut off at max_tokens=9, and are left out"]


def test_a_problem_is_what_the_data_have():
    """A chat was written as Python writes it, and where the field was another, in the policy's template."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]
    (prompt, with_system) = (
        make_group([1.0], record={"prompt": messages}).prompt for messages in (chat[1:], chat)
    )
    assert api_model._problem(prompt, "prompt") == "1+1="
    assert api_model._problem(with_system, "prompt") == "system: Be brief.\n\nuser: 1+1="
    with pytest.raises(
        api_model.ApiModelError, match=r"prompt p: no field 'question' .* fields there: prompt"
    ):
        api_model._problem(prompt, "question")
