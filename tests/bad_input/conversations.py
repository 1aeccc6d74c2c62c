"""Conversations: keys, environments, tools, MCP servers and programs that cannot be meant, or that misbehave.

A conversation that its environment fails is tried again and then lost, and where too many are, the run ends
with the cause; what the policy does wrong is never an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_input.case import TRAIN, Case, Expected, with_text

ENVIRONMENT = """
import os, sys, time
from megatron_gvpo.conversations import Reply

class Mine:
    def reset(self, prompt, seed):
        self.turns = 0

    def step(self, said):
        self.turns += 1
        {body}
        return Reply(None, reward=len(said)) if self.turns == 2 else "1"

class Half:
    def reset(self, prompt, seed):
        pass
"""
PROGRAM = """
import asyncio
from openai import AsyncOpenAI

async def run(prompt, endpoint):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    {body}
"""
ASKS = 'await client.chat.completions.create(model="p", messages=[{"role": "user", "content": "1"}])'
TOOLS = '''
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Two.
    """
    return a + b

def bare(a):
    return a

def many(*args: int) -> int:
    """Adds.

    Args:
        args: Numbers.
    """
    return sum(args)
'''
LOST = "rollout.conversation.max_lost"
UNTOLD = "tools without a chat template"
with_template = with_text(
    "model/chat_template.jinja", "{% for message in messages %}{{ message.content }}{% endfor %}"
)


def talks(
    name: str,
    *,
    says: tuple[str, ...] = (),
    expected: Expected = "refused",
    spoil: Callable[[Path], object] = lambda _: None,
    reward: str = "environment",
    **keys: Any,
) -> Case:
    """A run with these keys of rollout.conversation."""
    talk = f"rollout.conversation={json.dumps(keys)}"
    own = ("rollout.max_tokens=24", f"rewards.components=[{{name: {reward}}}]")
    return Case("conversations", name, (*TRAIN, talk, *own), spoil, expected, says)


def environment(
    name: str, body: str = "pass", spec: str = "Mine", says: tuple[str, ...] = (), **keys: Any
) -> Case:
    """A run with the environment `env.py:spec`, whose step does `body` first."""
    keys = {"spoil": with_text("env.py", ENVIRONMENT.format(body=body)), "turns": 3, **keys}
    return talks(name, environment=f"env.py:{spec}", says=says, **keys)


def tools(name: str, *specs: str, says: tuple[str, ...], **keys: Any) -> Case:
    def spoil(task: Path) -> None:
        with_text("tools.py", TOOLS)(task)
        if name != UNTOLD:
            with_template(task)

    return talks(name, tools=specs, spoil=spoil, reward="math", says=says, **keys)


def mcp(name: str, says: tuple[str, ...], **server: Any) -> Case:
    return talks(name, mcp=[server], spoil=with_template, reward="math", says=says)


def program(name: str, body: str, says: tuple[str, ...] = (), **keys: Any) -> Case:
    spoil = with_text("agent.py", PROGRAM.format(body=body))
    return talks(name, program="agent.py:run", spoil=spoil, says=says, **keys)


KEYS = [
    environment("no turns", turns=0, says=("rollout.conversation.turns",)),
    environment("no tokens in a turn", turn_tokens=0, says=("rollout.conversation.turn_tokens",)),
    environment("no seconds for a step", step_timeout=0, says=("rollout.conversation.step_timeout",)),
    environment("no seconds for a rollout", rollout_timeout=0, says=("conversation.rollout_timeout",)),
    environment("no workers", workers=0, says=("rollout.conversation.workers",)),
    environment("all may be lost", max_lost=1, says=(LOST,)),
    environment("a misspelt parser", parser="hermse", says=("parser=hermse: want hermes, json, xml",)),
    environment("a misspelt history", history="temlate", says=("rollout.conversation.history",)),
    environment("a history without a template", history="template", says=("history=template",)),
    environment("a parser beside an environment", parser="p.py:f", says=("parser has no effect",)),
    environment("an unknown key", turn=3, says=("rollout.conversation.turn",)),
    talks("nobody to talk with", turns=3, says=("give one of environment, tools and program",)),
    environment("an environment and tools", tools=["t.py:f"], says=("give one of environment, tools",)),
]
ENVIRONMENTS = [
    environment("a good environment", expected="runs"),
    talks("a file that is missing", environment="e.py:Mine", says=("environment=e.py:Mine: there is",)),
    talks("a module that is missing", environment="nothing:Mine", says=("environment=nothing:Mine: imp",)),
    environment("a class that is missing", spec="Yours", says=("no function 'Yours'; it has: Mine, Half",)),
    environment("a class without step", spec="Half", says=("it lacks step",)),
    environment("options that it does not take", options={"size": 3}, says=("with the options",)),
    environment(
        "a file that is not Python",
        spoil=with_text("env.py", "class Mine(:\n"),
        says=("environment=env.py:Mine: importing env.py failed: SyntaxError",),
    ),
    environment(
        "it hangs once",
        "first = not os.path.exists('m'); open('m', 'a').close(); time.sleep(60 * first)",
        step_timeout=2,
        expected="runs",
    ),
    environment(
        "it ends its process once",
        "first = not os.path.exists('m'); open('m', 'a').close(); first and os._exit(3)",
        expected="runs",
    ),
    environment("it always ends its process", "os._exit(3)", says=("it ended its process (exit code 3)",)),
    environment("it always raises", "raise RuntimeError('down')", says=("RuntimeError: down (env.py, line",)),
    environment("it prints much", "print('x' * 10**6); sys.stdout.flush()", expected="runs"),
    environment("it says much", "if self.turns == 1: return '9' * 10**7", expected="runs"),
    environment("it returns a dictionary", "return {'a': 1}", says=("step returned dict",)),
    environment("it returns a number", "return 7", says=("step returned int '7': want a text",)),
    environment(
        "it answers as the assistant",
        "return [{'role': 'assistant', 'content': '1'}]",
        says=("step returned a message of the assistant",),
    ),
    environment(
        "it returns a value that is not JSON",
        "return [{'role': 'user', 'content': object()}]",
        says=("step returned list",),
    ),
    environment(
        "a reward that is not a number", "return Reply('1', 'x')", says=("str instead of a number as its",)
    ),
    environment(
        "a count that is not a number",
        "return Reply('1', 1, {'n': None})",
        says=("instead of a number as the count n",),
    ),
]
TOOLS_AND_SERVERS = [
    tools(UNTOLD, "tools.py:add", says=("tools need a chat template",)),
    tools("a tool that is missing", "tools.py:ad", says=("tools.py:ad: tools.py has no function 'ad'",)),
    talks("a tool's file that is missing", tools=["t.py:f"], reward="math", says=("tools=t.py:f: there",)),
    tools("a tool without types", "tools.py:bare", says=("tools.py:bare",)),
    tools(
        "a tool with *args",
        "tools.py:many",
        says=("can describe its argument *args",),
    ),
    tools("two tools of one name", "tools.py:add", "tools.py:add", says=("have the same name: add",)),
    tools(
        "a parser that is missing",
        "tools.py:add",
        parser="tools.py:parse",
        says=("parser=tools.py:parse: tools.py has no function 'parse'",),
    ),
    mcp("an MCP program that is missing", command=["no-such-program"], says=("MCP server no-such-program",)),
    mcp("an MCP program that ends", command=["false"], says=("MCP server false",)),
    mcp("an MCP address where nobody is", url="http://127.0.0.1:9/mcp", says=("http://127.0.0.1:9/mcp",)),
    mcp("an MCP address that is none", url="127.0.0.1:9", says=("rollout.conversation.mcp.0", "url=127")),
    mcp("an MCP server without an address", says=("give either a command or a url",)),
]
PROGRAMS = [
    program("a good program", f"{ASKS}; return 1.0", expected="runs"),
    talks("a program's file that is missing", program="a.py:run", says=("program=a.py:run: there is",)),
    program(
        "the program always raises", "raise RuntimeError('bug')", says=("RuntimeError: bug (agent.py, line",)
    ),
    program("it returns a text", f"{ASKS}; return 'x'", says=("the program returned str 'x'",)),
    program("it never asks", "return 1.0", says=("it returned without an answer of the policy",)),
    program("it hangs", "await asyncio.sleep(600)", step_timeout=2, says=("neither asked the policy nor",)),
]
CONVERSATIONS = [*KEYS, *ENVIRONMENTS, *TOOLS_AND_SERVERS, *PROGRAMS]
