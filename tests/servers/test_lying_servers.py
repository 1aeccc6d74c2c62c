"""Well-formed answers that no engine gives cost the server that gave them; nothing of them is trained on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers.servers.fake_servers import URL, Connection, admit_at_once, answer_of

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.groups import Rollout
from megatron_gvpo.servers.http import ServerRefused
from megatron_gvpo.servers.pool import ATTEMPTS, ServerPool
from megatron_gvpo.servers.request import Request
from megatron_gvpo.servers.sglang import SGLang
from megatron_gvpo.servers.vllm import VLLM
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.settings.servers import ServersConfig

STOP, VOCABULARY, MOST = 1, 20, 8  # the end token, the size of the vocabulary, tokens that are asked for
KINDS = {"sglang": SGLang, "vllm": VLLM}
Lie = tuple[list[int], list[float], Any]  # token ids, log-probs, finish reason
TRUE: Lie = ([5, 6, STOP], [-0.5, -1.0, -0.25], "stop")


def pool_of(kind: str, connection: Connection) -> ServerPool:
    server = KINDS[kind](connection)  # type: ignore[arg-type]
    return ServerPool([server], ServersConfig(start_timeout=0.01), [STOP], print, vocabulary=VOCABULARY)


def response(pool: ServerPool) -> Rollout:
    """A response from a server that comes back with the weights each time that it is lost."""

    async def run() -> Rollout:
        def back(_: str = "") -> None:
            admit_at_once(pool, 0)

        pool._report = lambda _: asyncio.get_running_loop().call_soon(back)  # type: ignore[assignment]
        back()
        generated = pool.generate([Request((3, 4), 1, 0)], SamplingConfig(max_tokens=MOST))
        [[rollout]] = await asyncio.wait_for(generated, 20.0)
        return rollout

    return asyncio.run(run())


LIES: dict[str, tuple[Lie, str]] = {
    "positive": (([5, 6, STOP], [-0.5, 3.5, -0.25], "stop"), "3.5 at index 1 is not a log-prob"),
    "minus infinity in fp32": (([5, 6, STOP], [-0.5, -1.0, -1e300], "stop"), r"-1e\+300 at index 2"),
    "an integer beyond floats": (([5, STOP], [-(10**400), -1.0], "stop"), "over 40 digits at index 0"),
    "beyond the vocabulary": (([5, VOCABULARY, STOP], TRUE[1], "stop"), "token 20 at index 1.* knows 20"),
    "a negative id": (([5, -1, STOP], TRUE[1], "stop"), "-1 at index 1 of the response is not a token id"),
    "too many": (([5] * 51, [-1.0] * 51, "length"), "51 tokens, and was asked for 8"),
    "a stop token in the middle": (([5, STOP, 6, STOP], [-1.0] * 4, "stop"), "token 1, index 1 of 4"),
    "a stop token before length": (([5, STOP] + [6] * 6, [-1.0] * 8, "length"), "token 1, index 1 of 8"),
    "length at once": (([5], [-1.0], "length"), '"length" after 1 of 8 tokens'),
    "an unknown reason": (([5], [-1.0], "tool_calls"), "finish reason 'tool_calls'"),
    "no reason": (([5], [-1.0], None), "finish reason None"),
    "a log-prob too few": (([5, 6, STOP], [-1.0, -1.0], "stop"), "3 tokens with 2 log-probs|ValueError"),
    "abort for ever": (([], [], "abort"), 'finish reason "abort" and no token'),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lie", "words"), LIES.values(), ids=LIES)
def test_an_answer_that_no_engine_gives_costs_the_server(kind: str, lie: Lie, words: str) -> None:
    """Fails on the old code: all were responses of the run, and the last one a loop without an end."""
    connection = Connection(lambda _: answer_of(kind, *lie))
    with pytest.raises(RolloutError, match=rf"lost with {ATTEMPTS} servers in turn; at last: {URL}.*{words}"):
        response(pool_of(kind, connection))
    assert len(connection.bodies) == ATTEMPTS


def test_log_probs_of_other_tokens_are_not_those_of_the_response() -> None:
    answer = answer_of("sglang", *TRUE)
    answer["meta_info"]["output_token_logprobs"][1][1] = 7
    with pytest.raises(RolloutError, match="at index 1 the log-prob of token 7, not of 6"):
        response(pool_of("sglang", Connection(lambda _: answer)))


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_and_the_end_of_the_context_are_taken(kind: str) -> None:
    """Log-softmax in fp32 may exceed 0 a little; SGLang leaves two tokens of its context free."""
    for honest, reason in (
        (([5, 6, STOP], [1e-7, 5e-4, -90.0], "stop"), "stop"),
        (([5] * (MOST - 2), [-1.0] * (MOST - 2), "length"), "length"),
        # The last token that there was room for ended it, as the embedded engine says.
        (([5] * (MOST - 1) + [STOP], [-1.0] * MOST, "length"), "stop"),
    ):
        answer = answer_of(kind, *honest)
        rollout = response(pool_of(kind, Connection(lambda _, answer=answer: answer)))
        assert (rollout.token_ids, rollout.logprobs, rollout.finish_reason) == (*honest[:2], reason)


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_that_ended_as_it_was_stopped_is_complete(kind: str) -> None:
    """Fails on the old code, which had the server go on after the end token."""
    connection = Connection(lambda _: answer_of(kind, [5, STOP, 7], [-1.0, -2.0, -3.0], "abort"))
    rollout = response(pool_of(kind, connection))
    assert (rollout.token_ids, rollout.logprobs, rollout.finish_reason) == ([5, STOP], [-1.0, -2.0], "stop")
    assert len(connection.bodies) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_pushes_may_stop_a_response_as_often_as_they_come(kind: str) -> None:
    pushes = 2 * ATTEMPTS

    async def run() -> Rollout:
        pool = pool_of(kind, connection)
        [handle] = pool.handles
        admit_at_once(pool, 0)
        generated = asyncio.create_task(
            pool.generate([Request((3, 4), 1, 0)], SamplingConfig(max_tokens=MOST))
        )
        for version in range(1, pushes + 1):
            while not handle.calls:
                await asyncio.sleep(0)
            assert await pool.take_out(version, abort=True) == [handle]
            pool.admit(handle, version)
        [[rollout]] = await generated
        return rollout

    def answer(_: dict[str, Any]) -> Any:
        stopped = len(connection.bodies) <= pushes
        return answer_of(kind, *(([], [], "abort") if stopped else TRUE))

    connection = Connection(answer)
    assert asyncio.run(asyncio.wait_for(run(), 20.0)).token_ids == TRUE[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logprob", [3.5, -1e300, 0.01, True, -(10**400)])
def test_a_teachers_log_probs_are_log_probs(kind: str, logprob: float) -> None:
    """Fails on the old code, whose loss was infinite or had a ratio of e^3.5."""

    def scores(value: float) -> list[float]:
        entries = [[-0.5, 2, None], [value, 3, None], [-1.0, 3, None]]
        answer = {
            "meta_info": {"input_token_logprobs": [[None, 1, None], *entries]},
            "choices": [{"prompt_logprobs": [None, {"2": {"logprob": -0.5}}, {"3": {"logprob": value}}]}],
        }
        server = KINDS[kind](Connection(lambda _: answer))  # type: ignore[arg-type]
        return asyncio.run(server.score([1, 2, 3], 1.0))

    assert scores(-9999.0) == [-0.5, -9999.0]  # vLLM's word for minus infinity
    with pytest.raises(ServerRefused, match=rf"{URL}.* at index 1 is not a log-prob") as refused:
        scores(logprob)
    assert not refused.value.is_request
