"""The endpoint through which programs call the policy: OpenAI's interface, and vLLM's for requests in tokens.

It listens only on this machine's loopback address. Every rollout has a key, which ends with the rollout.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_gvpo.conversations.chat import (
    ChatRequest,
    RequestRefused,
    answer_of,
    check_former,
    chunks,
    completion,
    overrides,
    read_message,
    token_logprobs,
)
from megatron_gvpo.conversations.dialogue import Dialogue, tools_text
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.groups import Rollout, utf8
from megatron_gvpo.servers.http import spare_connections
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.workers.messages import Endpoint

PATHS = CHAT, GENERATE, MODELS = "/v1/chat/completions", "/inference/v1/generate", "/v1/models"
LONGEST = 2**26  # bytes of a request
_DIALOGUE: web.RequestKey[Dialogue] = web.RequestKey("dialogue", Dialogue)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Sampling(BaseModel):
    model_config = ConfigDict(extra="allow")

    max_tokens: int | None = Field(None, gt=0)
    n: int | None = None


class _TokenRequest(BaseModel):
    token_ids: list[int] = Field(min_length=1)
    sampling_params: _Sampling = _Sampling()


class Proxy:
    """Serves the dialogues that are open. An async context manager.

    `decode` makes the text of an answer's tokens; token ids are below `vocabulary`. `longest` is the largest
    number of tokens of a context and its answer, for callers that request it.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        decode: Callable[[list[int]], str],
        parser: str,
        vocabulary: int,
        longest: int,
    ) -> None:
        self._sampling, self._decode, self._parser = sampling, decode, parser
        self._vocabulary, self._longest = vocabulary, longest
        self._dialogues: dict[str, Dialogue] = {}
        self._answers = 0

    async def __aenter__(self) -> Self:
        spare_connections()  # raises the limit, because every program has an open connection
        app = web.Application(client_max_size=LONGEST, middlewares=[self._check_key])
        app.router.add_get(MODELS, self._models)
        app.router.add_post(CHAT, self._chat)
        app.router.add_post(GENERATE, self._generate)
        # A call is cancelled when its caller goes away.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096).start()
        self._address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def open(self, dialogue: Dialogue, seed: int) -> Endpoint:
        """Open an endpoint at which a program asks the policy within the dialogue."""
        key = secrets.token_urlsafe(24)
        self._dialogues[key] = dialogue
        return Endpoint(f"{self._address}/v1", key, seed)

    async def close(self, endpoint: Endpoint) -> None:
        """Refuse the key from now on, and end its calls."""
        await self._dialogues.pop(endpoint.api_key).close()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and answer errors in OpenAI's form."""
        try:
            kind, _, key = request.headers.get("Authorization", "").partition(" ")
            dialogue = self._dialogues.get(key.strip()) if kind.lower() == "bearer" else None
            if dialogue is None:
                raise RequestRefused(
                    "no running rollout has this key: use endpoint.api_key", "invalid_api_key", 401
                )
            request[_DIALOGUE] = dialogue
            return await handler(request)
        except RequestRefused as error:
            return web.json_response(error.body(), status=error.status)
        except UserFunctionError as error:  # raised by the user's parser
            return web.json_response(RequestRefused(str(error), "parser", 500).body(), status=500)
        except web.HTTPException as error:
            here = f"; this endpoint has {', '.join(PATHS)}" if error.status == 404 else ""
            refused = RequestRefused(
                f"{request.method} {request.path}: {error.reason}{here}", "http", error.status
            )
            return web.json_response(refused.body(), status=error.status)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            refused = RequestRefused(f"{where}: {first['msg']}", "invalid_request")
            return web.json_response(refused.body(), status=400)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "megatron_gvpo"}
        return web.json_response({"object": "list", "data": [{**model, "max_model_len": self._longest}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        dialogue = request[_DIALOGUE]
        body = ChatRequest.model_validate_json(await request.read())
        if body.n not in (None, 1):
            raise RequestRefused(
                f"n={body.n}: one answer a call; ask several times for more, each time with another X-Agent "
                "header or user, because equal calls of one agent count as retries",
                "n",
            )
        check_former(body.extra)
        messages = [read_message(message) for message in body.messages]
        tools = tools_text(body.shown_tools)
        context = dialogue.context(messages, tools)
        agent = _agent(request, body.user or "")
        response = await self._ask(dialogue, context, body.most, body.extra)
        text = self._decode(response.token_ids)
        has_tools = bool(tools) and body.extra.get("tool_choice") != "none"
        message, reason = answer_of(text, self._parser, has_tools, hash((context, *response.token_ids)))
        reason = "length" if response.finish_reason == "length" else reason
        dialogue.record(context, response, agent, (*messages, message), tools)
        answer = completion(body, self._answers, len(context), response, message, reason)
        if not body.stream:
            return web.json_response(answer)
        return await _streamed(request, answer, bool((body.stream_options or {}).get("include_usage")))

    async def _generate(self, request: web.Request) -> web.Response:
        dialogue = request[_DIALOGUE]
        body = _TokenRequest.model_validate_json(await request.read())
        if body.sampling_params.n not in (None, 1):
            raise RequestRefused(
                f"n={body.sampling_params.n}: one answer a call; ask several times for more, each time with "
                "another X-Agent header, because equal calls of one agent count as retries",
                "n",
            )
        context = tuple(body.token_ids)
        if not 0 <= min(context) <= max(context) < self._vocabulary:
            raise RequestRefused(
                f"a token id is not in the vocabulary [0, {self._vocabulary})", "invalid_tokens"
            )
        options = body.sampling_params.__pydantic_extra__ or {}
        response = await self._ask(dialogue, context, body.sampling_params.max_tokens, options)
        dialogue.record(context, response, _agent(request))
        choice = {
            "index": 0,
            "token_ids": response.token_ids,
            "finish_reason": response.finish_reason,
            "logprobs": token_logprobs(response),
        }
        return web.json_response({"request_id": f"generate-{self._answers}", "choices": [choice]})

    async def _ask(
        self, dialogue: Dialogue, context: tuple[int, ...], most: int | None, options: dict[str, Any]
    ) -> Rollout:
        dialogue.counts["overridden_calls"] += overrides(options, self._sampling)
        response = await dialogue.ask(context, most)
        self._answers += 1
        return response


def _agent(request: web.Request, default: str = "") -> str:
    """The name of the agent that calls. Bytes of a header that are not UTF-8 are replaced."""
    return utf8(request.headers.get("X-Agent", default))


async def _streamed(request: web.Request, body: dict[str, Any], with_usage: bool) -> web.StreamResponse:
    """Send the answer as server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks(body, with_usage):
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
