"""Servers end responses at stop strings as they see them; the pool ends them by the tokens alone."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.inputs.chat_tokenizer import tokenizer
from helpers.servers.fake_servers import Connection, admit_at_once, answer_of
from helpers.servers.real_servers import PROMPTS, SharedServer, admit, logprobs, reference
from transformers import AutoTokenizer

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.groups import Rollout
from megatron_gvpo.huggingface.end_tokens import StopStrings
from megatron_gvpo.servers.answers import Routers
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.request import Request
from megatron_gvpo.servers.server import Completion
from megatron_gvpo.servers.sglang import SGLang
from megatron_gvpo.servers.vllm import VLLM
from megatron_gvpo.settings.sections import RolloutConfig, SamplingConfig
from megatron_gvpo.settings.servers import ServersConfig

KINDS = {"sglang": SGLang, "vllm": VLLM}
OF = tokenizer()
LETTERS = {letter: OF.convert_tokens_to_ids(letter) for letter in "abchelo"}
STOP, MOST = ("hello", "b"), 20
ROUTERS = Routers(layers=3, sparse=(1, 2), per_token=2, experts=4)


def reply(kind: str, text: str, reason: str, string: str | None = None) -> dict[str, Any]:
    """An answer with one token a letter."""
    token_ids = [LETTERS[letter] for letter in text]
    answer = answer_of(kind, token_ids, [-0.5] * len(text), reason)
    if string is not None and kind == "vllm":
        answer["choices"][0]["stop_reason"] = string
    elif string is not None:
        answer["meta_info"]["finish_reason"]["matched"] = string
    return answer


def response(
    kind: str,
    *answers: dict[str, Any],
    stop: tuple[str, ...] = STOP,
    sampling: SamplingConfig | None = None,
) -> tuple[Rollout, list[dict[str, Any]]]:
    """The pool's response where the server gives these answers in turn, and the requests."""
    later = iter(answers)
    connection = Connection(lambda _: next(later))
    server = KINDS[kind](connection)  # type: ignore[arg-type]

    async def ask() -> Rollout:
        settings = ServersConfig(start_timeout=0.01)
        strings = StopStrings(OF)
        pool = ServerPool([server], settings, [1], print, routers=ROUTERS, stop_strings=strings)
        admit_at_once(pool, 3)
        [handle] = pool.handles
        # A push that stops a response takes the server out; here it may go on at once.
        handle.has = lambda version: False  # type: ignore[method-assign]
        how = sampling or SamplingConfig(max_tokens=MOST, stop=stop)
        [[rollout]] = await asyncio.wait_for(pool.generate([Request((5, 6), 1, 0)], how), 5)
        return rollout

    return asyncio.run(ask()), connection.bodies


def text(rollout: Rollout) -> str:
    assert len(rollout.logprobs) == len(rollout.token_ids) == rollout.spans[-1][2]
    return str(OF.decode(rollout.token_ids))


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_is_told_the_strings_and_believed_where_the_tokens_agree(kind: str):
    rollout, [body] = response(kind, reply(kind, "achello", "stop", "hello"))
    assert body.get("sampling_params", body)["stop"] == [*STOP]
    assert (text(rollout), rollout.finish_reason) == ("achello", "stop")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_string_that_the_server_missed_ends_the_response(kind: str, reason: str):
    rollout, bodies = response(kind, reply(kind, ("achelloacc" + MOST * "c")[:MOST], reason))
    assert (text(rollout), rollout.finish_reason, len(bodies)) == ("achello", "stop", 1)


def test_a_string_that_vllm_has_no_room_for_ends_the_response():
    """vLLM refuses a request with more than four."""
    answer = reply("vllm", ("achelloacc" + MOST * "c")[:MOST], "length")
    rollout, [body] = response("vllm", answer, stop=("1", "2", "3", "4", "hello"))
    assert body["stop"] == ["1", "2", "3", "4"]
    assert (text(rollout), rollout.finish_reason) == ("achello", "stop")


