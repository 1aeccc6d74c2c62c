"""The sections of a configuration that have servers of reward models, judges or a teacher."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.reward_servers import key_of
from megatron_gvpo.settings.servers import EngineServers


def sections(config: Config) -> Iterator[tuple[str, EngineServers]]:
    """Yield (key, servers) of each section, in the order of their GPUs."""
    for i, component in enumerate(config.rewards.components):
        if component.served is not None:
            yield f"{key_of(i, component.served)}.servers", component.served.servers
    if config.teacher is not None and config.teacher.server is not None:
        yield "teacher.server", config.teacher.server


def started_gpus(config: Config) -> dict[str, int]:
    """The GPUs of the servers that the run starts itself, by section."""
    return {key: servers.count * servers.tp for key, servers in sections(config) if not servers.urls}
