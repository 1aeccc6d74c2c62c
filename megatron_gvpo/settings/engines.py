"""The table of rollout engines, by `rollout.engine`."""

from __future__ import annotations

from megatron_gvpo.core.by_name import known

SERVED = "megatron_gvpo.sampling.served:ServedEngine"  # the engine that asks servers for responses
ENGINES: dict[str, str] = {  # "module:class" for each value of `rollout.engine`
    "local": "megatron_gvpo.sampling.embedded:EmbeddedEngine",
    "sglang": SERVED,
    "vllm": SERVED,
}


def known_engine(name: str) -> str:
    """Returns a known name. Raises ValueError, which lists the engines, for any other."""
    return known(ENGINES, name)
