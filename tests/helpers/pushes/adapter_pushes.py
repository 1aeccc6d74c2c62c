"""Adapters made by Hugging Face PEFT, which are pushed to real servers as in a run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.servers.real_servers import receiver
from megatron_gvpo.huggingface.adapter_layers import adapted_layers, adapter_shapes
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.complete_weights import stored_tensors
from megatron_gvpo.servers.leader import BackgroundLoop, Push, Wait
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.servers import WeightSyncConfig
from megatron_gvpo.weights.adapter import Adapter
from megatron_gvpo.weights.publisher import Publisher
from megatron_gvpo.weights.transport import PushSettings

RANK, ALPHA = 4, 6
ADAPTERS = (f"model.adapter={{rank: {RANK}, alpha: {ALPHA}}}", "rollout.weights.transport=adapter")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    model: Path, out: Path, seed: int, rank: int = RANK, layers: Sequence[str] = ALL, alpha: int = ALPHA
) -> Path:
    """Write an adapter of random numbers, which changes log-probs by tenths of nats; returns `out`."""
    with warnings.catch_warnings(action="ignore"):
        from peft import LoraConfig, get_peft_model

        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        options = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(layers), task_type="CAUSAL_LM")
        adapted = get_peft_model(base, options)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        adapted.save_pretrained(out)
    return out


def adapted_logprobs(
    model: Path, adapter: Path, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the response's tokens by PEFT, in fp32."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(adapter))
    with torch.no_grad():
        logits = adapted(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, torch.tensor(response)[:, None]).squeeze(1)


class AdapterRun:
    """A run's pushes to the servers of a pool, with adapters from files in place of the trainer's."""

    def __init__(self, config: Config, pool: ServerPool, loop: BackgroundLoop) -> None:
        self._pool = pool
        self.messages: list[str] = []
        stored = {
            name: tensor.shape
            for name, tensor in stored_tensors(Path(config.model.path), "model.path").items()
        }
        assert config.model.adapter is not None
        cards = ModelCards(config)
        layers = adapted_layers(config.model, cards.policy)
        expected, optional = adapter_shapes(stored, layers, config.model.adapter.rank)
        settings = PushSettings.of(
            config.model, config.rollout, config.output_dir, cards, torch.device("cpu")
        )
        transport = Adapter.create(settings, partial(receiver, transport="adapter"))
        self._publisher = Publisher(
            pool,
            loop,
            transport,
            WeightSyncConfig(transport="adapter", bucket_mb=1, in_flight=config.rollout.weights.in_flight),
            dtype=torch.float32,
            device=torch.device("cpu"),
            expected=expected,
            optional=optional,
            fp8=None,
            colocated=False,
            report=self.messages.append,
        )

    def push(self, adapter: Path, version: int) -> float:
        """Push until every healthy server has the adapter; returns the bytes that each got."""
        while not all(handle.has(version) for handle in self._pool.handles):
            command = self._publisher.next_command(version)
            if isinstance(command, Push):
                tensors = load_file(adapter / "adapter_model.safetensors")
                self._publisher.attempt(iter(tensors.items()), version)
            else:
                assert isinstance(command, Wait), command
        return self._publisher.metrics["sync/bytes"]

    def close(self) -> None:
        self._publisher.close()
