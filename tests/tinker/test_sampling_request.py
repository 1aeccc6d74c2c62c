"""Sampling parameters of the API in the engine's terms."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_gvpo.tinker import requests
from megatron_gvpo.tinker.sampler import NEVER, sampling_of
from megatron_gvpo.tinker.served_model import ServedModel
from megatron_gvpo.tinker.wire import Refusal

MODEL = ServedModel("name", "path", "Qwen2ForCausalLM", 50, 20, (7,), None, ())


def sampling_for(
    model: ServedModel = MODEL, record_stability_info: bool = False, **params: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    body = requests.SampleBody.model_validate(
        {
            "sampling_session_id": "s",
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": params.pop("prompt", [3, 4])}]},
            "sampling_params": params,
            "record_stability_info": record_stability_info,
        }
    )
    return sampling_of(body, model, seed=11)


def test_the_model_ends_a_sample_unless_the_client_wants_no_stop():
    assert sampling_for()[1]["stop_token_ids"] == [7]
    assert sampling_for(stop=[9, 8])[1]["stop_token_ids"] == [7, 8, 9]
    assert sampling_for(stop=[])[1]["stop_token_ids"] == [NEVER]
    assert sampling_for(stop="\n\nUser:")[1]["stop"] == ["\n\nUser:"]


def test_a_server_that_always_ends_refuses_a_sample_without_an_end():
    with pytest.raises(Refusal, match=r"stop=\[\]: .* end every sample at the model's own end"):
        sampling_for(replace(MODEL, is_always_ended=True), stop=[])


def test_without_a_limit_a_sample_may_fill_the_context():
    assert sampling_for()[0]["max_tokens"] == 18
    assert sampling_for(max_tokens=5)[0]["max_tokens"] == 5


def test_a_sample_fits_into_the_context_of_the_rollout_servers():
    """They would refuse it, and with it all that is sampled together."""
    served = replace(MODEL, served_positions=10)
    assert sampling_for(served)[0]["max_tokens"] == 8
    with pytest.raises(Refusal, match=r"max_tokens=9 exceed the rollout servers' 10 positions"):
        sampling_for(served, max_tokens=9)
    assert sampling_for(replace(MODEL, served_positions=30))[0]["max_tokens"] == 18


def test_a_seed_of_the_client_goes_before_the_servers():
    assert (sampling_for()[0]["seed"], sampling_for(seed=4)[0]["seed"]) == (11, 4)


def test_temperature_0_takes_the_likeliest_token():
    sampling = sampling_for(temperature=0)[1]
    assert sampling["temperature"] == 1.0 and sampling["top_p"] < 1e-5


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"top_p": 1e-9, "top_k": 10**7}, "sampling_params.top_k"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [3, 50]}, "vocabulary"),
        ({"stop": [77]}, "vocabulary"),
        ({"max_tokens": 19}, "exceed the model's 20 positions"),
        ({"stop": ["\ufffd"]}, "sampling_params.stop"),
        ({"record_stability_info": True}, "give the recipe loss_fn=importance_sampling or cispo"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(params, words):
    with pytest.raises(Refusal, match=words):
        sampling_for(**params)


def test_top_k_of_minus_1_is_no_limit():
    assert sampling_for()[1]["top_k"] is None and sampling_for(top_k=5)[1]["top_k"] == 5


@pytest.mark.parametrize(
    "params", [{"learning_rate": 1e30}, {"learning_rate": float("nan")}, {"beta1": 1.0}, {"eps": 0.0}]
)
def test_an_impossible_step_is_refused(params):
    with pytest.raises(Refusal, match="adam_params"):
        requests.AdamParams.model_validate(params).step()


def test_a_checkpoints_life_is_bounded():
    body = b'{"model_id": "m", "ttl_seconds": 1' + b"0" * 400 + b"}"
    with pytest.raises(Refusal, match="ttl_seconds"):
        requests.read(requests.SaveWeights, body)


def test_what_is_not_served_is_refused():
    body = (
        b'{"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}, "x": 1}'
    )
    with pytest.raises(Refusal, match="x: this server does not serve it"):
        requests.read(requests.SampleBody, body)
