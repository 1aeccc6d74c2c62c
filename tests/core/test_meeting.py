"""Ranks that do not come to the place where the others wait for them."""

from __future__ import annotations

import os
import subprocess
import sys

# The port is chosen at the last moment: in the seconds of the imports another program could take it.
MEET = """
import os, socket
from datetime import timedelta
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.store import meet
with socket.create_server(("127.0.0.1", 0)) as free:
    os.environ["MASTER_PORT"] = str(free.getsockname()[1])
print(os.environ["MASTER_PORT"])
try:
    meet("gloo", timedelta(seconds=1))
except ConfigError as error:
    print(error)
"""


def test_variables_of_a_job_whose_other_ranks_nobody_starts() -> None:
    """Fails on the old code: torch's error about a key of its store, with a traceback."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", MEET], env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    port, _, printed = done.stdout.partition("\n")
    message = (
        f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: rank 0 did not meet all ranks of WORLD_SIZE=2 there "
    )
    assert printed.startswith(message + "within parallel.timeout_seconds=1: ") and printed.count("\n") == 1
