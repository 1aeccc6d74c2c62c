"""Agent programs for tests: each function is one; `record["does"]` names the one that runs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path

from openai import AsyncOpenAI, BadRequestError, OpenAI

from megatron_gvpo.conversations import Reply

SHARED = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="-", max_retries=0)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


async def run(prompt, endpoint, **options):
    client = SHARED.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)

    async def ask(messages, **settings):
        answer = await client.chat.completions.create(model="policy", messages=messages, **settings)
        return answer.choices[0].message.content

    return await globals()[prompt.record["does"]](prompt, endpoint, client, ask)


async def tool_loop(prompt, endpoint, client, ask):
    """The loop of OpenAI's documentation; every second turn is streamed."""
    messages = [user("2+3+4?")]
    for turn in range(9):
        if turn % 2:
            content, calls = "", []
            stream = await client.chat.completions.create(
                model="any",
                messages=messages,
                tools=TOOLS,
                stream=True,
                temperature=0.1,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                if not chunk.choices:
                    assert chunk.usage.total_tokens > chunk.usage.prompt_tokens > 0
                    continue
                delta = chunk.choices[0].delta
                content += delta.content or ""
                for part in delta.tool_calls or []:
                    function = {"name": part.function.name, "arguments": part.function.arguments}
                    calls.append({"id": part.id, "type": "function", "function": function})
            message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        else:
            answer = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
            message = answer.choices[0].message.model_dump()
            calls = message["tool_calls"]
            assert answer.choices[0].finish_reason == ("tool_calls" if calls else "stop")
        messages.append(message)
        if not calls:
            return Reply(None, 1.0, {"right": float(message["content"] == "9")})
        for call in calls:
            values = json.loads(call["function"]["arguments"])
            result = str(values["a"] + values["b"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def sub_agents(prompt, endpoint, client, ask):
    first = await ask([user("plan")])

    async def sub(name):
        messages = [user(name)]
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="m", messages=messages, extra_headers={"X-Agent": name}
            )
            messages += [answer.choices[0].message, user("go on")]

    await asyncio.gather(sub("one"), sub("two"))
    await ask([user("plan"), assistant(first), user("done")])
    return 0.5


async def retries(prompt, endpoint, client, ask):
    """The program continues with the first of three answers."""
    tries = [await ask([user("a")]) for _ in range(3)]
    await ask([user("a"), assistant(tries[0]), user("b")])
    await ask([user("a"), assistant(tries[0]), user("b")])
    return 1


async def compaction(prompt, endpoint, client, ask):
    messages = [user("a long story")]
    for _ in range(3):
        messages += [assistant(await ask(messages)), user("more")]
    short = [messages[0], user("so far: much"), *messages[-2:]]
    short += [assistant(await ask(short)), user("end")]
    await ask(short)


async def forgetful(prompt, endpoint, client, ask):
    """Sends earlier answers back without their thinking parts."""
    messages = [user("a")]
    for _ in range(3):
        answer = await ask(messages)
        messages += [assistant(answer.split("</think>")[-1]), user("b")]


async def limits(prompt, endpoint, client, ask):
    messages, refused = [user("a")], ""
    try:
        while True:
            messages += [assistant(await ask(messages)), user("b")]
    except BadRequestError as error:
        refused = error.code
    return Reply(None, 0.25, {f"refused_{refused}": 1.0})


async def slow(prompt, endpoint, client, ask):
    """Computes for 3 s after every answer, until it is refused."""
    for _ in range(9):
        await ask([user("2+3?")])
        await asyncio.sleep(3)


async def killed_at_the_limit(prompt, endpoint, client, ask):
    """The program catches a refusal, and later it is killed, as by the kernel for its memory."""
    await limits(prompt, endpoint, client, ask)
    os.kill(os.getpid(), signal.SIGKILL)


async def careless(prompt, endpoint, client, ask):
    messages = [user("a")]
    while True:
        messages += [assistant(await ask(messages)), user("b")]


async def insists(prompt, endpoint, client, ask):
    """Catches every error and tries again, as some loops do."""
    while True:
        try:
            await ask([user("a")])
        except BadRequestError:
            await asyncio.sleep(0.1)


async def hang(prompt, endpoint, client, ask):
    await ask([user("a")])
    time.sleep(60)


async def exit(prompt, endpoint, client, ask):
    await ask([user("a")])
    os._exit(3)


async def exit_once(prompt, endpoint, client, ask):
    mark = Path(prompt.record["mark"])
    await ask([user("a")])
    if not mark.exists():
        mark.touch()
        os._exit(3)
    return 1


async def kill_starter(prompt, endpoint, client, ask):
    await ask([user("a")])
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


async def kill_starter_once(prompt, endpoint, client, ask):
    mark = Path(prompt.record["mark"])
    await ask([user("a")])
    if not mark.exists():
        mark.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return 1


async def fail(prompt, endpoint, client, ask):
    await ask([user("a")])
    raise RuntimeError("a bug")


async def silent(prompt, endpoint, client, ask):
    return 1.0


async def responses(prompt, endpoint, client, ask):
    await client.responses.create(model="any", input="a")


async def lie(prompt, endpoint, client, ask):
    await ask([user("a")])
    return "yes"


async def no_key(prompt, endpoint, client, ask):
    await client.with_options(api_key="other").models.list()


async def late(prompt, endpoint, client, ask):
    """The program starts a call and does not wait for it."""
    await ask([user("a")])
    call = asyncio.ensure_future(ask([user("b")]))
    await asyncio.sleep(0.2)
    assert call is not None
    return 1


async def environment(prompt, endpoint, client, ask):
    """A blocking agent that reads the endpoint from OpenAI's environment variables alone."""

    def agent():
        client = OpenAI()
        model = client.models.list().data[0]
        answer = client.chat.completions.create(
            model=model.id, messages=[user([{"type": "text", "text": "a"}])], logprobs=True, max_tokens=2
        )
        assert len(answer.choices[0].logprobs.content) == 2 and answer.choices[0].finish_reason == "length"

    await asyncio.to_thread(agent)
    return 1


async def shouts(prompt, endpoint, client, ask):
    await ask([user("a")])
    try:
        await ask([user("2+" * 15_000_000)])
    except BadRequestError as error:
        assert error.body["code"] == "context_length_exceeded", error.body
        assert error.body["message"].startswith("30000000 characters leave no room"), error.body
        return 0.5


async def refused(prompt, endpoint, client, ask):
    counts = {}

    async def attempt(name, **settings):
        try:
            await client.chat.completions.create(**{"model": "m", "messages": [user("a")], **settings})
        except BadRequestError as error:
            counts[name] = 1.0
            assert error.body["message"] == prompt.record[name], error.body

    await ask([user("a")])
    await attempt("n", n=2)
    await attempt("image", messages=[user([{"type": "image_url", "image_url": {"url": "x"}}])])
    await attempt("role", messages=[{"content": "a"}])
    await attempt("empty", messages=[])
    await attempt("tokens", extra_body={"max_tokens": -1})
    return Reply(None, 0, counts)


async def tokens(prompt, endpoint, client, ask):
    """The program sends and receives tokens, as harnesses of the library verifiers do."""
    http, ids = client._client, list(prompt.token_ids)
    url = endpoint.base_url.removesuffix("/v1") + "/inference/v1/generate"
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    for _ in range(2):
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 30, "temperature": 1.0, "seed": 1}}
        [choice] = (await http.post(url, json=body, headers=headers)).json()["choices"]
        named = [token["token"] for token in choice["logprobs"]["content"]]
        assert named == [f"token_id:{i}" for i in choice["token_ids"]]
        ids += [*choice["token_ids"], 7, 8]
    wrong = await http.post(url, json={"token_ids": [10**9]}, headers=headers)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_tokens")
    return 1


