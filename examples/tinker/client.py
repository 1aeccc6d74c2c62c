"""A training loop by the Tinker SDK on `megatron-gvpo serve --tinker`: supervised steps, then GVPO.

    python examples/tinker/client.py http://127.0.0.1:8000 runs/quickstart/task/model

The environment has the package `tinker` and torch (tools/tinker/make_env.sh), and the key in TINKER_API_KEY.
"""

from __future__ import annotations

import sys

import tinker
import torch
from tinker import types

RANK = 32  # of the adapters: the server's model.adapter.rank
GROUP_SIZE = 8


def supervised(tokens: list[int], prompt: int) -> types.Datum:
    """Return a sequence for supervised learning of its tokens after the first `prompt`."""
    weights = torch.ones(len(tokens) - 1)
    weights[: prompt - 1] = 0
    inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def rollout(prompt: list[int], sample: types.SampledSequence, group: int, reward: float) -> types.Datum:
    """Return a sampled response in the form that the server's loss `gvpo` reads."""
    datum = supervised([*prompt, *sample.tokens], len(prompt))
    assert sample.logprobs is not None
    own = {
        "logprobs": torch.tensor([0.0] * (len(prompt) - 1) + list(sample.logprobs)),
        "group": torch.tensor([group]),
        "reward": torch.tensor([reward]),
    }
    return types.Datum(model_input=datum.model_input, loss_fn_inputs={**datum.loss_fn_inputs, **own})


def reward_of(tokens: list[int]) -> float:
    """Return the reward of a response, here the share of different tokens in it."""
    return len(set(tokens)) / len(tokens)


def main(url: str, model: str) -> None:
    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client(base_model=model, rank=RANK).result()
    adam = types.AdamParams(learning_rate=1e-3)

    prompts = [[9, 16, 10], [7, 19, 8], [12, 3, 4]]
    texts = [supervised([*prompt, 5, 6, 5, 6], len(prompt)) for prompt in prompts]
    for step in range(3):
        passed = training.forward_backward(texts, "cross_entropy")
        updated = training.optim_step(adam)
        updated.result()
        print(f"supervised step {step}: loss {passed.result().metrics['loss:sum']:.3f}")

    sampling = types.SamplingParams(max_tokens=8)
    for step in range(3):
        sampler = training.save_weights_and_get_sampling_client().result()
        futures = [sampler.sample(types.ModelInput.from_ints(p), GROUP_SIZE, sampling) for p in prompts]
        data = [
            rollout(prompt, sample, group, reward_of(sample.tokens))
            for group, (prompt, future) in enumerate(zip(prompts, futures, strict=True))
            for sample in future.result().sequences
        ]
        passed = training.forward_backward(data, "gvpo", {"beta": 0.1})
        training.optim_step(adam).result()
        mean = sum(float(datum.loss_fn_inputs["reward"].data[0]) for datum in data) / len(data)
        print(f"GVPO step {step}: mean reward {mean:.3f}, loss {passed.result().metrics['loss:sum']:.4f}")

    print("saved", training.save_weights_for_sampler("last").result().path)
    service.close("success").result()


if __name__ == "__main__":
    main(*sys.argv[1:])
