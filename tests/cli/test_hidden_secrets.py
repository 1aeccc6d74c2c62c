"""A run whose rewards, judge and environment repeat secrets wherever they can: none of its files has one."""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest
from helpers.inputs.digits import TALK
from helpers.paths import ROOT
from helpers.servers.reward_models import standing_in
from helpers.suite.real_parts import used
from helpers.tiny_run import GVPO, SHORT
from tokenizers import Tokenizer

from megatron_gvpo.observe.report.page import Reporter

KEY = "jk-\"4f/9b'2c\\77 e1+0d"  # every notation spells it in another way
PIN = "8392017465"  # the tiny model has tokens for digits alone
PASSWORD, QUERY = "hunter22", "qk-55aa66bb77"
SERVER, HUB = "sv-0123456789abcdef", "hf_AbCdEf0123456789"
URL = f"https://me:{PASSWORD}@judge.example/v1?api_key={QUERY}"
VARIABLES = {"JUDGE_KEY": KEY, "JUDGE_PIN": PIN, "SERVER_KEY": SERVER, "HF_TOKEN": HUB}
SPELLINGS = [
    *(PIN, PASSWORD, QUERY, SERVER, HUB, KEY, repr(KEY)[1:-1], json.dumps(KEY)[1:-1]),
    *(quote(KEY), quote(KEY, safe=""), base64.b64encode(f"me:{KEY}".encode()).decode()[8:-4]),
]

REWARD = """
import base64, json, os, sys
from urllib.parse import quote

def ask(prompt, rollout, url, api_key):
    sys.stdout.write(f"asking with {api_key[:9]}")  # one line in two parts
    sys.stdout.flush()
    sys.stdout.write(f"{api_key[9:]}\\n")
    basic = base64.b64encode(f"me:{api_key}".encode()).decode()
    print([api_key, url], json.dumps(api_key), quote(api_key), quote(api_key, safe=""), basic)
    print("." * 490 + os.environ["HF_TOKEN"])  # the line is cut off inside
    if rollout.token_ids[0] % 4 == 0:
        raise RuntimeError(f"401 from {url}: Incorrect API key provided: {api_key}")
    if rollout.token_ids[0] % 4 == 1:
        raise RuntimeError({"Authorization": "Basic " + basic, "keys": [api_key, quote(api_key)]})
    if rollout.token_ids[0] % 4 == 2:
        raise RuntimeError("." * 490 + os.environ["HF_TOKEN"])  # the message is cut off inside
    return len(set(rollout.token_ids)) / len(rollout.token_ids)
"""
ENVIRONMENT = """
from megatron_gvpo.conversations import Reply

class Teller:
    def __init__(self, api_key, pin):
        self.api_key, self.pin = api_key, pin

    def reset(self, prompt, seed):
        self.seed = seed

    def step(self, said):
        print("answering with", self.api_key, self.pin)
        if self.seed % 5 == 0:
            raise RuntimeError(f"refused: {self.api_key}")
        return Reply(f"1 {self.pin} 2" if self.seed % 2 else "3", reward=len(set(said)) / 10)
"""


def judge(path: str, body: Any) -> Any:
    """A judge that puts the key of its server, and the reward's, into its explanations."""
    if path == "/v1/models":
        return {"data": [{"id": "a-judge"}]}
    verdict = {"explanation": f"Bearer {SERVER} of {URL} with {KEY}", "score": len(str(body)) % 11}
    return {"choices": [{"message": {"content": json.dumps(verdict)}, "finish_reason": "stop"}]}


def texts_of(value: Any) -> Iterator[str]:
    """All texts in nested values, keys included."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for inner in value:
            yield from texts_of(inner)
    elif isinstance(value, str):
        yield value


def written(out: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of all that the run wrote: each file as it is, and the values of those that pack texts."""
    for path in filter(Path.is_file, out.rglob("*")):
        yield path.name, path.read_bytes().decode("latin-1")
        if path.suffix == ".parquet":
            yield path.name, "\n".join(texts_of(pq.read_table(path).to_pylist()))
        elif path.suffix == ".json":
            yield path.name, "\n".join(texts_of(json.loads(path.read_text())))


