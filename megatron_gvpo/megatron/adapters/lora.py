"""Low-rank adapters on a model whose own weights stay as they are, by Megatron-Bridge's PEFT.

`Adapters.apply` runs after the base's weights are loaded and before Megatron wraps the chunks. New adapters
have the same values under every parallel layout: each tensor is drawn from a generator of its own, which its
Hugging Face name seeds.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.core.collectives import all_ranks_agree
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.megatron.adapters.directory import (
    adapter_config,
    compare_names,
    read_adapter,
    write_adapter,
)
from megatron_gvpo.megatron.adapters.tensors import (
    MARK,
    MergeRounding,
    export_tensors,
    is_adapter,
    layer_of,
    place_tensors,
)
from megatron_gvpo.megatron.frozen import ask_for_gradient
from megatron_gvpo.runs.record import fingerprint
from megatron_gvpo.settings.adapter import FUSED_NAMES, MEGATRON_NAMES, TARGETS, AdapterConfig
from megatron_gvpo.settings.sections import ModelConfig

_PREFIX = "base_model.model."  # begins every tensor's name in Hugging Face PEFT files


class Adapters:
    """The adapters of one model on this rank."""

    def __init__(
        self,
        options: AdapterConfig,
        selected: tuple[str, ...],
        base: str,
        seed: int,
        bridge: Any,
        rounds: bool = False,
    ) -> None:
        """`selected`: Hugging Face's names of the linear layers with adapters; `base`: the model's directory.

        `seed`: of new adapters; `bridge`: Megatron-Bridge's AutoBridge, which must be imported; `rounds`:
        the weights have fewer digits than float32, so that merging loses some.
        """
        from megatron.bridge.peft.utils import create_peft

        self.options, self.selected, self.base = options, selected, base
        self._seed = seed
        self._bridge = bridge
        self._rounds = rounds
        self._warned = False
        self._chunks: list[Any] = []
        self._base_files: dict[str, Any] | None = None  # see `identity`
        self._peft = create_peft(
            {
                "type": options.type,
                "dim": options.rank,
                "alpha": options.alpha,
                "target_modules": _megatron_targets(options.type, selected),
                "share_expert_adapters": False,  # servers and Hugging Face load one adapter an expert
            }
        )

    def apply(self, chunks: list[Any], trained: bool) -> list[Any]:
        """Put adapters on loaded, unwrapped chunks; `trained`: they, and nothing else, get gradients.

        A collective. Raises ConfigError on all ranks if the directory `path` does not have exactly these
        adapters.
        """
        self._chunks = self._peft(chunks, training=trained)
        for chunk in self._chunks:
            for name, parameter in chunk.named_parameters():
                if is_adapter(name) and not self._is_selected(name):
                    parameter.requires_grad_(False)
            _store_gate_and_up_apart(chunk)
            _gather_by_adapters(chunk)
            # Modules that are computed again in the backward pass lose their gradients without an error if
            # nothing that enters them needs one, such as the first layer's MLP with adapters in MLPs only.
            if hasattr(chunk, "embedding"):
                chunk.embedding.register_forward_hook(ask_for_gradient)
        self._fill()
        return self._chunks

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the adapters have no effect: the model is the base model."""
        self._peft.disable_adapter_layers(self._chunks)
        try:
            yield
        finally:
            self._peft.enable_adapter_layers(self._chunks)

    def tensors(self, on_host: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face PEFT's name, full tensor in the model's dtype) in a fixed order.

        A collective: every rank must iterate to the end, and gets every tensor. The caller waits for pending
        gathers of weights first (`Model.finish_param_gather`).
        """
        for name, tensor in export_tensors(self._bridge, self._chunks, on_host):
            if layer_of(name) in self.selected:
                yield _PREFIX + name, tensor

    def merged(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of `stream`, Megatron-Bridge's export of the base, with the adapters merged in.

        Megatron-Bridge (0.6.2) merges wrong adapters into experts that another rank holds. A product is
        computed in fp32. Logs a warning, once, if rounding takes most of the adapters' change away. This is a
        collective, because `stream` is one.
        """
        adapters = dict(export_tensors(self._bridge, self._chunks, on_host=False))
        rounding, scale = MergeRounding(), self.options.alpha / self.options.rank
        for name, weight in stream:
            name = name.replace(".base_layer.", ".")
            stem = name.removesuffix(".weight")
            if (a := adapters.get(f"{stem}.lora_A.weight")) is None:
                yield name, weight
                continue
            b = adapters[f"{stem}.lora_B.weight"]
            change = scale * (b.to(weight.device).float() @ a.to(weight.device).float())
            merged = (weight.float() + change).to(weight.dtype)
            if self._rounds:
                rounding.add(weight, merged, change)
            yield name, merged
        if not self._warned and dist.get_rank() == 0:
            self._warned = rounding.warn()

    def config(self) -> dict[str, Any]:
        """Return the content of Hugging Face PEFT's adapter_config.json, as JSON values."""
        return adapter_config(self.options, self.selected, self.base)

    def identity(self) -> dict[str, Any]:
        """Return a checkpoint's record of these adapters: their settings and the base, as JSON values.

        The base is identified by size and hash of its config.json and weights on rank 0, and by None on other
        ranks.
        """
        if self._base_files is None and dist.get_rank() == 0:
            self._base_files = fingerprint(Path(self.base), ("config.json", "*.safetensors"))
        settings = self.options.model_dump(mode="json", include={"type", "rank", "alpha"})
        return {**settings, "layers": list(self.selected), "base": self._base_files}

    def save(self, directory: Path) -> None:
        """Write the adapters as Hugging Face PEFT does. A collective; rank 0 writes.

        If rank 0 cannot write, only rank 0 raises OSError or SafetensorError, after the last gather.
        """
        tensors = {}
        for name, tensor in self.tensors():
            if dist.get_rank() == 0:
                tensors[name] = tensor.clone().contiguous()
        if dist.get_rank() == 0:
            write_adapter(directory, self.config(), tensors)

    def _is_selected(self, name: str) -> bool:
        """Return False for one of q, k and v, or of gate and up, that the user has not named.

        Megatron-Bridge's canonical LoRA needs all parts of a layer. The other parts stay 0.
        """
        part = name.split(MARK)[1].split(".")[0]  # adapter_q, adapter_up, ..., or linear_in for a whole layer
        return not part.startswith("adapter_") or f"{part.removeprefix('adapter_')}_proj" in self.selected

    def _fill(self) -> None:
        """Set the first values: those of the directory `path`, or A as PEFT draws it and B = 0."""
        path, stored = self.options.path, dict[str, Tensor]()
        if path is not None:
            with all_ranks_agree(ConfigError):
                stored = read_adapter(Path(path), self.options, self.selected)
        known: set[str] = set()

        def value(name: str, shape: tuple[int, ...]) -> Tensor | None:
            if layer_of(name) not in self.selected:
                return torch.zeros(shape)
            known.add(_PREFIX + name)
            return self._drawn(name, shape) if path is None else stored.get(_PREFIX + name)

        with all_ranks_agree(ConfigError):
            self._refuse_half_of_a_shared_adapter()
            problem = place_tensors(self._bridge, self._chunks, value, is_drawn=path is None)
            if path is not None:
                where = f"model.adapter.path={path}"
                problem = compare_names(known, set(stored), where) or (problem and f"{where}: {problem}")
            if problem is not None:
                raise ConfigError(problem)

    def _refuse_half_of_a_shared_adapter(self) -> None:
        """Refuse adapters of an expert's gate without up, or up without gate, where the two share one.

        Megatron-Bridge (0.6.2) has one adapter for both in grouped experts, which GPU runs have. The half
        that is not selected would train, and be in merged weights, but not in the exported adapter.
        """
        names = [name for chunk in self._chunks for name, _ in chunk.named_parameters()]
        is_shared = any(f".experts.linear_fc1{MARK}" in name for name in names)
        if is_shared and len({"gate_proj", "up_proj"} & set(self.selected)) == 1:
            raise ConfigError(
                "model.adapter.targets: gate_proj and up_proj of experts have one adapter on GPUs: name both "
                "or neither"
            )

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return first values: A uniform within 1 / sqrt(columns), as PEFT does, and B = 0."""
        if not name.endswith(".lora_A.weight"):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        return torch.empty(shape).uniform_(-1, 1, generator=generator) / math.sqrt(shape[-1])


def make_adapters(model: ModelConfig, hf_config: Any, seed: int, bridge: Any) -> Adapters | None:
    """Return the adapters of `model.adapter`, not yet applied, or None."""
    if model.adapter is None:
        return None
    possible = next((TARGETS[name] for name in hf_config.architectures or () if name in TARGETS), ())
    selected, rounds = model.adapter.selected(possible), model.dtype != "float32"
    return Adapters(model.adapter, selected, model.path, seed, bridge, rounds)


def _megatron_targets(kind: str, selected: tuple[str, ...]) -> list[str]:
    """Return megatron-core's names of the layers, with all parts of those that it fuses."""
    fused = {name for name, parts in FUSED_NAMES.items() if set(parts) & set(selected)}
    parts = {part for name in fused for part in FUSED_NAMES[name]}
    others = {MEGATRON_NAMES[name] for name in selected if name not in parts}
    return sorted(others | (fused if kind == "lora" else {MEGATRON_NAMES[part] for part in parts}))


def _gather_by_adapters(chunk: Any) -> None:
    """Let adapters behind a norm gather their input themselves, under sequence parallelism.

    Transformer Engine's layers can give them the norm's output gathered already. Its backward (2.20.2) then
    leaves out the gradient of that output: all weights before it would train without the adapter's part
    (docs/explanation/audit.md).
    """
    for module in chunk.modules():
        layer: Any = getattr(module, "to_wrap", None)
        if getattr(layer, "return_layernorm_output_gathered", False):
            layer.return_layernorm_output_gathered = False
            for adapter in module.adapter.modules():
                if hasattr(adapter, "disable_sequence_parallel_comm"):
                    adapter.disable_sequence_parallel_comm = False


def _store_gate_and_up_apart(chunk: Any) -> None:
    """Make checkpoints store the adapters of gate and of up as separate plain matrices.

    Megatron-Bridge (0.6.2) takes each for a fused gate-and-up matrix, by its layer's name, and cuts it in
    halves. Under another size of tensor parallelism its rows would come back in another order.
    """
    for name, module in chunk.named_modules():
        if name.endswith((".adapter_gate", ".adapter_up")):
            module.base_linear_name = module.base_linear_name.replace("linear_fc1", name.rpartition(".")[2])
