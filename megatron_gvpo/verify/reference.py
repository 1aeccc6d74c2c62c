"""The side of transformers: a model in fp64, its log-probs and one update, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from megatron_gvpo.types import TrainBatch


class Exact(TorchFunctionMode):
    """Context in which code that asks for float32 gets float64.

    transformers computes norms, softmax and linear attention in float32, whatever the model's dtype.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        kwargs = {name: torch.float64 if v is torch.float32 else v for name, v in (kwargs or {}).items()}
        return func(*(torch.float64 if arg is torch.float32 else arg for arg in args), **kwargs)


def load(directory: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Load the checkpoint in `directory` as a transformers model, with plain attention and experts.

    Values that transformers has in float32 in every precision, such as the frequencies of rotary embeddings,
    are not rounded further, and not computed again in float64.
    """
    loaded = torch.float32 if dtype == torch.float64 else dtype
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=loaded, experts_implementation="eager", attn_implementation="eager"
    )
    return (model.double() if dtype == torch.float64 else model).eval()


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Context in which a model from `load` computes in float32."""
    model.float()
    yield
    model.double()


def as_in_file(model: Any, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that have the names and shapes of `model`'s parameters as they are in its checkpoints.

    transformers keeps some weights in another form in memory, such as all experts of a layer in one tensor.
    The tensors may be gradients.
    """
    return dict(revert_weight_conversion(model, dict(named)))


def log_probs(model: Any, rows: TrainBatch, temperature: float) -> list[Tensor]:
    """Return the log-probs of every row's response tokens, one forward a row."""
    rows_logp = []
    for prompt, response in zip(rows.prompt_ids, rows.response_ids, strict=True):
        rows_logp.append(response_log_probs(model, prompt, response, temperature))
    return rows_logp


def response_log_probs(
    model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> Tensor:
    """Return the log-probs [tokens] of `response` after `prompt`."""
    logp_rv = all_log_probs(model, prompt, response, temperature)
    return logp_rv.gather(1, torch.tensor(response)[:, None])[:, 0]


def all_log_probs(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """Return the log-probs [tokens, vocabulary] of all tokens in the places of `response` after `prompt`."""
    exact = next(model.parameters()).dtype == torch.float64
    with Exact() if exact else nullcontext():
        logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)


def clipped_adamw(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], norm: float, options: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the weights after one step of torch's AdamW, with gradients clipped to `options["clip_grad"]`.

    `norm`: the norm of all gradients. Norms and biases (vectors) do not decay. The other options are AdamW's.
    """
    updated = {name: weight.detach().clone() for name, weight in weights.items()}
    scale = min(1.0, options["clip_grad"] / norm)
    for name, weight in updated.items():
        weight.grad = gradients[name] * scale
    vectors = [w for name, w in updated.items() if w.dim() == 1 or name.endswith("bias")]
    matrices = [w for w in updated.values() if all(w is not vector for vector in vectors)]
    adam = {key: options[key] for key in ("lr", "eps", "betas", "weight_decay")}
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, **adam).step()
    return {name: weight.detach() for name, weight in updated.items()}
