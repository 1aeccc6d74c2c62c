"""Refuses a server that serves another model than the configuration names, as far as its files tell."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path

from megatron_gvpo.rewards.served.verdict import Misfit
from megatron_gvpo.rollout.http import Http, ServerRefused
from megatron_gvpo.runs.fingerprint import fingerprint


async def check_model(http: Http, engine: str, path: str, key: str, timeout: float) -> None:
    """Compare the weights in the directory that a server names with those in `path`. Raises Misfit.

    `key`: the configuration's, of `path`. A directory that this machine cannot read is not compared.
    """
    served = await _directory(http, engine, timeout)
    if served is not None and not await asyncio.to_thread(_has_weights_of, served, path):
        raise Misfit(
            f"{key}={path}: {http.url} serves {served}, which has other weights: start it with the model in "
            f"{key}, or name its directory there"
        )


async def _directory(http: Http, engine: str, timeout: float) -> str | None:
    """The directory that the server was started with; None from one that does not tell."""
    try:
        answer = await http.get("/v1/models" if engine == "vllm" else "/model_info", timeout=timeout)
        return str(answer["data"][0]["root"] if engine == "vllm" else answer["model_path"])
    except (LookupError, TypeError):
        return None
    except ServerRefused as error:
        if not error.is_request:
            raise
        return None


@cache
def _has_weights_of(served: str, path: str) -> bool:
    """True also where they cannot be compared."""
    if not (Path(served) / "config.json").is_file() or os.path.realpath(served) == os.path.realpath(path):
        return True
    theirs, ours = (fingerprint(Path(directory), ("*.safetensors",)) for directory in (served, path))
    return theirs == ours
