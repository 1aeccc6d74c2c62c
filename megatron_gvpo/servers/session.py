"""The servers of a run on rank 0, from their start to their end."""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.end_tokens import StopStrings
from megatron_gvpo.huggingface.image_families import takes_images
from megatron_gvpo.servers.answers import Routers
from megatron_gvpo.servers.http import Http, open_session
from megatron_gvpo.servers.launch.addresses import given_key
from megatron_gvpo.servers.launch.start import DIALECTS, report, start_servers
from megatron_gvpo.servers.launch.supervise import Supervisor
from megatron_gvpo.servers.leader import BackgroundLoop, Command, result_of
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.request_images import ImageSender
from megatron_gvpo.servers.server import Server
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig

MISSED = 3.0  # a server gives up a push after this many health checks without a request of the trainer


class ServerSession:
    """Starts servers, or connects to those of `rollout.servers.urls`; `close` ends servers that it started.

    `pool` holds the servers and runs in `loop`. The constructor returns before the servers are healthy:
    `next_command` tells when they are. It raises ConfigError for servers that cannot be started. `check`
    raises ConfigError for a healthy server that does not fit the run, and returns its context length or 0.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        output_dir: str,
        cards: ModelCards,
        end_token_ids: Sequence[int],
        stop_strings: StopStrings,
        check: Callable[[Server], Awaitable[int]],
    ) -> None:
        self._check = check
        self.context_length: int | None = None  # the shortest of the healthy servers, if they tell it
        servers, dialect = rollout.servers, DIALECTS[rollout.engine]
        with ExitStack() as opened:  # ends earlier parts if a later one fails to start
            self.supervisor, urls, key = _servers(model, rollout, output_dir, cards)
            if self.supervisor is not None:
                # registered first, so it is closed last, and no request waits for a dead server
                opened.callback(self.supervisor.close)
            self.loop = BackgroundLoop("rollout client")
            opened.callback(self.loop.close)
            session = self.loop.run(open_session())
            opened.callback(lambda: self.loop.run(session.close()))
            routers = Routers.of(cards.policy) if rollout.router_replay else None
            started = {p.url: p.listens for p in self.supervisor.processes} if self.supervisor else {}
            silence = MISSED * servers.health_timeout
            https = [Http(session, url, key, started.get(url), silence) for url in urls]
            keeps_weights = _keeps_weights(rollout)
            clients = [dialect(http, keeps_weights) for http in https]
            images = ImageSender(model.path, cards.policy) if takes_images(cards.policy) else None
            self.pool = ServerPool(
                clients,
                servers,
                end_token_ids,
                report,
                self.supervisor,
                routers,
                images,
                cards.policy.get("vocab_size", math.inf),
                stop_strings,
            )
            opened.callback(self.loop.cancel_all)
            opened.callback(lambda: self.loop.run(self.pool.stop()))
            self._ready = self.loop.submit(self._all_ready())
            self._opened = opened.pop_all()

    def next_command(self) -> Command:
        """Return Done once all servers are healthy and fit the run, Wait after a heartbeat, or Failed."""
        return result_of(self._ready)

    def close(self) -> None:
        self._opened.close()

    async def _all_ready(self) -> None:
        await self.pool.start()
        lengths = [await self._check(handle.server) for handle in self.pool.handles]
        self.context_length = min(filter(None, lengths), default=None)


def _keeps_weights(rollout: RolloutConfig) -> bool:
    """True if servers have weights that no push brings: a base below adapters, or a draft of their own."""
    draft = rollout.speculation
    return rollout.weights.traits.sends_adapter or (draft is not None and draft.own_weights)


def _servers(
    model: ModelConfig, rollout: RolloutConfig, output_dir: str, cards: ModelCards
) -> tuple[Supervisor | None, list[str], str | None]:
    """(supervisor, URLs, API key) of servers that run elsewhere, or are started here. Raises ConfigError."""
    servers = rollout.servers
    if not servers.urls:
        if servers.nodes > 1:
            raise ConfigError(
                f"rollout.servers.nodes={servers.nodes}: the run starts servers on its own machine alone; "
                "start these with megatron-gvpo serve on each of theirs, and give rollout.servers.urls"
            )
        key = secrets.token_hex(16)
        supervisor = start_servers(model, rollout, output_dir, cards, key, report)
        return supervisor, [process.url for process in supervisor.processes], key
    return None, list(servers.urls), given_key(servers)
