"""Spoiled answers of SGLang and vLLM: success, or an error that the run knows how to take."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from helpers.inputs.mutate import mutated
from hypothesis import example, given, settings

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.servers.http import ServerRefused
from megatron_gvpo.servers.server import Drafts
from megatron_gvpo.servers.sglang import SGLang
from megatron_gvpo.servers.vllm import VLLM
from megatron_gvpo.settings.sections import SamplingConfig

FUZZ = settings(settings.get_profile("fuzz"))
SGLANG_ANSWERS = {
    "/server_info": {
        "version": "0.5.23", "model_path": "m", "max_req_input_len": 93, "tp_size": 2, "pp_size": 1,
        "device": "cuda", "speculative_algorithm": "NGRAM",
        "speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0,
    },
    "/generate": {
        "output_ids": [5, 6],
        "meta_info": {
            "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]],
            "input_token_logprobs": [[None, 1, None], [-0.5, 2, None], [-0.25, 3, None], [-1.0, 3, None]],
            "finish_reason": {"type": "stop", "matched": 6},
            "weight_version": "3",
            "spec_verify_ct": 4, "spec_num_proposed_drafts": 12, "spec_num_correct_drafts": 5,
        },
    },
    "/model_info": {"weight_version": "3"},
}  # fmt: skip
VLLM_ANSWERS = {
    "/version": {"version": "0.25.1"},
    "/v1/models": {"data": [{"root": "m", "max_model_len": 99}]},
    "/get_world_size": {"world_size": 1},
    "/v1/completions": {
        "choices": [
            {
                "token_ids": [5, 6],
                "logprobs": {"token_logprobs": [-0.5, -0.25]},
                "finish_reason": "stop",
                "prompt_logprobs": [None, {"2": {"logprob": -0.5}}, {"3": {"logprob": -0.25}}],
            }
        ]
    },
    "/weight_info": {"weight_version": "3"},
    "/metrics": (
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.\n"
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="policy"} 3.0\n'
        'vllm:spec_decode_num_drafts_total{engine="1",model_name="policy"} 1.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="policy"} 12.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="policy"} 5.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4.0\n'
    ),
}


class Answers:
    """Stands for the HTTP connection: gives a prepared answer, through JSON as it would come."""

    url = "http://127.0.0.1:1"

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers

    async def get(self, path: str, **_: Any) -> Any:
        return json.loads(json.dumps(self._answers.get(path)))

    async def post(self, path: str, *_: Any, **__: Any) -> Any:
        return await self.get(path)


def ask(kind: Any, answers: dict[str, Any]) -> None:
    server = kind(Answers(answers))
    for call in (
        lambda: server.info(1.0),
        lambda: server.sample([1, 2], 9, 0, SamplingConfig(), (6,), 1.0),
        lambda: server.score([1, 2, 3], 1.0),
        lambda: server.weight_version(1.0),
        lambda: server.speculates(1.0),
        lambda: server.drafts(1.0),
    ):
        try:
            answer = asyncio.run(call())
        except ConfigError:
            assert kind is SGLang, "vLLM does not tell how it accepts"
        except ServerRefused as error:
            assert "\n" not in str(error) and len(str(error)) < 600 and not error.is_request
        else:
            if isinstance(answer, list):
                assert all(type(value) in (int, float) for value in answer)


@pytest.mark.parametrize(("kind", "answers"), [(SGLang, SGLANG_ANSWERS), (VLLM, VLLM_ANSWERS)])
def test_the_valid_answers_are_read(kind: Any, answers: dict[str, Any]) -> None:
    server = kind(Answers(answers))
    assert asyncio.run(server.info(1.0)).context_length == 99
    sample = asyncio.run(server.sample([1, 2], 9, 0, SamplingConfig(), (6,), 1.0))
    assert (sample.token_ids, sample.logprobs, sample.finish_reason) == ([5, 6], [-0.5, -0.25], "stop")
    assert asyncio.run(server.score([1, 2, 3], 1.0)) == [-0.5, -0.25]
    assert asyncio.run(server.weight_version(1.0)) == "3"
    assert asyncio.run(server.speculates(1.0))
    assert asyncio.run(server.drafts(1.0)) == Drafts(4, 12, 5)


@FUZZ
@given(answers=mutated(SGLANG_ANSWERS))
@example(answers={**SGLANG_ANSWERS, "/generate": "<html>"})
def test_sglangs_answers(answers: dict[str, Any]) -> None:
    """Fails on the old code: a KeyError of one answer ended the run with a traceback."""
    ask(SGLang, answers)


@FUZZ
@given(answers=mutated(VLLM_ANSWERS))
@example(answers={**VLLM_ANSWERS, "/v1/completions": {"choices": []}})
def test_vllms_answers(answers: dict[str, Any]) -> None:
    ask(VLLM, answers)
