"""Lets the agent of agent.py talk to the policy in training, and rewards right answers."""

from __future__ import annotations

import runpy
from pathlib import Path

from openai import AsyncOpenAI, BadRequestError

from megatron_gvpo.conversations import Reply
from megatron_gvpo.conversations.programs import Endpoint
from megatron_gvpo.groups import Prompt

solve = runpy.run_path(str(Path(__file__).with_name("agent.py")))["solve"]
# All rollouts share one client: a new client loads certificates, which takes longer than the agent's work.
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", max_retries=0)


async def run(prompt: Prompt, endpoint: Endpoint) -> Reply:
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    try:
        answer, calls = await solve(client, prompt.record["prompt"])
    except BadRequestError:  # no tokens were left
        return Reply(None, 0.0)
    return Reply(None, float(answer == prompt.answer), {"calls": calls})