async def anything(prompt, endpoint, client, ask):
    """A random program: it continues, branches, edits, retries, or sends several requests, also as tokens."""
    rng = random.Random(prompt.record["seed"])
    http, url = client._client, endpoint.base_url.removesuffix("/v1") + "/inference/v1/generate"
    chats = [[user(str(rng.randrange(3)))]]

    async def once(number, act, chat):
        if act == "tokens":
            ids = list(prompt.token_ids[: rng.randrange(1, 9)]) + [rng.randrange(5, 200) for _ in range(3)]
            body = {"token_ids": ids, "sampling_params": {}}
            answer = await http.post(url, json=body, headers={"Authorization": f"Bearer {endpoint.api_key}"})
            assert answer.status_code == 200, answer.text
            return
        answer = await ask(chat, user=str(number))
        if act != "again":
            chat += [assistant(answer), user(str(rng.randrange(3)))]

    for _ in range(rng.randrange(1, 7)):
        acts = rng.choices(
            ["go", "branch", "cut", "change", "again", "tokens"], [5, 1, 1, 1, 1, 1], k=rng.choice([1, 1, 2])
        )
        calls = []
        for act in acts:
            number = rng.randrange(len(chats))
            chat = chats[number]
            if act in ("branch", "cut", "change"):
                chat = [dict(m) for m in chat]
                if act == "branch":
                    chat = chat[: rng.randrange(0, len(chat), 2) + 1]
                if act == "cut" and len(chat) > 2:
                    del chat[rng.randrange(0, 2) : rng.randrange(2, len(chat))]
                if act == "change":
                    chat[rng.randrange(len(chat))]["content"] = "other"
                number = len(chats)
                chats.append(chat)
            if all(other is not chat for _, _, other in calls):
                calls.append((number, act, chat))
        await asyncio.gather(*(once(*call) for call in calls))
    return 1
