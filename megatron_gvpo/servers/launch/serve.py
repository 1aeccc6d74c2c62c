"""`megatron-gvpo serve`: the rollout servers of one machine, which run until a signal stops the command.

On a cluster it runs on every rollout node (`srun megatron-gvpo serve CONFIG.yaml rollout.servers.host=...`),
and the trainer gets their addresses as `rollout.servers.urls`. A server that is started again here has old
weights: the trainer sees that, and gives it the current ones before the first request. A server on several
machines has a `serve` on each (`rollout.servers.nodes`). In a Slurm job colocated servers start when the
trainer has given its memory away.
"""

from __future__ import annotations

import signal
import threading

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.signals import handled_by
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.launch.addresses import check_address
from megatron_gvpo.servers.launch.first_turn import wait_for_turn
from megatron_gvpo.servers.launch.start import report, start_servers
from megatron_gvpo.servers.launch.supervise import Supervisor
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig
from megatron_gvpo.settings.servers import ServersConfig


def serve(
    model: ModelConfig,
    rollout: RolloutConfig,
    output_dir: str,
    cards: ModelCards,
    trainer_timeout: float,
) -> int:
    """Start the servers, say when they are healthy, end them on SIGTERM or SIGINT; returns the exit code.

    0: stopped by a signal; 1: a server could not be kept running. After all were healthy, the others serve
    until a signal stops them, or they are given up as well. Raises ConfigError for settings that are not
    possible.

    `trainer_timeout`: seconds in which the trainer of the same job gives colocated servers its memory; then
    RolloutError is raised.
    """
    if not rollout.uses_servers:
        raise ConfigError(
            f"rollout.engine={rollout.engine} has no servers: serve needs rollout.engine=sglang or vllm"
        )
    key = check_address(rollout.servers)
    if key is None:
        report(
            "note: without rollout.servers.api_key_env every user of this machine can use the servers and "
            "load weights into them"
        )
    stop = threading.Event()
    with handled_by(lambda *_: stop.set(), (signal.SIGTERM, signal.SIGINT)):
        if rollout.servers.colocated and not wait_for_turn(stop, trainer_timeout, report):
            return 0
        supervisor = start_servers(model, rollout, output_dir, cards, key, report)
        try:
            return _run_until_stopped(supervisor, rollout.servers, stop)
        finally:
            supervisor.close()


def _run_until_stopped(supervisor: Supervisor, settings: ServersConfig, stop: threading.Event) -> int:
    """Say when all servers are healthy; return the exit code after a signal to stop, or a failure."""
    waiting = list(supervisor.processes)
    deadline = running_seconds() + settings.start_timeout
    while not stop.wait(1.0):
        if (waiting and supervisor.failed) or supervisor.none_left():
            break
        if waiting and not (waiting := [p for p in waiting if not p.is_healthy(5.0)]):
            urls = ",".join(process.url for process in supervisor.processes)
            message = f"started: {urls}" if settings.node else f"ready: rollout.servers.urls=[{urls}]"
            print(message, flush=True)
        if waiting and running_seconds() > deadline:
            report(
                f"{waiting[0].url} was not healthy after {settings.start_timeout:g} s; see {waiting[0].log}"
            )
            return 1
    return 0 if supervisor.failed is None else 1
