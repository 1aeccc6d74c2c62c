"""Ranks that do not come to the place where the others wait for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

MEET = """
from datetime import timedelta
from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.runtime.store import meet
try:
    meet("gloo", timedelta(seconds=1))
except ConfigError as error:
    print(error)
"""


def test_variables_of_a_job_whose_other_ranks_nobody_starts() -> None:
    """Fails on the old code: torch's error about a key of its store, with a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", MEET], env=os.environ | given, capture_output=True, text=True, timeout=120
    )
    said = f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: rank 0 did not meet all ranks of WORLD_SIZE=2 there "
    assert (
        done.stdout.startswith(said + "within parallel.timeout_seconds=1: ") and done.stdout.count("\n") == 1
    )