@pytest.mark.parametrize("kind", KINDS)
def test_a_string_may_begin_before_new_weights_and_end_after(kind: str):
    rollout, bodies = response(kind, reply(kind, "achel", "abort"), reply(kind, "locccccccccccc", "abort"))
    assert (text(rollout), rollout.finish_reason, len(bodies)) == ("achello", "stop", 2)
    assert rollout.spans == [(3, 0, 7)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_goes_on_where_the_server_alone_saw_a_string(kind: str):
    """vLLM reads the first tokens together with the prompt's last ones."""
    rollout, bodies = response(kind, reply(kind, "ac", "stop", "hello"), reply(kind, "ab", "stop", "b"))
    assert (text(rollout), rollout.finish_reason, len(bodies)) == ("acab", "stop", 2)
    sent = bodies[1].get("prompt") or bodies[1]["input_ids"]
    assert sent == [5, 6, LETTERS["a"], LETTERS["c"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_that_goes_on_so_ends_at_the_limit(kind: str):
    answers = [reply(kind, "ac", "stop", "hello") for _ in range(MOST // 2)]
    rollout, _ = response(kind, *answers)
    assert (text(rollout), rollout.finish_reason) == ("ac" * (MOST // 2), "length")


@pytest.mark.parametrize("kind", KINDS)
def test_a_string_that_nobody_asked_for_costs_the_server(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron_gvpo.servers.pool.POLL", 0.01)
    with pytest.raises(RolloutError, match="ended a response at 'acc', which is not a stop string"):
        response(kind, reply(kind, "acc", "stop", "acc"))


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_those_of_the_tokens_that_are_kept(kind: str):
    """SGLang sends the experts of all tokens in one row, and vLLM an array by token, layer and choice."""
    answer = reply(kind, ("achelloacc" + MOST * "c")[:MOST], "length")
    numbers = np.indices((2 + MOST - 1, ROUTERS.layers, ROUTERS.per_token)).sum(0)
    experts = (numbers % ROUTERS.experts).astype("<i4")
    if kind == "sglang":
        answer["meta_info"]["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
    else:
        np.save(file := io.BytesIO(), experts)
        answer["choices"][0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    sampling = RolloutConfig(max_tokens=MOST, stop=STOP, router_replay=True)
    rollout, _ = response(kind, answer, sampling=sampling)
    assert (text(rollout), rollout.finish_reason) == ("achello", "stop")
    assert rollout.routing == ROUTERS.pack(experts[: 2 + len("achello") - 1], 2 + len("achello"))


# ---------------------------------------------------------------- real servers


def greedy(model: Any, prompt: list[int], most: int) -> list[int]:
    """The likeliest tokens after the prompt, by transformers."""
    prompts = torch.tensor([prompt])
    plain = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": most, "pad_token_id": 0}
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), **plain)
    return list(out[0, len(prompt) :].tolist())


def on_server(served: SharedServer, of: Any, sampling: SamplingConfig, n: int) -> list[list[Rollout]]:
    async def make() -> ServerPool:
        settings, strings = ServersConfig(start_timeout=60), StopStrings(of)
        pool = ServerPool([served.client.server], settings, [1], print, stop_strings=strings)
        await pool.start()
        await admit(pool, 0)
        return pool

    loop = served.client.loop
    pool = loop.run(make())
    requests = [Request(tuple(prompt), n, seed=7 + i) for i, prompt in enumerate(PROMPTS)]
    groups = loop.run(pool.generate(requests, sampling))
    loop.run(pool.stop())
    return groups


@pytest.fixture
def at_start(served: SharedServer, task: Path) -> SharedServer:
    """The shared server with the model's own weights: other tests may have pushed some."""
    served.client.receiver("disk", "load_directory", task / "model", "0")
    return served


def test_engines_end_at_the_same_tokens_as_transformers(at_start: SharedServer, task: Path):
    """Greedy, as the embedded engine's own test has it; the string is in the middle of a response."""
    model, of = reference(task / "model"), AutoTokenizer.from_pretrained(task / "model")
    full = [greedy(model, prompt, 40) for prompt in PROMPTS]
    stop = [of.decode(ids[3:5]) for ids in full if len(ids) == 40]
    assert len(stop) > 1 and all(stop)
    likeliest = SamplingConfig(temperature=0.01, top_p=1e-6, max_tokens=40, stop=stop)
    for ids, [rollout] in zip(full, on_server(at_start, of, likeliest, 1), strict=True):
        end = next((i for i in range(1, 41) if any(s in of.decode(ids[:i]) for s in stop)), None)
        assert rollout.token_ids == ids[:end]
        assert rollout.finish_reason == "stop" and (end is not None or ids[-1] == 1)


def test_a_server_ends_a_response_itself(served: SharedServer, task: Path):
    """Otherwise it would sample on to the limit, and the rest would be thrown away."""
    of = AutoTokenizer.from_pretrained(task / "model")
    plain = served.client("sample", PROMPTS[0], 40, 7, SamplingConfig(temperature=0.01, top_p=1e-6), [1])
    assert isinstance(plain, Completion)
    string = of.decode(plain.token_ids[2:4])
    sampling = SamplingConfig(temperature=0.01, top_p=1e-6, stop=[string])
    ended = served.client("sample", PROMPTS[0], 40, 7, sampling, [1])
    assert isinstance(ended, Completion)
    end = StopStrings(of).end(plain.token_ids, [string])
    assert ended.token_ids == plain.token_ids[:end] and len(ended.logprobs) == end
    assert (ended.finish_reason, ended.stop_string) == ("stop", string)


def test_sampled_responses_keep_their_log_probs(at_start: SharedServer, task: Path):
    of = AutoTokenizer.from_pretrained(task / "model")
    stop, reasons = ["1", "23", "+", "x"], set()
    sampling = SamplingConfig(temperature=0.7, max_tokens=30, stop=stop)
    for prompt, group in zip(PROMPTS, on_server(at_start, of, sampling, 6), strict=True):
        for rollout in group:
            end = StopStrings(of).end(rollout.token_ids, stop)
            assert end in (None, len(rollout.token_ids))
            is_stop = end is not None or rollout.token_ids[-1] == 1
            assert rollout.finish_reason == ("stop" if is_stop else "length")
            expected = logprobs(task / "model", prompt, rollout.token_ids, temperature=0.7)
            assert torch.allclose(torch.tensor(rollout.logprobs), expected, atol=2e-4)
            reasons.add(end is not None)
    assert True in reasons
