"""TRL's own losses on given log-probs, in an environment that has TRL: python trl_worker.py IN.pt OUT.pt

The trainers' loss methods run unchanged. Tables of log-probs replace the model, and the accelerator has one
process.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import DPOTrainer, GRPOTrainer, RLOOTrainer

ONE_PROCESS = SimpleNamespace(
    num_processes=1,
    device="cpu",
    sync_gradients=True,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
)


def trainer(kind: type, logp: torch.Tensor, **settings: Any) -> Any:
    """A trainer without a model, which has the attributes that its loss method reads."""
    self = object.__new__(kind)
    settings = {
        "model": SimpleNamespace(training=True),
        "accelerator": ONE_PROCESS,
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "current_gradient_accumulation_steps": 1,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logp, torch.zeros_like(logp), None),
        **settings,
    }
    for name, value in settings.items():
        object.__setattr__(self, name, value)
    return self


def importance_ratio(settings: dict[str, Any], data: dict[str, torch.Tensor]) -> torch.Tensor:
    """TRL's weights for the engine's samples.

    TRL computes them in the method that also generates: the statement that does so is taken from its source.
    """
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    mode = "vllm_importance_sampling_mode"
    (statement,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and "vllm_importance_sampling_correction" in ast.unparse(node.test)
        and mode in ast.unparse(node)
    ]
    names = {
        "self": SimpleNamespace(**settings),
        "completion_mask": data["mask"],
        "tool_mask": None,
        "old_per_token_logps": data["old"],
        "sampling_per_token_logps": data["engine"],
        "math": math,
        "torch": torch,
    }
    exec(compile(ast.Module([statement], []), "trl", "exec"), names)
    ratio: torch.Tensor = names["vllm_importance_sampling_ratio"]
    return ratio


def policy_loss(case: dict[str, Any], data: dict[str, torch.Tensor], logp: torch.Tensor) -> torch.Tensor:
    defaults = {
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "_entropy_bonus_enabled": False,
        "max_completion_length": 10,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
    }
    kind = RLOOTrainer if case["kind"] == "rloo" else GRPOTrainer
    self = trainer(kind, logp, **(defaults | case["settings"]))
    mask = data["mask"]
    if case["settings"].get("use_vllm"):
        data = data | {"importance": importance_ratio(case["settings"], data)}
    inputs = {
        "importance_sampling_ratio": data.get("importance"),
        "prompt_ids": torch.zeros(len(mask), 1),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": case["advantages"],
        "old_per_token_logps": data["old"],
        "old_logps": (data["old"] * mask).sum(1),
        "ref_per_token_logps": data["ref"],
        "num_items_in_batch": mask.sum(),
    }
    return kind._compute_loss(self, None, inputs)


def dpo_loss(case: dict[str, Any], data: dict[str, torch.Tensor], logp: torch.Tensor) -> torch.Tensor:
    order = case["order"]  # rows of the chosen, then of the rejected
    mask = data["mask"][order]
    unused = torch.zeros_like(mask)
    outputs = SimpleNamespace(
        log_probs=logp[order] * mask, entropy=unused, mean_logits=unused, is_top1=unused.bool()
    )
    ref = (data["ref"][order] * mask).sum(1)
    self = trainer(
        DPOTrainer,
        logp,
        ld_alpha=None,
        precompute_ref_logps=True,
        beta=case["beta"],
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        label_smoothing=0.0,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        args=SimpleNamespace(),
    )
    complete = torch.cat([torch.zeros(len(mask), 1), mask], dim=1)
    half = len(order) // 2
    inputs = {
        "input_ids": torch.zeros_like(complete, dtype=torch.int64),
        "attention_mask": complete,
        "completion_mask": complete,
        "ref_chosen_logps": ref[:half],
        "ref_rejected_logps": ref[half:],
    }
    loss = DPOTrainer._compute_loss(self, lambda **_: outputs, inputs, return_outputs=False)
    return loss[0] if isinstance(loss, tuple) else loss


def main() -> None:
    results = {}
    for name, case in torch.load(sys.argv[1], weights_only=False).items():
        data = case["data"]
        logp = data["logp"].clone().requires_grad_()
        loss = (dpo_loss if case["kind"] == "dpo" else policy_loss)(case, data, logp)
        (gradient,) = torch.autograd.grad(loss, logp)
        results[name] = (float(loss), gradient)
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
