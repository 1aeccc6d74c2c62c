"""Uses each part of the Tinker API that the server serves, with the real SDK. Runs in the SDK's environment.

tests/tinker/test_serve_tinker.py runs it: tinker_client.py URL MODEL RANK. It prints `done` at the end.
"""

import sys
import warnings

import tinker
import torch
from tinker import types

warnings.simplefilter("ignore")
URL, MODEL, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])
TEXTS = [[9, 16, 10, 17, 8, 16, 7, 19], [5, 5, 5], [12, 3, 4, 14, 9, 10]]


def datum(tokens: list[int], **inputs: list[float]) -> types.Datum:
    columns = {name: torch.tensor(values) for name, values in inputs.items()}
    if not columns:
        columns = {"weights": torch.ones(len(tokens) - 1)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(tokens[1:]), **columns},
    )


def refused(kind: type[Exception], words: str, action) -> None:
    """Assert that the action raises an error of the API, whose message has `words`."""
    try:
        action()
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(f"no {kind.__name__} with {words!r}")


data = [datum(tokens) for tokens in TEXTS]
adam = types.AdamParams(learning_rate=1e-2)
service = tinker.ServiceClient(base_url=URL)
training = service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
other = service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
assert training.get_info().model_data.tokenizer_id == MODEL

# Supervised steps do not change another model of the session.
losses = []
for _ in range(3):
    passed, step = training.forward_backward(data, "cross_entropy"), training.optim_step(adam)
    losses.append(passed.result().metrics["loss:sum"])
    assert step.result().metrics["grad_norm"] > 0
assert losses[2] < losses[0], losses
untrained = other.forward(data, "cross_entropy").result()
assert abs(untrained.metrics["loss:sum"] - losses[0]) < 1e-4 * losses[0]


# A custom loss, whose gradient the SDK sends as weights, is cross-entropy here.
def custom(_, logprobs):
    loss = -torch.cat(list(logprobs)).sum()
    return loss, {"custom:mean": float(loss)}


assert abs(other.forward_backward_custom(data, custom).result().metrics["custom:mean"] - losses[0]) < 1e-3
first = other.optim_step(adam).result().metrics["grad_norm"]
third = service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
third.forward_backward(data, "cross_entropy").result()
assert abs(third.optim_step(adam).result().metrics["grad_norm"] - first) < 1e-4 * first

# Samples have the trainer's log-probs, and repeat with their seed.
sampler = training.save_weights_and_get_sampling_client().result()
prompt, params = types.ModelInput.from_ints([9, 16, 10]), types.SamplingParams(max_tokens=6, seed=3)
samples = sampler.sample(prompt, 3, params).result().sequences
again = sampler.sample(prompt, 3, params).result().sequences
assert [list(s.tokens) for s in samples] == [list(s.tokens) for s in again]
for sample in samples:
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([9, 16, 10, *sample.tokens])).result()
    assert max(abs(a - b) for a, b in zip(scored[3:], sample.logprobs, strict=True)) < 1e-4
stopped = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=6, seed=3, stop=[samples[0].tokens[1]]))
assert len(stopped.result().sequences[0].tokens) <= 2

likeliest = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=6, top_k=1)).result().sequences
assert list(likeliest[0].tokens) == list(likeliest[1].tokens)

# Reinforcement learning on the samples, with each loss.
for loss in ("importance_sampling", "ppo", "gspo", "cispo", "dro"):
    rollouts = [
        datum(
            [9, 16, 10, *s.tokens],
            logprobs=[0.0, 0.0, *s.logprobs],
            advantages=[0.0, 0.0, *[float(i) - 1] * len(s.tokens)],
            **({"sequence_ratio_mask": [0.0, 0.0, *[1.0] * len(s.tokens)]} if loss == "gspo" else {}),
        )
        for i, s in enumerate(samples)
    ]
    training.forward_backward(rollouts, loss).result()
training.optim_step(adam).result()

# A model that is loaded from a checkpoint trains on as the saved one does.
path = training.save_state("one").result().path
copy = service.create_training_client_from_state_with_optimizer(path).result()
for model in (training, copy):
    model.forward_backward(data, "cross_entropy").result()
    model.optim_step(adam).result()
end = [model.forward(data, "cross_entropy").result().metrics["loss:sum"] for model in (training, copy)]
assert abs(end[0] - end[1]) < 1e-4 * abs(end[0]), end
weights = training.save_weights_for_sampler("two").result().path
loaded = service.create_sampling_client(model_path=weights).result()
score = loaded.compute_logprobs(types.ModelInput.from_ints(TEXTS[1])).result()
trained = training.forward([data[1]], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
assert max(abs(a - b) for a, b in zip(score[1:], trained, strict=True)) < 1e-4
base = service.create_sampling_client(base_model=MODEL).result()
assert base.compute_logprobs(types.ModelInput.from_ints(TEXTS[1])).result() != score

# Errors are the API's own kinds.
bad = tinker.BadRequestError
stable = "give the recipe loss_fn=importance_sampling or cispo"
refused(bad, stable, lambda: training.forward_backward(data, "stable_reinforce").result())
recording = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
refused(bad, stable, lambda: recording.sample(prompt, 1, params).result())
refused(bad, "vocabulary", lambda: training.forward_backward([datum([1, 10**6])], "cross_entropy").result())
refused(bad, "advantages is missing", lambda: training.forward_backward(data, "ppo").result())
refused(bad, "exists already", lambda: training.save_state("one").result())
refused(bad, "rank=77", lambda: service.create_lora_training_client(base_model=MODEL, rank=77).result())
refused(
    tinker.NotFoundError,
    "this server has",
    lambda: service.create_lora_training_client(base_model="another", rank=RANK).result(),
)
refused(
    tinker.NotFoundError,
    "no checkpoint",
    lambda: service.create_training_client_from_state("tinker://x/weights/none").result(),
)
refused(
    tinker.UnprocessableEntityError,
    "topk_prompt_logprobs",
    lambda: sampler.sample(prompt, 1, params, topk_prompt_logprobs=3).result(),
)
refused(
    tinker.AuthenticationError,
    "another key",
    lambda: tinker.ServiceClient(base_url=URL, api_key="tml-wrong-key").create_lora_training_client(MODEL),
)
training.forward([data[0]], "cross_entropy").result()  # the session goes on
service.close("success").result()
print("done")
