"""Limits of seconds do not count the time in which a whole job is stopped, as by `scontrol suspend`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.paths import ROOT

from megatron_gvpo.core.clock import event_loop, running_seconds

LIMIT, STOP = 4, 9  # seconds: a limit, and how long the job is stopped; the work itself takes two
# Stops its parent and all that has begun there, after `sys.argv[1]` appears: the work has begun.
STOPPER = f"""
import os, pathlib, psutil, sys, time

while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
job = psutil.Process(os.getppid())
processes = [job, *(p for p in job.children(recursive=True) if p.pid != os.getpid())]
for process in processes:
    process.suspend()
time.sleep({STOP})
for process in processes:
    process.resume()
"""
# Two seconds of work in which no clock is read.
WORK = """
import asyncio, pathlib, time

async def work(mark):
    pathlib.Path(mark).touch()
    for _ in range(40):
        time.sleep(0.05)
        await asyncio.sleep(0)
"""
ENVIRONMENT = (
    WORK
    + """
class Slow:
    def reset(self, prompt, seed):
        self.mark = prompt.answer

    async def step(self, text):
        await work(self.mark)
        return None
"""
)
PROGRAM = (
    WORK
    + """
async def run(prompt, endpoint):
    from openai import AsyncOpenAI
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=100)
    message = {"role": "user", "content": "2"}
    await client.chat.completions.create(model="policy", messages=[message])
    await work(prompt.answer)
    return 1.0
"""
)
SERVER = (
    WORK
    + """
import sys
from aiohttp import web

async def answer(request):
    await work(sys.argv[1])
    return web.json_response({"done": True})

app = web.Application()
app.router.add_post("/", answer)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)
"""
)
# Each prints "done" where the work was done within the limit. Arguments: the user's file, the mark, STOPPER.
JOBS = {
    "environment": f"""
from megatron_gvpo.conversations.environments import EnvironmentProcess
from megatron_gvpo.groups import Prompt
from megatron_gvpo.workers import environments as handler
from megatron_gvpo.workers.messages import Begin, Function, prompt_bytes
from megatron_gvpo.workers.output import Printout

process = EnvironmentProcess(
    handler, Function("environment", f"{{file}}:Slow", {{}}), {{}}, Printout(["environment"])
)
process.wait_ready()
begin = Begin(prompt_bytes(Prompt("p", (1,), "?", answer=mark)), 0, [])

async def job():
    answer = await process.step(0, begin, "1", {LIMIT})
    return "done" if answer.messages is None else answer
""",
    "program": f"""
from conversations.test_programs import Harness, Prompt, ids, tokenizer, WITH_CALLS, ProgramRunner, Task, END
from conversations.test_programs import ConversationConfig, Script, Request, SamplingConfig

config = ConversationConfig(program=f"{{file}}:run", step_timeout={LIMIT})
runner = ProgramRunner(config, f"{{file}}:run", Task(tokenizer(WITH_CALLS), (END,), [], [], chat=True))
prompt = Prompt("p", ids(tokenizer(WITH_CALLS), "2"), "2", answer=mark)

async def job():
    requests, sampling = [Request(prompt.token_ids, 1, seed=1)], SamplingConfig(max_tokens=400)
    with runner:
        [[rollout]] = await runner.run_all(Script(lambda *_: "3"), [prompt], requests, sampling)
    return "done" if rollout.counts.get("environment_reward") == 1 else rollout
""",
    "request": f"""
import aiohttp
from megatron_gvpo.core.launch import free_ports
from megatron_gvpo.servers.http import Http, ServerGone

[port] = free_ports(1, "127.0.0.1")
server = subprocess.Popen([sys.executable, file, mark, str(port)])

async def job():
    async with aiohttp.ClientSession() as session:
        http = Http(session, f"http://127.0.0.1:{{port}}")
        try:
            while True:
                try:
                    answer = await http.post("/", timeout={LIMIT})
                    return "done" if answer == {{"done": True}} else answer
                except ServerGone as error:
                    if not error.refused:  # else it does not listen yet
                        raise
                    await asyncio.sleep(0.1)
        finally:
            server.kill()
""",
}
FILES = {"environment": ENVIRONMENT, "program": PROGRAM, "request": SERVER}


@pytest.mark.parametrize("kind", list(JOBS))
def test_the_time_in_which_a_job_is_stopped_does_not_count(kind: str, tmp_path: Path) -> None:
    """Otherwise a suspended job came back to conversations that were lost and servers that were given up."""
    file, mark = tmp_path / "mine.py", tmp_path / "begun"
    file.write_text(FILES[kind])
    job = f"""
import asyncio, subprocess, sys
from megatron_gvpo.core.clock import event_loop
sys.path.insert(0, {str(ROOT / "tests")!r})
file, mark = sys.argv[1:3]
{JOBS[kind]}
stopper = subprocess.Popen([sys.executable, "-c", sys.argv[3], mark])
try:
    print(asyncio.run(job(), loop_factory=event_loop))
finally:
    stopper.kill()
"""
    program = [sys.executable, "-c", job, str(file), str(mark), STOPPER]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.stdout == "done\n", done.stdout + done.stderr


def test_a_limit_still_ends_what_takes_too_long() -> None:
    begin, running = time.monotonic(), running_seconds()

    async def wait() -> None:
        async with asyncio.timeout(0.5):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        asyncio.run(wait(), loop_factory=event_loop)
    assert 0.5 <= time.monotonic() - begin < 30 and running_seconds() - running >= 0.5
