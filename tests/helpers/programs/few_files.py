"""A process that may open few files asks a server for many responses at once.

usage: python few_files.py ENGINE URL
"""

from __future__ import annotations

import resource
import sys

from servers.real_servers import Client, admit

from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.settings.servers import ServersConfig

FILES = 200  # the hard limit: no process may raise it


def main(engine: str, url: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES // 2, FILES))
    client = Client(engine, url)
    rows = client.loop.run(ask(ServerPool([client.server], ServersConfig(start_timeout=60), [1], print)))
    client.close()
    print(sum(map(len, rows)), "responses")


async def ask(pool: ServerPool) -> list[list[object]]:
    await pool.start()
    await admit(pool, 0)
    requests = [Request((5, 6, 7, 8 + i), 100, seed=i) for i in range(4)]
    rows = await pool.generate(requests, SamplingConfig(max_tokens=2))
    await pool.stop()
    return rows


main(*sys.argv[1:])
