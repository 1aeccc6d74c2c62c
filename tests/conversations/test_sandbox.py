"""The tool `python` in real sandboxes of bubblewrap's: what gets out, what is bounded, what is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import yaml
from helpers.machine.debian import install
from helpers.machine.processes import command_of
from helpers.suite.real_parts import used
from helpers.tiny_run import GVPO, SHORT, configure, fit, records
from test_environments import Harness

from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import LOST, Prompt
from megatron_gvpo.huggingface.tokenizer import end_token_id, load_tokenizer
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.workers.sandbox import OUTPUT, Sandbox

SECONDS = 8.0  # a busy machine may need some for the simplest program
HOSTILE = yaml.safe_load(Path(__file__).with_name("hostile_programs.yaml").read_text())
SECRET = "the-secret-of-this-machine"


@pytest.fixture(scope="module", autouse=True)
def bubblewrap() -> Iterator[None]:
    install(["bwrap"], ["bubblewrap"])
    used("bubblewrap")
    yield


@pytest.fixture
def sandbox() -> Sandbox:
    return Sandbox(SECONDS, memory_mb=256)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print(2 + 3)", "5\n"),
        ("x = 1", "[no output]"),
        ("import math, json, decimal, sqlite3, ctypes; print(math.pi)", "3.141592653589793\n"),
        ("open('a', 'w').write('b'); print(open('a').read())", "b\n"),
        ("import threading\nt = threading.Thread(target=print, args=(1,)); t.start(); t.join()", "1\n"),
        ("import asyncio\nasync def f(): print(1)\nasyncio.run(f())", "1\n"),
        ("print(__name__); print(__file__); import sys; print(sys.argv)", None),
        ("print('a'); print(1 / 0)", None),
    ],
)
def test_programs_print(sandbox: Sandbox, source: str, expected: str | None) -> None:
    printed = str(sandbox.run(source))
    if "__name__" in source:
        expected = "__main__\n/tmp/program.py\n['/tmp/program.py']\n"
    if "1 / 0" in source:
        expected = (
            'a\nTraceback (most recent call last):\n  File "/tmp/program.py", line 1, in <module>\n'
            "    print('a'); print(1 / 0)\n                      ~~^~~\n"
            "ZeroDivisionError: division by zero\n[exit code 1]"
        )
    assert printed == expected


def test_packages_can_be_imported_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(): return 7\n")
    sandbox = Sandbox(SECONDS, 256, str(tmp_path))
    assert sandbox.run("import mine; print(mine.f())").output == "7\n"
    assert "Read-only" in sandbox.run("import mine; open(mine.__file__, 'w')").output


def test_a_hundred_hostile_programs_stay_inside(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(HOSTILE) >= 100 and len({program["name"] for program in HOSTILE}) == len(HOSTILE)
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    monkeypatch.setenv("API_TOKEN", SECRET)
    open_before = len(os.listdir("/proc/self/fd"))
    me = psutil.Process()
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as file,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name,
    ):
        port = tcp.getsockname()[1]
        file.bind(str(tmp_path / "socket"))
        name.bind(f"\0gvpo{port}")
        replacements = {
            "@PORT@": str(port),
            "@SECRET@": str(secret),
            "@DIR@": str(tmp_path),
            "@PID@": str(me.pid),
        }
        before = sorted(tmp_path.iterdir())

        def attempt(program: dict[str, str]) -> str | None:
            """The reason why the sandbox failed; None for none."""
            code = program["code"]
            for placeholder, value in replacements.items():
                code = code.replace(placeholder, value)
            printed = str(sandbox.run(code))
            if "ESCAPED" in printed.partition("Traceback")[0] or SECRET in printed:
                return f"{program['name']}: got out: {printed[-500:]}"
            if re.search(program["says"], printed.rstrip("\n")) is None:
                return f"{program['name']}: want {program['says']!r}, not {printed[-500:]!r}"
            if len(printed) > OUTPUT + 100:
                return f"{program['name']}: {len(printed)} characters"
            after = str(sandbox.run("print(6 * 7)"))
            return None if after == "42\n" else f"after {program['name']}: {after}"

        with ThreadPoolExecutor(4) as pool:
            wrong = [problem for problem in pool.map(attempt, HOSTILE) if problem is not None]
        assert wrong == [], "\n".join(wrong)
        for quiet in (tcp, file, name):
            quiet.setblocking(False)
            with pytest.raises(BlockingIOError):
                quiet.accept() if quiet is tcp else quiet.recv(1)
        assert sorted(tmp_path.iterdir()) == before and secret.read_text() == SECRET
    assert [each for each in me.children(recursive=True) if "bwrap" in " ".join(command_of(each)[:1])] == []
    # A leak would add one for each of the hundred programs; other threads of the tests open and close a few.
    assert len(os.listdir("/proc/self/fd")) < open_before + 10


def test_a_machine_that_cannot_make_sandboxes_is_refused_at_the_start(
    good: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(task / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    own = ("rollout={conversation: {tools: [python]}, max_tokens: 64}", f"model.path={model}")
    config = load_config([good], (*own, f"data.train.path={task / 'data' / 'train.jsonl'}"))
    preflight(config, "train", 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"tools: python: bubblewrap is not installed: apt-get install"):
        preflight(config, "train", 1)
    preflight(config, "slurm", 1)  # the job's nodes may have it
    for message, remedy in (
        ("Unknown option --disable-userns", "0.8 or newer is needed"),
        ("No permissions to create new namespace", "must be allowed to make namespaces"),
    ):
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\necho 'bwrap: {message}' >&2\nexit 1\n")
        (tmp_path / "bwrap").chmod(0o755)
        with pytest.raises(ConfigError, match=rf"bwrap: {message}: .*{remedy}"):
            preflight(config, "train", 1)


def test_bubblewrap_without_namespaces_is_refused() -> None:
    """A real bubblewrap, in surroundings that allow no further namespaces."""
    from helpers.paths import ROOT

    program = (
        "from megatron_gvpo.workers.sandbox import Sandbox\n"
        "try: Sandbox(4.0, 256).check()\nexcept ValueError as error: print(error)"
    )
    inside = ["--unshare-user", "--disable-userns", "--bind", "/", "/", "--dev-bind", "/dev", "/dev"]
    done = subprocess.run(
        ["bwrap", *inside, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.stdout.startswith("a sandbox did not start: bwrap: "), done
    assert "must be allowed to make namespaces" in done.stdout


CALL = '{{"name": "python", "arguments": {}}}'


def test_the_policy_sees_what_its_programs_did_wrong(task: Path) -> None:
    tokenizer = load_tokenizer(str(task / "model"))
    material = Task(tokenizer, (end_token_id(tokenizer),), [], [])
    config = ConversationConfig(
        tools=("python",), parser="json", turns=9, observation_tokens=400, sandbox={"seconds": SECONDS}
    )
    programs = ["print(6 * 7)", "while True: pass", "1 / 0", "import os; os.kill(os.getpid(), 9)", "print(1)"]
    turns = [CALL.format(json.dumps({"code": code})) for code in programs]
    turns += [CALL.format('{"code": 3}'), CALL.format('{"kode": "1"}'), "done"]
    with Harness(material, config) as harness:
        texts = iter(turns)  # the tiny tokenizer knows no letters
        harness.conversations._template.text = lambda ids: next(texts)
        [[rollout]] = harness.hold([Prompt("p", (5,), "?")], ["1"] * 9, max_tokens=4000)
    answers = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert answers[0] == "42\n"
    assert answers[1] in (f"[it took longer than {SECONDS:g} seconds]", "[too much computing time]")
    assert answers[2].endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert answers[3] == "[signal 9, Killed]" and answers[4] == "1\n"
    assert answers[5:] == ["Error: python: it takes one argument, code, which is a text"] * 2
    assert (rollout.finish_reason, rollout.counts["tool_calls"]) == ("stop", 7)
    assert rollout.counts["tool_errors"] == 5


def test_a_sandbox_that_does_not_start_loses_the_conversation(task: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(task / "model"))
    packages = tmp_path / "packages"
    packages.mkdir()
    config = ConversationConfig(tools=("python",), parser="json", sandbox={"packages": str(packages)})
    with Harness(Task(tokenizer, (end_token_id(tokenizer),), [], []), config) as harness:
        packages.rmdir()
        harness.conversations._template.text = lambda ids: CALL.format('{"code": "print(1)"}')
        [[rollout]] = harness.hold([Prompt("p", (5,), "?")], ["1"] * 9)
    assert rollout.finish_reason == LOST
    assert "SandboxFailed: a sandbox did not start: bwrap: Can't find source path" in rollout.text


ENVIRONMENT = f"""
import json, pathlib
from megatron_gvpo.conversations import Reply
from megatron_gvpo.workers.sandbox import Sandbox

