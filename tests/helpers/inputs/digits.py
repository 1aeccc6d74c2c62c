"""Conversations of a model with random weights, which writes random text.

Their environment answers with digits that depend on the seed and on the whole conversation, and rewards
variety. If a file `stop` exists, it stops the trainer during a conversation.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import psutil

from megatron_gvpo.conversations import Reply
from megatron_gvpo.groups import Prompt

ENVIRONMENT = f"{Path(__file__).resolve()}:Digits"
TALK = (
    "rollout.max_tokens=24",
    "eval.sampling.max_tokens=24",
    "rollout.stop_token_ids=[6,7,8,9]",
    "rewards.components=[{name: environment}]",
)


def talks(**options: object) -> str:
    """The override of a configuration for conversations with these options of Digits."""
    settings = {"environment": ENVIRONMENT, "turns": 4, "workers": 2, "options": options}
    return f"rollout.conversation={json.dumps(settings)}"


class Digits:
    def __init__(self, stop: str = "", down: bool = False) -> None:
        self.stop, self.down = stop, down

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.seed = seed
        self.heard: list[str] = []

    def step(self, response: str) -> Reply:
        self.heard.append(response)
        if self.down and self.seed % 3 == 0:
            raise RuntimeError("down")
        if self.stop and len(self.heard) == 2:
            try:
                Path(self.stop).unlink()
            except FileNotFoundError:  # another worker was first
                pass
            else:
                os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGTERM)
        text = "/".join([str(self.seed), *self.heard])
        number = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 100
        if number < 20:
            return Reply(None, reward=len(set(response)) / 10)
        return Reply(str(number), reward=len(set(response)) / 10, counts={"even": 1 - number % 2})
