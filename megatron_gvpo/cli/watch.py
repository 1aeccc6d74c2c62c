"""`megatron-gvpo watch`: the report's page while the runs go on, on this machine's loopback address."""

from __future__ import annotations

import argparse
import signal
from contextlib import suppress
from typing import Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.report import add_runs, check
from megatron_gvpo.cli.terminal import say
from megatron_gvpo.core.errors import ConfigError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "watch", help="serve the report of runs to a browser while they are in progress"
    )
    add_runs(parser)
    parser.add_argument(
        "--port",
        type=configured.integer,
        default=8900,
        metavar="N",
        help="port on 127.0.0.1 (default: 8900; 0: any)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM. Raises ConfigError for a missing run or a port that is taken."""
    from megatron_gvpo.observe.report.watch import Watched, WatchServer

    check(options)
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port {options.port}: want 0 to 65535")
    watched = Watched(options.runs, options.responses)
    watched.block("index")  # this reports wrong input in the terminal
    try:
        server = WatchServer(watched, options.port)
    except OSError as error:
        raise ConfigError(f"--port {options.port}: {error.strerror}; give another, or 0 for any") from None
    say(f"{server.url}  (Ctrl-C ends it; from another machine: ssh -L {server.server_port}:localhost:"
        f"{server.server_port} THIS_MACHINE, then http://localhost:{server.server_port}/)")  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background process ignores SIGINT by default
        signal.signal(number, signal.default_int_handler)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0
