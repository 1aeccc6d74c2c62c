"""The HTTP side of the Tinker API: checks requests, queues operations for the ranks, returns results.

A request that needs the ranks is answered at once with an id, by which the client fetches the result later
(`retrieve_future`). A request that is repeated because its answer was lost has the same id, and is carried
out once.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.servers.request import derived_seed
from megatron_gvpo.settings.tinker import TinkerConfig
from megatron_gvpo.tinker import checkpoint_routes, requests, wire
from megatron_gvpo.tinker.checkpoints import CheckpointPath, read_info, snapshot_name
from megatron_gvpo.tinker.losses import RequestedLoss
from megatron_gvpo.tinker.operations import BASE, Operation, Outcome
from megatron_gvpo.tinker.queue import FairQueue, QueuedOperation
from megatron_gvpo.tinker.sampler import sampling_of
from megatron_gvpo.tinker.served_model import ServedModel
from megatron_gvpo.tinker.sessions import (
    ClientModel,
    ClientSampler,
    PendingResult,
    Session,
    Sessions,
    WireAnswer,
)
from megatron_gvpo.tinker.wire import Refusal

log = logging.getLogger(__name__)

LARGEST = 2**28  # bytes of a request
# The limits of one forward_backward are large, so that the SDK does not divide groups.
CHUNK_DATA, CHUNK_BYTES = 2**20, 2**27
POLL_SECONDS = 20.0  # seconds that retrieve_future waits for a result
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TinkerApp:
    """The API's application; it lives in one event loop."""

    def __init__(self, config: TinkerConfig, model: ServedModel, queue: FairQueue) -> None:
        self._config, self._model, self._queue = config, model, queue
        self._sessions = Sessions(config.serve.session_seconds)
        self._root = Path(config.output_dir) / "checkpoints"
        self._samples = 0  # sampling requests so far; the number is the seed of a request without one

    def application(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST, middlewares=[self._check])
        post = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "unload_model": self._unload,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "cancel_future": self._cancel,
            "retrieve_future": self._retrieve,
        }
        app.router.add_routes(web.post(f"/api/v1/{path}", handler) for path, handler in post.items())
        get = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler_id}": self._get_sampler,
        }
        app.router.add_routes(web.get(f"/api/v1/{path}", handler) for path, handler in get.items())
        checkpoint_routes.add(app, self._root, self._model)
        app.cleanup_ctx.append(self._watch_sessions)
        return app

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and answer every error with a sentence in JSON."""
        try:
            key = request.headers.get("X-API-Key", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(key, self._config.serve.key.encode(errors="surrogateescape")):
                raise Refusal("this server has another key: give its own as api_key or TINKER_API_KEY", 401)
            return await handler(request)
        except Refusal as refusal:
            return web.json_response({"detail": str(refusal)}, status=refusal.status)
        except web.HTTPException as error:
            detail = f"{request.method} {request.path}: {error.reason}"
            if error.status == 404:
                detail += "; this server does not serve this part of the API (docs/howto/tinker_server.md)"
            return web.json_response({"detail": detail}, status=error.status)
        except Exception as error:
            log.exception("%s %s failed", request.method, request.path)
            return web.json_response({"detail": f"the server failed: {type(error).__name__}"}, status=500)

    # The service.

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _client_config(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "pjwt_auth_enabled": False,
                "parallel_fwdbwd_chunks": False,  # a model's requests come in their order
                "fwdbwd_max_chunk_len": CHUNK_DATA,
                "fwdbwd_max_chunk_bytes_count": CHUNK_BYTES,
                "use_pyqwest_transport": False,
            }
        )

    async def _dynamic_config(self, _: web.Request) -> web.Response:
        return web.json_response({"sample_cancel_enabled": True})

    async def _telemetry(self, _: web.Request) -> web.Response:
        """Accept the SDK's reports about itself, and store nothing."""
        return web.json_response({"status": "accepted"})

    async def _capabilities(self, _: web.Request) -> web.Response:
        model = {
            "model_name": self._model.name,
            "max_context_length": self._model.sampled_positions,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    # Sessions.

    async def _create_session(self, request: web.Request) -> web.Response:
        requests.read(requests.CreateSession, await request.read())
        session = self._sessions.open()
        return web.json_response(
            {
                "type": "create_session",
                "session_id": session.session_id,
                "info_message": self._model.about,
                "warning_message": self._model.warning,
            }
        )

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._sessions.get(requests.read(requests.SessionRequest, await request.read()).session_id)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request) -> web.Response:
        self._end(request.match_info["session_id"], "its client finished it")
        return web.json_response({})

    def _end(self, session_id: str, reason: str) -> None:
        """End a session: its waiting jobs are dropped, and its models and snapshots forgotten."""
        session = self._sessions.end(session_id, reason)
        dropped = self._queue.drop(session_id)
        for pending in session.pending.values():
            if not pending.answer.done():
                pending.answer.cancel()
        names = [name for model in session.models.values() for name in model.snapshots]
        # The session no longer has what it had asked to forget.
        waiting = [job.operation for job in dropped if job.operation["kind"] == "forget"]
        operation = {
            "kind": "forget",
            "models": [*session.models, *(name for each in waiting for name in each["models"])],
            "snapshots": [*names, *(name for each in waiting for name in each["snapshots"])],
        }
        self._queue.put(QueuedOperation(session_id, operation, lambda _: None))
        log.info("session %s ended: %s", session_id, reason)

    async def _watch_sessions(self, _: web.Application) -> Any:
        """End the sessions of clients that have left, for as long as the application runs."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(min(5.0, self._config.serve.session_seconds / 4))
                for session_id in self._sessions.silent():
                    seconds = self._config.serve.session_seconds
                    self._end(session_id, f"its client has said nothing for {seconds:g} s")
                self._sessions.drop_fetched()

        task = asyncio.create_task(watch())
        yield
        task.cancel()

    # Models.

    async def _create_model(self, request: web.Request) -> web.Response:
        body = requests.read(requests.CreateModel, await request.read())
        session = self._sessions.get(body.session_id)
        self._model.check_name(body.base_model)
        self._model.check_lora(body.lora_config)
        model_id = _model_id(session, body.model_seq_id)
        request_id = f"{model_id}:create"
        is_new = self._makes_model(session, model_id, request_id, body.user_metadata)
        operation = {"kind": "create", "model": model_id}
        done = partial(_json, {"type": "create_model", "model_id": model_id})
        return self._later(session, request_id, operation, done, new_model=model_id if is_new else None)

    def _makes_model(
        self, session: Session, model_id: str, request_id: str, metadata: dict[str, Any] | None
    ) -> bool:
        """True if the request makes this model of the session, which then has it.

        False if the session has the model, or if the request is repeated. Raises Refusal.
        """
        if request_id in session.pending or model_id in session.models:
            return False
        if self._sessions.models >= (most := self._config.serve.most_models):
            raise Refusal(
                f"{most} models are in training, and serve.most_models={most}: wait until a session ends"
            )
        texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in (metadata or {}).items()}
        session.models[model_id] = ClientModel(model_id, self._model.rank, texts)
        return True

    async def _get_info(self, request: web.Request) -> web.Response:
        body = requests.read(requests.ModelRequest, await request.read())
        _, model = self._sessions.of_model(body.model_id)
        return web.json_response(self._model.info(model))

    async def _forward_backward(self, request: web.Request) -> web.Response:
        body = await request.read()
        decoded = wire.read_forward_backward(body)
        session, model = self._sessions.of_model(decoded.model_id)
        self._model.check_data(decoded.data)
        RequestedLoss.of(decoded.loss, decoded.config, decoded.data)
        operation = {"kind": "forward_backward", "model": model.model_id, "body": body}
        return self._later(session, f"{model.model_id}:{decoded.seq_id}", operation, _scored)

    async def _optim_step(self, request: web.Request) -> web.Response:
        body = requests.read(requests.OptimStep, await request.read())
        session, model = self._sessions.of_model(body.model_id)
        operation = {"kind": "optim_step", "model": model.model_id, "step": body.adam_params.step()}
        return self._later(
            session, f"{model.model_id}:{body.seq_id}", operation, lambda outcome: WireAnswer(outcome)
        )

    async def _unload(self, request: web.Request) -> web.Response:
        model_id = requests.read(requests.ModelRequest, await request.read()).model_id
        session, request_id = self._sessions.get(model_id.partition(":")[0]), f"{model_id}:unload"
        if request_id in session.pending:
            return self._accepted(session.pending[request_id])
        session, model = self._sessions.of_model(model_id)
        del session.models[model_id]
        operation = {"kind": "forget", "models": [model_id], "snapshots": model.snapshots}
        return self._later(
            session, request_id, operation, partial(_json, {"type": "unload_model", "model_id": model_id})
        )

    # Checkpoints.

    async def _save_weights(self, request: web.Request) -> web.Response:
        body = requests.read(requests.SaveWeights, await request.read())
        session, model = self._sessions.of_model(body.model_id)
        path = CheckpointPath.of(model.model_id, "weights", body.path or self._unnamed(model))
        request_id = f"{model.model_id}:{body.seq_id}"
        if not body.overwrite and request_id not in session.pending and (path.directory(self._root)).exists():
            raise Refusal(f"{path.uri} exists already: save under another name, or with overwrite=True")
        operation = self._saving(model, path, body.ttl_seconds, body.user_metadata)
        return self._later(
            session, request_id, operation, partial(_json, {"type": "save_weights", "path": path.uri})
        )

    async def _save_for_sampler(self, request: web.Request) -> web.Response:
        body = requests.read(requests.SaveForSampler, await request.read())
        session, model = self._sessions.of_model(body.model_id)
        request_id, answer = f"{model.model_id}:{body.seq_id}", {"type": "save_weights_for_sampler"}
        if body.path is not None:
            path = CheckpointPath.of(model.model_id, "sampler_weights", body.path)
            operation = self._saving(model, path, body.ttl_seconds, body.user_metadata)
            return self._later(session, request_id, operation, partial(_json, {**answer, "path": path.uri}))
        if request_id in session.pending:
            return self._accepted(session.pending[request_id])
        if body.sampling_session_seq_id is None:
            raise Refusal("save_weights_for_sampler needs a path, or sampling_session_seq_id", 422)
        sampler = self._new_sampler(
            session, body.sampling_session_seq_id, snapshot=f"{model.model_id}/{self._unnamed(model)}"
        )
        model.snapshots.append(sampler.snapshot)
        self._drop_snapshots(session, model)
        operation = {"kind": "snapshot", "model": model.model_id, "snapshot": sampler.snapshot}
        return self._later(
            session,
            request_id,
            operation,
            partial(_json, {**answer, "sampling_session_id": sampler.sampler_id}),
        )

    def _drop_snapshots(self, session: Session, model: ClientModel) -> None:
        """Forget the unnamed weights that were used least recently.

        Clients do not report that they no longer need them.
        """
        while len(model.snapshots) > self._model.most_snapshots:
            name = model.snapshots.pop(0)
            for sampler in session.samplers.values():
                sampler.is_forgotten |= sampler.snapshot == name
            operation = {"kind": "forget", "models": [], "snapshots": [name]}
            self._queue.put(QueuedOperation(session.session_id, operation, lambda _: None))

    @staticmethod
    def _unnamed(model: ClientModel) -> str:
        model.saves += 1
        return f"unnamed-{model.saves}"

    def _saving(
        self, model: ClientModel, path: CheckpointPath, ttl: int | None, metadata: dict[str, str] | None
    ) -> Operation:
        now = time.time()
        info = self._model.weights_info() | {
            "time": now,
            "expires": None if ttl is None else now + ttl,
            "user_metadata": metadata,
            "model_metadata": model.metadata,
        }
        return {"kind": "save", "model": model.model_id, "path": list(path), "info": info}

    async def _load_weights(self, request: web.Request) -> web.Response:
        body = requests.read(requests.LoadWeights, await request.read())
        path = CheckpointPath.parse(body.path)
        self._model.check_weights(read_info(self._root, path))
        if body.optimizer and path.kind != "weights":
            raise Refusal(f"{path.uri} has no optimizer state: it was saved for a sampler")
        is_new = False
        if body.model_id is not None:
            session, model_id = self._sessions.of_model(body.model_id)[0], body.model_id
            request_id = f"{model_id}:{body.seq_id}"
        elif body.session_id is not None and body.model_seq_id is not None:
            if body.base_model is not None:
                self._model.check_name(body.base_model)
            session = self._sessions.get(body.session_id)
            model_id = _model_id(session, body.model_seq_id)
            request_id = f"{model_id}:{body.seq_id}"
            is_new = self._makes_model(session, model_id, request_id, body.user_metadata)
        else:
            raise Refusal("load_weights needs model_id, or session_id with model_seq_id", 422)
        operation = {"kind": "load", "model": model_id, "path": list(path), "optimizer": body.optimizer}
        done = partial(_json, {"type": "load_weights", "path": path.uri, "model_id": model_id})
        return self._later(session, request_id, operation, done, new_model=model_id if is_new else None)

    # Samples.

    async def _create_sampler(self, request: web.Request) -> web.Response:
        body = requests.read(requests.CreateSampler, await request.read())
        session = self._sessions.get(body.session_id)
        if body.base_model is not None:
            self._model.check_name(body.base_model)
        if body.model_path is None:
            if body.base_model is None:
                raise Refusal("create_sampling_session needs base_model or model_path", 422)
            sampler = self._new_sampler(session, body.sampling_session_seq_id, BASE)
        else:
            path = CheckpointPath.parse(body.model_path)
            info = read_info(self._root, path)
            self._model.check_weights(info)
            snapshot = snapshot_name(path, info)
            sampler = self._new_sampler(session, body.sampling_session_seq_id, snapshot, path)
        return web.json_response(
            {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}
        )

    @staticmethod
    def _new_sampler(
        session: Session, number: int, snapshot: str, path: CheckpointPath | None = None
    ) -> ClientSampler:
        """The session's sampler of this number, which a repeated request finds.

        Raises Refusal where the number is another sampler's.
        """
        sampler = ClientSampler(f"{session.session_id}:sample:{number}", session.session_id, snapshot, path)
        known = session.samplers.setdefault(sampler.sampler_id, sampler)
        # The same path may have another snapshot's name, if its checkpoint was saved anew meanwhile.
        if known.path != path or (path is None and known.snapshot != snapshot):
            raise Refusal(
                f"sampling_session_seq_id={number}: the session has another sampler of this number; give "
                "each its own"
            )
        return known

    async def _get_sampler(self, request: web.Request) -> web.Response:
        _, sampler = self._sessions.of_sampler(request.match_info["sampler_id"])
        answer = {
            "sampler_id": sampler.sampler_id,
            "base_model": self._model.name,
            "model_path": None if sampler.path is None else sampler.path.uri,
        }
        return web.json_response(answer)

    async def _sample(self, request: web.Request) -> web.Response:
        body = requests.read(requests.SampleBody, await request.read())
        session, sampler = self._sessions.of_sampler(body.sampling_session_id)
        request_id = f"{sampler.sampler_id}:{body.seq_id}"
        if request_id in session.pending:
            return self._accepted(session.pending[request_id])
        if sampler.is_forgotten:
            raise Refusal(
                f"the weights of the sampler {sampler.sampler_id} are gone: its model keeps the "
                f"{self._model.most_snapshots} unnamed samplers that were used last: save weights that you "
                "use later under a name",
                404,
            )
        session.note_use(sampler)
        self._samples += 1
        seed = derived_seed(self._config.seed, self._samples)
        order, sampling = sampling_of(body, self._model, seed)
        operation = {
            "kind": "sample",
            "snapshot": sampler.snapshot,
            "path": None if sampler.path is None else list(sampler.path),
            "orders": [order],
            "sampling": sampling,
        }
        key = (sampler.snapshot, json.dumps(sampling, sort_keys=True))
        sample_ids = [str(uuid.uuid4()) for _ in range(body.num_samples)]
        done = partial(_sampled, body.prompt_logprobs_last_n)
        return self._later(session, request_id, operation, done, key, sample_ids)

    # Results.

    def _later(
        self,
        session: Session,
        request_id: str,
        operation: Operation,
        done: Callable[[Outcome], WireAnswer],
        batch_key: tuple[str, str] | None = None,
        sample_ids: list[str] | None = None,
        new_model: str | None = None,
    ) -> web.Response:
        """Queue an operation, unless it is a repeated request, and answer with the id of its result.

        `new_model`: the model that the operation makes; the session loses it if the operation fails.
        """
        if request_id not in session.pending:
            loop = asyncio.get_running_loop()
            pending = PendingResult(request_id, loop.create_future(), sample_ids)
            session.pending[request_id] = pending

            def settle(outcome: Outcome | Exception) -> None:
                if new_model is not None and isinstance(outcome, Exception):
                    session.models.pop(new_model, None)
                if pending.answer.done():  # the session has ended
                    return
                if isinstance(outcome, Exception):
                    is_request = isinstance(outcome, Refusal) and outcome.status < 500
                    category = "user" if is_request else "server"
                    pending.answer.set_result(WireAnswer({"error": str(outcome), "category": category}))
                else:
                    pending.answer.set_result(done(outcome))

            def finish(outcome: Outcome | Exception) -> None:
                loop.call_soon_threadsafe(settle, outcome)

            samples = len(sample_ids or ())
            self._queue.put(QueuedOperation(session.session_id, operation, finish, batch_key, samples))
        return self._accepted(session.pending[request_id])

    @staticmethod
    def _accepted(pending: PendingResult) -> web.Response:
        answer: dict[str, Any] = {"request_id": pending.request_id}
        if pending.sample_ids is not None:
            answer["sample_sequence_ids"] = pending.sample_ids
        return web.json_response(answer)

    async def _retrieve(self, request: web.Request) -> web.Response:
        """Wait for a result; 408 tells the SDK to ask again."""
        request_id = requests.read(requests.RetrieveFuture, await request.read()).request_id
        session = self._sessions.get(request_id.partition(":")[0])
        if (pending := session.pending.get(request_id)) is None:
            raise Refusal(
                f"there is no request {request_id[:120]!r}, or its result was fetched long ago", 404
            )
        await asyncio.wait([pending.answer], timeout=POLL_SECONDS)
        if not pending.answer.done():
            answer = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(answer, status=408)
        if pending.answer.cancelled():
            raise Refusal(f"the request was cancelled: {session.ended or 'by its client'}", 410)
        result = pending.answer.result()
        result.fetched = result.fetched or running_seconds()
        if isinstance(result.body, bytes):
            return web.Response(body=result.body, content_type=wire.CONTENT_TYPE)
        return web.json_response(result.body)

    async def _cancel(self, request: web.Request) -> web.Response:
        """Drop a result; the ranks may still compute it."""
        request_id = requests.read(requests.RetrieveFuture, await request.read()).request_id
        session = self._sessions.get(request_id.partition(":")[0])
        if (pending := session.pending.get(request_id)) is not None and not pending.answer.done():
            pending.answer.cancel()
        return web.json_response({})


def _model_id(session: Session, number: int) -> str:
    """The id of a session's model, by the number that its client gives it."""
    return f"{session.session_id}:train:{number}"


def _json(answer: dict[str, Any], _: Outcome) -> WireAnswer:
    return WireAnswer(answer)


def _scored(outcome: Outcome) -> WireAnswer:
    logprobs = [np.frombuffer(part, "<f4") for part in outcome["logprobs"]]
    return WireAnswer(wire.write_forward_backward(logprobs, outcome["metrics"]))


def _sampled(last_n: int | None, outcome: Outcome) -> WireAnswer:
    """The answer to one sampling request; `last_n`: only the prompt's last tokens have log-probs."""
    logprobs = outcome["prompt_logprobs"]
    if logprobs is not None and last_n is not None:
        logprobs = [float("nan")] * (len(logprobs) - last_n) + logprobs[len(logprobs) - last_n :]
    return WireAnswer(wire.write_samples([tuple(row) for row in outcome["sequences"]], logprobs))
