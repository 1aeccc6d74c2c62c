"""Compares free-running conversations on a real server with lockstep rounds, for tools of several latencies.

    python benchmarks/conversations.py [--engine vllm] [--out benchmarks/results/conversations_vllm.json]

In lockstep, as in a loop over `generate` and `step`, all conversations wait until the server has answered
every one, and then until every tool has answered. In this package each conversation continues by itself. Both
ways have the same conversations and take turns, so that other work on the machine slows down both. A tool
takes half to one and a half of its mean latency. The policy is a small random model, whose turns are of very
different lengths, as those of trained models are. The server's own metrics give the number of requests that
run; with none, the server is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers import tiny_run  # noqa: E402 - from tests/
from helpers.servers.real_servers import ENGINES, Client, pool_of, running  # noqa: E402

from megatron_gvpo.conversations.conversations import Conversations  # noqa: E402
from megatron_gvpo.data.task import Task  # noqa: E402
from megatron_gvpo.groups import Prompt, Rollout  # noqa: E402
from megatron_gvpo.huggingface.tokenizer import end_token_id, load_tokenizer  # noqa: E402
from megatron_gvpo.sampling.served import Speakers  # noqa: E402
from megatron_gvpo.servers.pool import ServerPool  # noqa: E402
from megatron_gvpo.servers.request import Request  # noqa: E402
from megatron_gvpo.settings.conversation import ConversationConfig  # noqa: E402
from megatron_gvpo.settings.sections import SamplingConfig  # noqa: E402

LATENCIES = (0.0, 0.1, 2.0)  # mean seconds of a tool
PROMPTS, MEMBERS, TURNS, TOKENS = 16, 4, 4, 240
POLL = 0.05  # seconds between two readings of the number of requests that run
TOOL = """
import asyncio, hashlib

class Tool:
    def __init__(self, latency):
        self.latency = latency

    async def reset(self, prompt, seed):
        self.name, self.said = f"{prompt.id} {seed}", ""

    async def step(self, said):
        self.said += said
        draw = int(hashlib.sha256((self.name + self.said).encode()).hexdigest(), 16) % 1000 / 1000
        await asyncio.sleep(self.latency * (0.5 + draw))
        return "7+5="
"""


class Lockstep:
    """The policy of conversations that all wait for each other: for the answers, and for the tools."""

    def __init__(self, policy: Speakers, live: int) -> None:
        self._policy, self._live = policy, live
        self._requests: list[tuple[int, Request, asyncio.Future[Rollout]]] = []

    async def respond(self, conversation: int, request: Request) -> Rollout:
        answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._requests.append((conversation, request, answer))
        self._begin_round()
        return await answer

    def end(self, conversation: int) -> None:
        self._policy.end(conversation)
        self._live -= 1
        self._begin_round()

    def _begin_round(self) -> None:
        if self._requests and len(self._requests) == self._live:
            requests, self._requests = self._requests, []
            self._round = asyncio.create_task(self._answer(requests))

    async def _answer(self, batch: Sequence[tuple[int, Request, asyncio.Future[Rollout]]]) -> None:
        rollouts = await asyncio.gather(
            *(self._policy.respond(number, request) for number, request, _ in batch)
        )
        for (_, _, answer), rollout in zip(batch, rollouts, strict=True):
            answer.set_result(rollout)


class Load:
    """Asks the server again and again how many requests run."""

    def __init__(self, url: str, engine: str) -> None:
        vllm = f"{url}/metrics", r"^vllm:num_requests_running\{.*\} (\S+)$"
        sglang = f"{url}/v1/loads?include=core", r'"num_running_reqs": ?(\d+)'
        self._url, self._number = vllm if engine == "vllm" else sglang
        self.running: list[float] = []

    async def watch(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(self._url) as answer:
                    match = re.search(self._number, text := await answer.text(), re.MULTILINE)
                assert match is not None, f"{self._url} does not say how many requests run: {text[:300]}"
                self.running.append(float(match[1]))
                await asyncio.sleep(POLL)


async def hold(
    conversations: Conversations, pool: ServerPool, load: Load, lockstep: bool, prompts: Sequence[Prompt]
) -> dict[str, float]:
    """Run the conversations; return seconds, tokens a second, and the share of polls without a request."""
    sampling = SamplingConfig(max_tokens=TOKENS)
    requests = [Request(p.token_ids, MEMBERS, seed=100 + i) for i, p in enumerate(prompts)]
    policy: Any = Speakers(pool, sampling)
    if lockstep:
        policy = Lockstep(policy, PROMPTS * MEMBERS)
    watch = asyncio.create_task(load.watch())
    begin = time.perf_counter()
    groups = await conversations.run_all(policy, prompts, requests, sampling)
    seconds = time.perf_counter() - begin
    assert not watch.done() or watch.result()
    watch.cancel()
    rollouts = [rollout for group in groups for rollout in group]
    assert all(rollout.finish_reason != "lost" for rollout in rollouts)
    return {
        "seconds": round(seconds, 2),
        "own_tokens": sum(len(rollout.token_ids) for rollout in rollouts),
        "turns": sum(len(rollout.turns) for rollout in rollouts),
        "tokens_per_second": round(sum(len(rollout.token_ids) for rollout in rollouts) / seconds, 1),
        "idle_share": round(statistics.mean(n == 0 for n in load.running), 3),
    }


def measure(engine: str, folder: Path, rounds: int) -> list[dict[str, Any]]:
    task = folder / "task"
    tiny_run.make(task)
    (folder / "tool.py").write_text(TOOL)
    tokenizer = load_tokenizer(str(task / "model"))
    material = Task(tokenizer, (end_token_id(tokenizer),), [], [])
    texts = [f"{i % 10}+{i // 10}=" for i in range(PROMPTS)]
    prompts = [Prompt(text, tuple(tokenizer(text)["input_ids"]), text) for text in texts]
    results = []
    with running(engine, task, folder / "servers") as supervisor:
        url = supervisor.processes[0].url
        client = Client(engine, url)
        pool = pool_of(client, [end_token_id(tokenizer)])
        for latency in LATENCIES:
            config = ConversationConfig(
                environment=f"{folder}/tool.py:Tool", options={"latency": latency}, turns=TURNS, workers=2
            )
            with Conversations(config, material) as conversations:
                for number in range(-1, rounds):  # the first round is a warm-up
                    line: dict[str, Any] = {"latency": latency, "load": os.getloadavg()[0]}
                    for name, lockstep in (("lockstep", True), ("overlapped", False)):
                        run = hold(conversations, pool, Load(url, engine), lockstep, prompts)
                        line[name] = client.loop.run(run)
                    ratio = line["overlapped"]["tokens_per_second"] / line["lockstep"]["tokens_per_second"]
                    line["speedup"] = round(ratio, 2)
                    if number >= 0:
                        print(json.dumps(line), flush=True)
                        results.append(line)
        client.loop.run(pool.stop())
        client.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results = measure(args.engine, Path(directory), args.rounds)
    report = {
        "command": " ".join(["python", "benchmarks/conversations.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "engine": args.engine,
        "conversations": PROMPTS * MEMBERS,
        "results": results,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