@pytest.fixture(params=["history", "conversation"])
def run(request: pytest.FixtureRequest, task: Path, tmp_path: Path) -> tuple[Path, str]:
    """The output directory of a run, with a report, and what it printed.

    A history keeps responses in checkpoints; neither conversations nor judges go with it.
    """
    out, rewards, environment = tmp_path / "run", tmp_path / "ask.py", tmp_path / "teller.py"
    rewards.write_text(REWARD)
    environment.write_text(ENVIRONMENT)
    key = {"env": "JUDGE_KEY"}
    own: dict[str, Any] = {"logging": {"tensorboard": True}, "checkpoint": {"every": 1}}
    words = [f"output_dir={out}", "train.steps=3", *GVPO, *SHORT]
    if request.param == "history":
        words += ["algorithm.members=[{name: replay, count: 2}]"]
    else:
        teller = {"api_key": key, "pin": {"env": "JUDGE_PIN"}}
        talk = {"environment": f"{environment}:Teller", "turns": 3, "workers": 1, "options": teller}
        own["rollout"] = {"conversation": {**talk, "max_lost": 0.9}}
        words += [*TALK[:-1], "rollout.max_tokens=48"]
    with standing_in(judge) as url:
        servers = {"urls": [url], "api_key_env": "SERVER_KEY", "start_timeout": 5}
        ask = {"name": "ask", "function": f"{rewards}:ask", "options": {"url": URL, "api_key": key}}
        quality = {"name": "quality", "judge": {"model": "a-judge", "servers": servers}}
        own["rewards"] = {"components": [ask] if request.param == "history" else [ask, quality]}
        (tmp_path / "own.json").write_text(json.dumps(own))
        done = command("train", str(task / "run.yaml"), str(tmp_path / "own.json"), *words, **VARIABLES)
    assert done.returncode == 0, done.stderr[-3000:]
    page = command("report", str(out))
    assert page.returncode == 0, page.stderr
    used("megatron-core and Megatron-Bridge, 1 rank")
    return out, done.stdout + done.stderr


def test_no_file_of_a_run_has_a_secret(run: tuple[Path, str], task: Path) -> None:
    out, printed = run
    rows = [row for file in out.glob("rollouts/step_*") for row in pq.read_table(file).to_pylist()]
    errors = " ".join(row["reward_errors"]["ask"] or "" for row in rows)
    assert "401 from https://<redacted>@judge.example/v1?api_key=<redacted>" in errors
    assert "API key provided: {env: JUDGE_KEY}" in errors and ".{env: HF_TOKEN} ... " in errors
    assert "[ask] asking with {env: JUDGE_KEY}\n" in printed
    if rows[0]["turns"] is None:
        states = [path.read_text() for path in out.glob("checkpoints/*/state.json")]
        assert states and all("{env: JUDGE_KEY}" in state for state in states)
    else:
        assert "Bearer {env: SERVER_KEY} of https://<redacted>@" in rows[0]["explanations"]["quality"]
        assert "[environment] answering with {env: JUDGE_KEY} {env: JUDGE_PIN}\n" in printed
        no_ids_stand_for_a_secret(rows, task)

    texts = [*written(out), ("printed", printed), ("page", shown(out))]
    assert {"config.yaml", "run.json", "metrics.jsonl", "state.json", "report.html"} <= {n for n, _ in texts}
    leaks = {(name, spelling) for name, text in texts for spelling in SPELLINGS if spelling in text}
    assert not leaks


def no_ids_stand_for_a_secret(rows: list[dict[str, Any]], task: Path) -> None:
    """The rows in which a secret was hidden have no token ids, and the others have them."""
    tokenizer = Tokenizer.from_file(str(task / "model" / "tokenizer.json"))
    redacted = ["{env: JUDGE_PIN}" in str(row["messages"]) for row in rows]
    assert 0 < sum(redacted) < len(rows)
    for row, hidden in zip(rows, redacted, strict=True):
        ids = [row["prompt_ids"], row["response_ids"], *(turn["given_ids"] for turn in row["turns"])]
        assert {each is None for each in ids} == {hidden}
        assert hidden or PIN not in "".join(map(tokenizer.decode, ids))


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_gvpo", *words],
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )


def shown(out: Path) -> str:
    """All texts of the report's page, which has them compressed."""
    report = Reporter([out], 1000).report()
    values = [report.index, *(json.loads(gzip.decompress(block)) for block in report.blocks.values())]
    return "\n".join(texts_of(values))
