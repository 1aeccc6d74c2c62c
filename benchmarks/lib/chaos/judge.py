"""The judge of the chaos suite: a small HTTP service that rewards whole groups, slowly, and keeps a ledger.

    python benchmarks/lib/chaos/judge.py PORT LEDGER SECONDS

Runs ask it through `judged`, a function of their own in `algorithm.shapers`. It answers after SECONDS, like a
large model that judges, and adds a line to the file LEDGER for every group that it was asked about, before it
answers. So the ledger records the groups of the training, and no part of the trainer writes it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_gvpo.groups import Group

PATIENCE = 10.0  # seconds that the trainer waits for an answer


def judged(group: Group, port: int) -> list[float]:
    """The judge's rewards of a group. As a user's client may do, it raises OSError if the judge has ended."""
    question = {
        "process": os.getpid(),
        "prompt": group.prompt.id,
        "responses": [
            {
                "tokens": rollout.token_ids,
                "logprobs": len(rollout.logprobs),
                "finish": rollout.finish_reason,
                "version": rollout.weight_version,
                "spans": len(rollout.spans),
                "reward": rollout.reward,
                "errors": rollout.reward_errors,
            }
            for rollout in group.rollouts
        ],
    }
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", json.dumps(question).encode())
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=PATIENCE) as answer:
        rewards: list[float] = json.load(answer)
    return rewards


def rewards_of(responses: list[dict[str, Any]]) -> list[float]:
    """The component's reward, and a bonus that depends on the response's first characters."""
    return [response["reward"] + 0.25 * (response["tokens"][0] % 2) for response in responses]


def serve(port: int, ledger: Path, seconds: float) -> None:
    """Answer until the process is killed."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(seconds)
            rewards = rewards_of(question["responses"])
            with ledger.open("ab", buffering=0) as file:
                file.write((json.dumps(question | {"rewards": rewards}) + "\n").encode())
            body = json.dumps(rewards).encode()
            with suppress(ConnectionError):  # the trainer has been killed
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
