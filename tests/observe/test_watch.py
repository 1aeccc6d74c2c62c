"""The report's page of a run that goes on: served on loopback, refreshed, and to nobody else."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from helpers.inputs.made_run import make_run
from helpers.machine.chromium import Page, browser

from megatron_gvpo.cli import main
from megatron_gvpo.observe.report.watch import Watched, WatchServer
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@contextmanager
def watching(*runs: Path) -> Iterator[WatchServer]:
    with WatchServer(Watched(runs, 1000), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def take_steps(source: Path, target: Path, steps: int) -> None:
    """Make `target` the run `source` as it was after so many steps."""
    lines = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
    for file in (source / "rollouts").iterdir():
        if int(file.stem[5:]) <= steps:
            shutil.copy(file, target / "rollouts" / file.name)
    (target / "metrics.jsonl").write_text("".join(lines[: steps + 1]))


def answer(server: WatchServer, path: str, host: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    with connection.getresponse() as response:
        return response.status, response.read()


def test_the_page_follows_the_run_without_being_loaded_again(page: Page, tmp_path: Path):
    finished_run = make_run(tmp_path / "whole", steps=4)
    now = make_run(tmp_path / "now", steps=0, config={"train": {"steps": 4}})
    with watching(now) as server:
        take_steps(finished_run, now, 2)
        page.open(server.url)
        page.look("window.mark = 1")
        page.look("document.querySelector('details.more').open = true")
        assert "2 of 4" in page.look("document.querySelector('.glance').innerText")
        take_steps(finished_run, now, 3)
        page.wait("document.querySelector('.glance').innerText.includes('3 of 4')", "step 3")
        assert page.look("document.querySelector('details.more').open")
        page.look("view('samples')")
        page.wait("Boolean(document.querySelector('.card'))", "the responses of step 3")
        assert page.look("document.getElementById('step-name').textContent") == "step 3"
        take_steps(finished_run, now, 4)
        page.wait("state.index.runs[0].step.at(-1) === 4", "step 4")
        assert page.look("document.getElementById('step-name').textContent") == "step 3"
        assert page.look("window.mark") == 1 and page.console == []
        assert {url.split("/")[2] for url in page.requests} == {f"127.0.0.1:{server.server_port}"}
        (now / "metrics.jsonl").write_text("no metrics\n")
        page.wait("document.getElementById('live').title.includes('line 1')", "the damaged line")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9999", 200),  # through an ssh tunnel from another port
        ("127.0.0.1", 200),
        ("[::1]:8900", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8900", 403),
        ("localhost.evil.example", 403),
        ("", 403),
        ("[::1", 403),
    ],
)
def test_a_name_of_another_site_is_refused(tmp_path: Path, host: str, status: int):
    with watching(make_run(tmp_path / "run", steps=1)) as server:
        for path in ("/", "/version", "/data/index"):
            code, content = answer(server, path, host)
            assert code == status
            assert status == 200 or b"first" not in content


def test_only_this_machine_reaches_the_server_and_only_blocks_are_served(tmp_path: Path):
    with watching(make_run(tmp_path / "run", steps=1)) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1" and server.socket.family == socket.AF_INET
        for path in ("/data/../run.json", "/run.json", "/data/", "/data/none", "/data/%2e%2e/config.yaml"):
            assert answer(server, path, "localhost")[0] == 404


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_stop(number: signal.Signals, tmp_path: Path):
    """Also where it was started with SIGINT ignored, as a shell starts what runs in the background."""
    run = make_run(tmp_path / "run", steps=1)
    command = [sys.executable, "-m", "megatron_gvpo", "watch", str(run), "--port", "0"]
    ignoring = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=ignoring) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            connection = http.client.HTTPConnection(url.split("/")[2], timeout=120)
            connection.request("GET", "/version")
            assert json.load(connection.getresponse())
            assert main(["watch", str(run), "--port", url.rstrip("/").rpartition(":")[2]]) == 2
            process.send_signal(number)
            assert process.wait(120) == 0
        finally:
            process.kill()


class Look(Callback):
    """Looks at the page after every step of a run."""

    def __init__(self, page: Page, server: WatchServer) -> None:
        self.page, self.server = page, server
        self.shown: list[str] = []

    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        if step == 1:
            self.page.open(self.server.url)
        if step:
            expected = f"document.querySelector('.glance').innerText.includes('{step} of')"
            self.page.wait(expected, f"step {step} on the page")
            self.shown.append(self.page.look("document.querySelector('.glance td').textContent"))


def test_a_real_run_is_seen_while_it_goes_on(page: Page, task: Path, tmp_path: Path):
    from helpers.tiny_run import GVPO, SHORT, configure, fit

    out = tmp_path / "run"
    out.mkdir()
    with watching(out) as server:
        look = Look(page, server)
        fit(configure(task, out, *GVPO, *SHORT, "train.steps=3"), [look])
    assert look.shown == ["1 of 3", "2 of 3", "3 of 3"]
