"""A real `megatron-gvpo serve --tinker`, and programs with the real SDK in an environment of their own.

tools/tinker/make_env.sh builds the environment once, in the user's cache. Where it cannot be built, the tests
that need it fail and say why.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from helpers.paths import ROOT
from helpers.suite.real_parts import used

KEY = "tml-a-key-of-the-tests"
START_SECONDS = 900.0  # enough for an engine's start, too, on a busy machine
BUILD_SECONDS = 1200.0


@functools.cache
def sdk_python() -> str:
    """Return the interpreter of the SDK's environment; build the environment if it is missing."""
    script = ROOT / "tools" / "tinker" / "make_env.sh"
    environment = {**os.environ, "TINKER_PYTHON": sys.executable}
    built = subprocess.run([script], capture_output=True, text=True, timeout=BUILD_SECONDS, env=environment)
    assert built.returncode == 0, f"no environment for the Tinker SDK:\n{built.stderr[-3000:]}"
    return built.stdout.strip().splitlines()[-1]


@contextmanager
def serving(directory: Path, *overrides: str, ranks: int = 1) -> Iterator[str]:
    """Context of a server; its configuration is directory/server.yaml. Yields the URL.

    The server must end by itself when it gets a signal.
    """
    log = directory / "server.log"
    command = [sys.executable, "-m", "megatron_gvpo", "serve", "--tinker", "server.yaml", "serve.port=0"]
    command += [*overrides, "--nproc", str(ranks)]
    environment = {**os.environ, "TINKER_TEST_KEY": KEY, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield _address(server, log)
        server.terminate()
        assert server.wait(60) == 0, log.read_text()[-3000:]
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if match := re.search(r"^serving .* at (http://\S+)$", log.read_text(), re.M):
            return match[1]
        assert server.poll() is None, f"the server ended:\n{log.read_text()[-3000:]}"
        time.sleep(0.2)
    raise AssertionError(f"the server does not listen:\n{log.read_text()[-3000:]}")


def run_client(directory: Path, *command: str, key: str = KEY, seconds: float = 300) -> str:
    """Run a Python program with the SDK; returns what it printed. Raises AssertionError if it fails."""
    used("Tinker SDK")
    environment = {**os.environ, "TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    # The user's cache would have another test's rows.
    environment["HF_DATASETS_CACHE"] = str(directory / "datasets")
    done = subprocess.run(
        [sdk_python(), "-W", "ignore", *command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def recipe(name: str, url: str, **settings: object) -> Sequence[str]:
    """The command line of a recipe of tinker-cookbook."""
    options = {"base_url": url, **settings}
    return ["-m", f"tinker_cookbook.recipes.{name}", *(f"{key}={value}" for key, value in options.items())]
