"""Samples by the Tinker API from weights that change, with the real SDK. Runs in the SDK's environment.

tests/tinker/test_served_samplers.py runs it: tinker_served_client.py URL MODEL RANK. It prints `done` at the
end. The log-probs of samples are the rollout server's; compute_logprobs gives the trainer's.
"""

import sys
import warnings

import tinker
import torch
from tinker import types

warnings.simplefilter("ignore")
URL, MODEL, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])
PROMPT = [9, 16, 10]
CONTEXT = 256  # of the servers
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0)


def check(sampler, params: types.SamplingParams) -> list[list[int]]:
    """Assert that three samples' log-probs are those of the trainer's weights; return the samples' tokens."""
    samples = sampler.sample(types.ModelInput.from_ints(PROMPT), 3, params).result().sequences
    for sample in samples:
        assert 1 <= len(sample.tokens) <= params.max_tokens
        text = types.ModelInput.from_ints([*PROMPT, *sample.tokens])
        scored = sampler.compute_logprobs(text).result()[len(PROMPT) :]
        error = max(abs(a - b) for a, b in zip(scored, sample.logprobs, strict=True))
        assert error < 1e-4, (error, scored, list(sample.logprobs))
    return [list(sample.tokens) for sample in samples]


def trained(training, text: list[int]):
    """A sampler of the model after it has trained on a text."""
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(text[:-1]),
        loss_fn_inputs={
            "target_tokens": torch.tensor(text[1:]),
            "weights": torch.ones(len(text) - 1),
        },
    )
    for _ in range(12):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=2e-2)).result()
    return training.save_weights_and_get_sampling_client().result()


service = tinker.ServiceClient(base_url=URL)
first = service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
second = service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
samplers = {
    "base": service.create_sampling_client(base_model=MODEL).result(),
    "first": trained(first, [*PROMPT, 5, 5, 5, 5, 5, 5]),
    "second": trained(second, [*PROMPT, 12, 3, 12, 3, 12, 3]),
}
saved = first.save_weights_for_sampler("kept").result().path
samplers["saved"] = service.create_sampling_client(model_path=saved).result()

# The servers have one set of weights at a time, and each sampler has its own.
for name in ("base", "first", "second", "saved", "second"):
    check(samplers[name], types.SamplingParams(max_tokens=6))
likeliest = {name: check(sampler, GREEDY)[0] for name, sampler in samplers.items()}
assert likeliest["first"] == likeliest["saved"] != likeliest["base"], likeliest
assert likeliest["second"] not in (likeliest["first"], likeliest["base"]), likeliest
check(samplers["first"], types.SamplingParams(max_tokens=6, top_k=3, top_p=0.9))

# Samples end at the limits and stop tokens of the request.
token = likeliest["first"][1]
stopping = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[token])
assert len(check(samplers["first"], stopping)[0]) <= 2
try:
    samplers["first"].sample(
        types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=6, stop=[])
    ).result()
except tinker.BadRequestError as error:
    assert "end every sample at the model's own end" in str(error), error
else:
    raise AssertionError("a sample without any end")

# Without a limit a sample has the room that the servers have, which is less than the model's.
[capability] = service.get_server_capabilities().supported_models
assert capability.max_context_length == CONTEXT, capability
[sample] = (
    samplers["first"].sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams()).result().sequences
)
assert 1 <= len(sample.tokens) <= CONTEXT - len(PROMPT)
service.close("success").result()
print("done")
