"""Log-probs, losses and gradients of requests equal those of `transformers` in fp64, under every layout.

The losses are written here anew, for one sequence after the other.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributed import launch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

RANK = 4
LAYOUTS = {
    "one rank": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "dp2, overlap": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
}
# The options of optim_step: with this eps, a gradient near 0 does not decide a step by its sign.
STEP = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 2.0}


def layouts(*first: str) -> list[Any]:
    """All layouts; those but `first` are proofs."""
    return [name if name in first else pytest.param(name, marks=pytest.mark.proof) for name in LAYOUTS]


def data_of(generator: torch.Generator) -> list[dict[str, Any]]:
    """Five sequences in two groups; not all targets are the next token of the input."""
    data = []
    for i, length in enumerate((7, 3, 11, 1, 9)):
        tokens = torch.randint(3, 20, (length + 1,), generator=generator).tolist()
        targets = tokens[1:]
        targets[0] = 4  # as tinker-cookbook pads: not what comes next in the input
        weights = (torch.rand(length, generator=generator) > 0.3).float()
        weights[-1] = 1
        data.append(
            {
                "tokens": tokens[:-1],
                "target_tokens": targets,
                "weights": weights.tolist(),
                "logprobs": (-3 + torch.randn(length, generator=generator) / 2).tolist(),
                "advantages": torch.randn(length, generator=generator).tolist(),
                "sequence_ratio_mask": weights.tolist(),
                "group": [i % 2],
                "reward": [float(torch.randn((), generator=generator))],
            }
        )
    return data


INPUTS = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "gpg": ("weights", "advantages"),
    "gvpo": ("weights", "logprobs", "group", "reward"),
}
CONFIGS = {
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "gspo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "dro": {"beta": 0.3},
    "gvpo": {"beta": 0.2},
}


def requests() -> dict[str, Any]:
    data = data_of(torch.Generator().manual_seed(3))
    return {
        name: {
            "loss": name,
            "config": CONFIGS.get(name, {}),
            "data": [{key: d[key] for key in ("tokens", "target_tokens", *inputs)} for d in data],
        }
        for name, inputs in INPUTS.items()
    }


# The reference: a list of log-probs, one tensor a sequence, and the inputs -> the loss.
Formula = Callable[[list[Tensor], list[dict[str, Tensor]], dict[str, float]], Tensor]


def per_token(term: Callable[[Tensor, dict[str, Tensor], dict[str, float]], Tensor]) -> Formula:
    return lambda logps, data, config: sum(
        (term(logp, d, config).sum() for logp, d in zip(logps, data, strict=True)), torch.zeros(())
    )


def rho(logp: Tensor, d: dict[str, Tensor]) -> Tensor:
    return torch.exp(logp - d["logprobs"])


def ppo(logp: Tensor, d: dict[str, Tensor], config: dict[str, float]) -> Tensor:
    return pessimistic(rho(logp, d), d["advantages"], config)


def pessimistic(ratio: Tensor, advantages: Tensor, config: dict[str, float]) -> Tensor:
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def gspo(logp: Tensor, d: dict[str, Tensor], config: dict[str, float]) -> Tensor:
    """arXiv 2507.18071, equations 14 and 15: sg[s] pi / sg[pi], with s the geometric mean of the ratios."""
    mask = d["sequence_ratio_mask"]
    s = ((rho(logp, d).log() * mask).sum() / mask.sum()).exp().detach()
    return pessimistic(s * logp.exp() / logp.exp().detach(), d["advantages"], config)


def gpg(logps: list[Tensor], data: list[dict[str, Tensor]], config: dict[str, float]) -> Tensor:
    tokens = sum(int((d["weights"] != 0).sum()) for d in data)
    terms = ((logp * d["advantages"])[d["weights"] != 0].sum() for logp, d in zip(logps, data, strict=True))
    return -sum(terms, torch.zeros(())) / tokens


def gvpo(logps: list[Tensor], data: list[dict[str, Tensor]], config: dict[str, float]) -> Tensor:
    """arXiv 2504.19599, equation 8: within a group, 1 / (2 (k - 1)) sum (beta (d - dbar) - (R - Rbar))^2."""
    ratios = [((logp - d["logprobs"])[d["weights"] != 0]).sum() for logp, d in zip(logps, data, strict=True)]
    groups: dict[int, list[int]] = {}
    for i, d in enumerate(data):
        groups.setdefault(int(d["group"]), []).append(i)
    total = torch.zeros(())
    for members in groups.values():
        ratio = torch.stack([ratios[i] for i in members])
        reward = torch.stack([data[i]["reward"].squeeze() for i in members])
        error = config["beta"] * (ratio - ratio.mean()) - (reward - reward.mean())
        total = total + (error**2).sum() / (2 * (len(members) - 1))
    return total / len(groups)


FORMULAS: dict[str, Formula] = {
    "cross_entropy": per_token(lambda logp, d, _: -logp * d["weights"]),
    "importance_sampling": per_token(lambda logp, d, _: -rho(logp, d) * d["advantages"]),
    "ppo": per_token(ppo),
    "gspo": per_token(gspo),
    "cispo": per_token(lambda logp, d, _: -rho(logp, d).clamp(0.8, 1.2).detach() * d["advantages"] * logp),
    "dro": per_token(
        lambda logp, d, c: -(logp * d["advantages"] - c["beta"] / 2 * (logp - d["logprobs"]) ** 2)
    ),
    "gpg": gpg,
    "gvpo": gvpo,
}


def reference(model: Any, request: dict[str, Any]) -> tuple[list[Tensor], float, dict[str, Tensor]]:
    """(log-probs, loss, gradients by name) by transformers."""
    model.zero_grad()
    logps, columns = [], []
    for datum in request["data"]:
        logits = model(torch.tensor([datum["tokens"]])).logits[0]
        targets = torch.tensor(datum["target_tokens"])[:, None]
        logps.append(logits.log_softmax(-1).gather(1, targets).squeeze(1))
        columns.append(
            {k: torch.tensor(v, dtype=torch.float32).double() for k, v in datum.items() if k != "tokens"}
        )
    loss = FORMULAS[request["loss"]](logps, columns, request["config"])
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [logp.detach() for logp in logps], float(loss), gradients


def after_a_step(model: Any) -> list[Tensor]:
    """Log-probs after one update of torch's AdamW; Megatron does not decay norms and biases."""
    request = requests()["cross_entropy"]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": STEP["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        **{"lr": STEP["lr"], "betas": tuple(STEP["betas"]), "eps": STEP["eps"]},
    )
    reference(model, request)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), STEP["clip_grad"]) > STEP["clip_grad"]
    optimizer.step()
    return reference(model, request)[0]


