"""The API's view of checkpoints on disk: their facts, lists of them, and their removal."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from megatron_gvpo.tinker import requests
from megatron_gvpo.tinker.checkpoints import CheckpointPath, list_checkpoints, read_info, remove
from megatron_gvpo.tinker.served_model import ServedModel
from megatron_gvpo.tinker.wire import Refusal

_TYPES = {"weights": "training", "sampler_weights": "sampler"}


def add(app: web.Application, root: Path, model: ServedModel) -> None:
    """Add the routes; checkpoints lie under `root`."""

    async def weights_info(request: web.Request) -> web.Response:
        body = requests.read(requests.WeightsInfo, await request.read())
        info = read_info(root, CheckpointPath.parse(body.tinker_path))
        return web.json_response({key: info.get(key) for key in model.weights_info()})

    async def checkpoints(request: web.Request) -> web.Response:
        listed = _listed(root, request.match_info["model_id"])
        return web.json_response({"checkpoints": [_checkpoint(path, info) for path, info in listed]})

    async def delete(request: web.Request) -> web.Response:
        kind, name = request.match_info["kind"], request.match_info["name"]
        remove(root, CheckpointPath.parse(f"tinker://{request.match_info['model_id']}/{kind}/{name}"))
        return web.json_response({})

    async def training_run(request: web.Request) -> web.Response:
        model_id = request.match_info["model_id"]
        listed = _listed(root, model_id)
        if not listed:
            raise Refusal(f"{model_id!r} has no checkpoint", 404)
        newest = {path.kind: _checkpoint(path, info) for path, info in listed}
        answer = {
            "training_run_id": model_id,
            "model_owner": "",
            "last_request_time": max(checkpoint["time"] for checkpoint in newest.values()),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": listed[-1][1].get("model_metadata"),
        }
        return web.json_response(answer | model.weights_info())

    run = "/api/v1/training_runs/{model_id}"
    app.router.add_post("/api/v1/weights_info", weights_info)
    app.router.add_get(f"{run}/checkpoints", checkpoints)
    app.router.add_delete(f"{run}/checkpoints/{{kind}}/{{name}}", delete)
    app.router.add_get(run, training_run)


def _listed(root: Path, model_id: str) -> list[tuple[CheckpointPath, dict[str, Any]]]:
    CheckpointPath.of(model_id, "weights", "any")
    return list_checkpoints(root, model_id)


def _checkpoint(path: CheckpointPath, info: dict[str, Any]) -> dict[str, Any]:
    expires = info.get("expires")
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": _TYPES[path.kind],
        "time": _date(info["time"]),
        "tinker_path": path.uri,
        "user_metadata": info.get("user_metadata"),
        "expires_at": None if expires is None else _date(expires),
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
