"""Serves one environment of NeMo-Gym on loopback: python -P nemo_gym_server.py CONFIG PORT.

It runs in NeMo-Gym's own Python environment, so it imports nothing of this package. `-P` keeps the directory
of this file, which has modules named like libraries, off the path of imports.

NeMo-Gym's own `run_webserver` starts a Ray cluster and reads the address of a head server. This program does
the rest: it makes the configuration's server class from its entrypoint, and serves its endpoints.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

KIND = "resources_servers"
AGENTS = ("simple_agent", "gymnasium_agent")  # NeMo-Gym's agents whose part the trainer plays


def main() -> None:
    path, port = sys.argv[1], int(sys.argv[2])
    package = importlib.util.find_spec("nemo_gym")
    if package is None or package.origin is None:
        refuse(f"nemo-gym is not installed in the environment of {sys.executable}")
    # The directories in which NeMo-Gym looks for a configuration, in this order.
    directories = [Path.cwd(), Path(package.origin).parents[1]]
    file = next((f for f in (d / path for d in directories) if f.is_file()), None)
    if file is None:
        refuse(f"there is no file {path} in {' or '.join(map(str, directories))}")
    try:
        everything = OmegaConf.load(file)
        name, kind, settings = server_of(OmegaConf.to_container(everything, resolve=True))
    except (OmegaConfBaseException, ValueError) as problem:
        refuse(f"{file}: {' '.join(str(problem).split())}")
    own = (d / KIND / kind for d in directories)
    if (directory := next((d for d in own if (d / settings["entrypoint"]).is_file()), None)) is None:
        refuse(f"{file}: {name}: there is no {KIND}/{kind}/{settings['entrypoint']}")
    sys.path[:0] = [str(directory), str(directory.parents[1])]
    os.chdir(directory)  # NeMo-Gym also starts its servers in this directory
    prepare(port, name, settings, everything)
    runpy.run_path(settings["entrypoint"], run_name="__main__")


def prepare(port: int, name: str, settings: Mapping[str, Any], everything: Any) -> None:
    """Let the entrypoint's `run_webserver` serve its class with these settings, on this port."""
    # These imports take seconds. They come after the configuration is checked, so that it is refused at once.
    import uvicorn
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient, SimpleServer

    address = BaseServerConfig(host="127.0.0.1", port=port)

    def serve(cls: Any) -> None:
        own = {**settings, "host": address.host, "port": port, "name": name}
        config = cls.model_fields["config"].annotation.model_validate(own)
        client = ServerClient(head_server_config=address, global_config_dict=everything)
        server = cls(config=config, server_client=client)
        uvicorn.run(server.setup_webserver(), host=address.host, port=port, log_level="warning")

    SimpleServer.run_webserver = classmethod(serve)


def server_of(config: Any) -> tuple[str, str, Mapping[str, Any]]:
    """(name, directory, settings) of the configuration's environment. Raises ValueError if it has not one."""
    servers = {
        name: part[KIND] for name, part in config.items() if isinstance(part, Mapping) and KIND in part
    }
    if len(servers) != 1:
        raise ValueError(f"it has the resources servers {', '.join(servers) or 'none'}: want one")
    [(name, kinds)] = servers.items()
    [(kind, settings)] = kinds.items()
    if others := sorted(set(references(settings))):
        raise ValueError(
            f"{name} asks other servers, {', '.join(others)}: start it with `gym env start`, and give the url"
        )
    for agent, part in config.items():
        for program, own in (part.get("responses_api_agents") or {}).items():
            if program not in AGENTS and name in references(own):
                raise ValueError(f"{agent} is a {program}; only {' and '.join(AGENTS)} are supported")
    return name, kind, settings


def references(value: Any) -> Iterator[str]:
    """The names of the servers that a part of a configuration refers to."""
    if isinstance(value, Mapping):
        if str(value.get("type")).startswith(("responses_api_", KIND)) and "name" in value:
            yield value["name"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def refuse(problem: str) -> NoReturn:
    print(problem, flush=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