PROGRAMS = json.loads(pathlib.Path("programs.json").read_text())

class Hostile:
    def reset(self, prompt, seed):
        self.sandbox, self.next = Sandbox({SECONDS}, 256), seed

    def step(self, response):
        outcome = self.sandbox.run(PROGRAMS[(self.next + len(response)) % len(PROGRAMS)])
        self.next += 1
        says = str(len(str(outcome)) % 10)
        return Reply(says, reward=len(response), counts={{"bad": bool(outcome.problem) + 0}})
"""


@pytest.mark.usefixtures("leave_the_process_group")
def test_a_run_goes_on_among_hostile_programs(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fast = [p["code"] for p in HOSTILE if "seconds" not in p["says"] and "@" not in p["code"]]
    (tmp_path / "programs.json").write_text(json.dumps(fast))
    (tmp_path / "hostile.py").write_text(ENVIRONMENT)
    talk = ("rollout.conversation={environment: hostile.py:Hostile, turns: 2, workers: 2}", "train.steps=2")
    own = ("rewards.components=[{name: environment}]", "rollout.max_tokens=24", "rollout.n=2")
    out = tmp_path / "run"
    fit(configure(task, out, *GVPO, *SHORT, *talk, *own))
    _, *lines = records(out)
    assert len(lines) == 2 and all(line["env/lost"] == 0 for line in lines)
    assert sum(line["env/bad"] for line in lines) > 0.5