def results_of(
    task: Path, directory: Path, layout: str, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> dict[str, Any]:
    monkeypatch.setenv("TINKER_TEST_KEY", "tml-a-key-of-tests")
    ranks, parallel = LAYOUTS[layout]
    work = {
        "model": str(task / "model"),
        "layout": parallel,
        "requests": requests(),
        "more": more,
        "step": STEP,
    }
    (directory / "work.json").write_text(json.dumps(work))
    launch("helpers.workers.tinker_worker:run", [ranks], str(directory))
    return torch.load(directory / "results.pt")


def near(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """By the relative distance. Only below 1e-4, where no gradient here is, by the absolute one."""
    actual, expected = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    assert (actual - expected).norm() <= tolerance * max(1e-4, float(expected.norm()))


@torch.no_grad()
def check_cold_samples(cold: dict[str, Any], model: Any) -> None:
    """Log-probs of samples are at the temperature of their request, 0.5; those of its prompt are at 1."""
    prompt = cold["prompt"]
    for tokens, logps, _ in cold["sequences"]:
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, :-1]
        targets = torch.tensor([*prompt[1:], *tokens])[:, None]
        at_1, at_half = (
            (logits / temperature).log_softmax(-1).gather(1, targets).squeeze(1) for temperature in (1, 0.5)
        )
        near(logps, at_half[len(prompt) - 1 :])
        near(cold["prompt_logprobs"][1:], at_1[: len(prompt) - 1])
        assert (at_1 - at_half).abs().min() > 1e-3


def check_life(updated: dict[str, Any]) -> None:
    """Models that take turns do not disturb each other, and a loaded model goes on as the saved one."""
    near(updated["first"], updated["alone"])
    near(updated["scored before its step"], updated["second"])
    assert max(abs(a - b) for a, b in zip(updated["first"], updated["second"], strict=True)) > 1e-4
    near(updated["copy"], updated["first"])
    near(updated["weights"], updated["first"])
    near(updated["copy later"], updated["first later"])
    assert max(abs(a - b) for a, b in zip(updated["first later"], updated["first"], strict=True)) > 1e-4
    gone, replaced, unreadable, unloaded, infinite = updated["refusals"]
    assert updated["full disk"] == ["cannot write", "No space left on device", "one"]
    assert "weights are gone" in gone and "was saved again" in replaced and "cannot read" in unreadable
    assert "there is no model first" in unloaded and "the gradient is not finite" in infinite
    near(updated["copy at the end"], updated["copy later"])
    near(updated["second at the end"], updated["second"])
    engine, trainer = updated["sampled"]
    for sampled, trained in zip(engine, trainer, strict=True):
        near(sampled, trained)


@pytest.mark.parametrize("layout", layouts("one rank", "tp2", "dp2, overlap"))
def test_each_loss_has_the_gradient_of_transformers(
    layout: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = results_of(task, tmp_path, layout, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float64)
    for name, request in requests().items():
        logps, loss, gradients = reference(model, request)
        near(torch.cat([torch.tensor(part) for part in results[name]["logprobs"]]), torch.cat(logps))
        near(results[name]["loss"], loss)
        exported = results[name]["gradients"]
        assert exported.keys() >= gradients.keys()
        for key, gradient in gradients.items():
            near(exported[key], gradient)
    check_cold_samples(results["cold"], model)
    check_life(results["updated"])
    near(results["updated"]["second"], torch.cat(after_a_step(model)))


@pytest.mark.parametrize("layout", layouts("one rank"))
def test_adapters_have_the_gradient_of_transformers(
    layout: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With B = 0: dL/dB = (alpha / rank) dL/dW A^T, and dL/dA = 0 (arXiv 2106.09685)."""
    more = {"model": {"adapter": {"rank": RANK, "alpha": 2 * RANK}}}
    results = results_of(task, tmp_path, layout, monkeypatch, **more)
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float64)
    for name, request in requests().items():
        _, loss, gradients = reference(model, request)
        near(results[name]["loss"], loss)
        adapters, exported = results[name]["adapters"], results[name]["gradients"]
        layers = [key.removesuffix("lora_B.weight") for key in exported if key.endswith("lora_B.weight")]
        assert layers
        for layer in layers:
            weight = gradients[layer.removeprefix("base_model.model.") + "weight"]
            near(exported[f"{layer}lora_B.weight"], 2 * weight @ adapters[f"{layer}lora_A.weight"].double().T)
            assert not exported[f"{layer}lora_A.weight"].any()
    check_life(results["updated"])


def test_a_checkpoint_is_loaded_by_a_server_of_the_same_function_alone(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors fit another alpha and another rope_theta too, with which they are another model.

    What is saved for a sampler, of all weights, is a directory from which an engine can start.
    """
    monkeypatch.setenv("TINKER_TEST_KEY", "tml-a-key-of-tests")
    rotated = tmp_path / "rotated"
    shutil.copytree(task / "model", rotated)
    card = json.loads((rotated / "config.json").read_text())
    (card.get("rope_parameters") or card)["rope_theta"] = 777.0
    (rotated / "config.json").write_text(json.dumps(card))
    full_model, turned = {"path": str(task / "model")}, {"path": str(rotated)}
    adapted, halved = (
        {**full_model, "adapter": {"rank": RANK, "alpha": alpha}} for alpha in (2 * RANK, RANK)
    )
    pairs = [(adapted, halved), (adapted, adapted), (full_model, turned)]
    (tmp_path / "work.json").write_text(json.dumps(pairs))
    launch("helpers.workers.tinker_worker:restart", [1], str(tmp_path))
    by_alpha, same, by_rotation = json.loads((tmp_path / "refusals.json").read_text())
    assert all("alpha=8" in refusal and "model.adapter has 4" in refusal for refusal in by_alpha)
    assert all("rope_theta" in refusal and "777" in refusal for refusal in by_rotation)
    assert same == ["", ""]
    [exported] = tmp_path.rglob("sampler_weights/one/hf")
    assert load_file(next(exported.glob("*.safetensors")))
    assert AutoTokenizer.from_pretrained(exported)("1")["input_ids"]
    generation = (task / "model" / "generation_config.json").read_text()
    assert (exported / "generation_config.json").read_text() == generation
