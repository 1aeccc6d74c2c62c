"""Muon for the matrices of the layers, and AdamW for all other weights: `optimizer.muon`.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by a
matrix near its polar factor, which Newton-Schulz iterations compute. Muon needs each matrix as a whole:

- Data parallelism: megatron-core's layer-wise layout puts every matrix into the shard of one rank. So
  Megatron's distributed optimizer works as with AdamW: reductions, masters, the gradient's norm, gathers of
  weights, and checkpoints that any layout can load.
- Tensor parallelism: the ranks gather the momentum's parts, and each computes the whole matrix.

A fused weight is several matrices: queries, their gates, keys and values; a gate and an up projection. Muon
updates each of them separately, as if it were stored separately. The order of a matrix's rows does not
matter, so the ranks' parts may follow each other in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_gvpo.core.collectives import all_gather_msgpack
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.sections import MuonConfig

# The usual value: matrices have an override only to be in groups of their own.
OVERRIDE = {"wd_mult": 1.0}
_FUSED = re.compile(r"(.*)\.(linear_qkv|linear_fc1)(?:\.adapter\.linear_out)?\.weight\d*")
# An update as large as AdamW's usual one, so that both take the same learning rate (arXiv:2502.16982, 2.2).
_LIKE_ADAMW = 0.2


def is_matrix(parameter: Tensor) -> bool:
    """Return True for weights that `mark_matrices` has marked."""
    return hasattr(parameter, "fused_rows")


def mark_matrices(chunk: torch.nn.Module) -> None:
    """Mark the weights of a chunk that Muon updates: the layers' trained matrices.

    Embeddings, heads, norms, biases, convolutions, and single rows such as a shared expert's gate are not.
    """
    for name, parameter in chunk.named_parameters():
        marked: Any = parameter
        is_expert = ".experts." in name
        is_vector = parameter.dim() != 2 or 1 in _whole_shape(marked, is_expert)
        if not parameter.requires_grad or is_vector or ".layers." not in f".{name}":
            continue
        marked.fused_rows, marked.is_expert = _fused_rows(chunk, name, parameter), is_expert


def _whole_shape(parameter: Any, is_expert: bool) -> list[int]:
    """The shape of a weight before tensor parallelism: a rank's part of an adapter's A may be one row."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= _parallel_group(is_expert).size()
    return shape


def _parallel_group(is_expert: bool) -> dist.ProcessGroup:
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _fused_rows(chunk: torch.nn.Module, name: str, parameter: Tensor) -> tuple[int, ...]:
    """Return the numbers of rows of the matrices in a fused weight; the pattern may repeat along the rows."""
    match = _FUSED.fullmatch(name)
    if match is None:
        return (len(parameter),)
    config: Any = chunk.get_submodule(match[1]).config
    if match[2] == "linear_fc1":
        parts = 2 if config.gated_linear_unit else 1
        return (len(parameter) // parts,) * parts
    size = config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups * size
    gates = [queries] if config.attention_output_gate else []
    return (queries, *gates, size, size)


def wrap(chunks: Sequence[Any], settings: DistributedDataParallelConfig) -> list[Any]:
    """Wrap the chunks for data parallelism, every marked matrix in one rank's shard; others as usual.

    Megatron-Bridge's own wrapping takes no layout. A collective; raises ConfigError on all ranks if none has
    a matrix to update.
    """
    _mark_all(chunks)
    wrapped = []
    stream = torch.cuda.Stream()  # a separate stream for the gradients' nodes, as in Megatron-Bridge
    stream.wait_stream(torch.cuda.current_stream())
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True).size()
    expert_ranks = parallel_state.get_expert_data_parallel_group().size()
    for number, chunk in enumerate(chunks):
        trained: list[Any] = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.is_managed_by_layer_wise_optimizer = is_matrix(parameter)
        # As in Megatron, only the first stage's first chunk has several buckets, to overlap their sums.
        is_first = number == 0 and parallel_state.get_pipeline_model_parallel_rank() == 0
        bucket = settings.bucket_size or max(40_000_000, 1_000_000 * ranks)
        layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
            trained,
            bucket if settings.overlap_grad_reduce and is_first else None,
            ranks,
            settings,
            expert_ranks,
        )
        with torch.cuda.stream(stream):
            wrapped.append(
                DistributedDataParallel(
                    config=get_model_config(chunk),
                    ddp_config=settings,
                    module=chunk,
                    disable_bucketing=number > 0,
                    full_param_layout=layout,
                )
            )
        for parameter in trained:  # with this mark, the distributed optimizer would not gather the weight
            del parameter.is_managed_by_layer_wise_optimizer
    torch.cuda.current_stream().wait_stream(stream)
    return wrapped


def _mark_all(chunks: Sequence[Any]) -> None:
    """Mark the matrices of all chunks. A collective; raises ConfigError on all ranks if none has a matrix."""
    for chunk in chunks:
        mark_matrices(chunk)
    has_matrix = any(is_matrix(parameter) for chunk in chunks for parameter in chunk.parameters())
    if not any(all_gather_msgpack(has_matrix)):
        raise ConfigError(
            "optimizer.muon has no effect: model.freeze leaves no matrix of the layers to train; leave one "
            "of the two out"
        )


class Muon(TensorParallelMuon):
    """megatron-core's Muon on the flat masters of a distributed optimizer, which are whole matrices."""

    def __init__(
        self, groups: list[dict[str, Any]], weights: dict[Tensor, Tensor], options: MuonConfig, bf16: bool
    ) -> None:
        """`groups`: of masters; `weights`: the model's weight of every master; `bf16`: iterate in bf16."""
        scale = {"adamw": "spectral"}.get(options.scale, options.scale)
        super().__init__(
            groups,
            momentum=options.momentum,
            nesterov=options.nesterov,
            num_ns_steps=options.steps,
            coefficient_type="simple",  # Jordan's: 3.4445, -4.7750, 2.0315
            scale_mode=scale,
            extra_scale_factor=_LIKE_ADAMW if options.scale == "adamw" else 1.0,
            fp32_matmul_prec="medium" if bf16 else "highest",
        )
        self._weights = weights

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1  # for checkpoints; Muon itself does not need it

    def orthogonalize(self, p: Tensor, grad: Tensor, **_: Any) -> Tensor:
        """Master and momentum, both flat, -> the update, flat, before the learning rate."""
        weight: Any = self._weights[p]
        rows, columns = weight.fused_rows, weight.shape[1]
        # each part is [repetitions, rows, columns]
        parts = grad.view(-1, sum(rows), columns).split(rows, dim=1)
        group = dim = None
        if getattr(weight, "tensor_model_parallel", False):
            dim, group = weight.partition_dim, _parallel_group(weight.is_expert)
        updates = [
            self.scaled_orthogonalize_fn(part.reshape(-1, columns), group, dim).view(part.shape)
            for part in parts
        ]
        return torch.cat(updates, dim=1).view(-1)


class MuonWithAdam:
    """The optimizer inside Megatron's distributed optimizer: Muon for its matrices, AdamW for the rest."""

    def __init__(self, distributed: Any, options: MuonConfig, bf16: bool) -> None:
        """Takes the groups of Muon from the AdamW inside of `distributed`."""
        adam = distributed.optimizer
        # Megatron relies on the order of these groups.
        self.param_groups: list[dict[str, Any]] = adam.param_groups
        weights = {
            self.param_groups[group]["params"][order]: weight
            for weight, (group, order) in distributed.model_param_group_index_map.items()
        }
        matrices, others = list[dict[str, Any]](), list[dict[str, Any]]()
        for group in self.param_groups:
            has_matrices = bool(group["params"]) and is_matrix(weights[group["params"][0]])
            (matrices if has_matrices else others).append(group)
        adam.param_groups = others
        self.parts: list[torch.optim.Optimizer] = [adam]
        if matrices:
            self.parts.append(Muon(matrices, weights, options, bf16))

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The moments of every master."""
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


def add_muon(megatron: Any, options: MuonConfig, bf16: bool) -> None:
    """Give every distributed optimizer in Megatron's chained one a Muon for its matrices."""
    for distributed in _not_empty(megatron):
        distributed.optimizer = MuonWithAdam(distributed, options, bf16)


def _not_empty(megatron: Any) -> Iterator[Any]:
    return (part for part in megatron.chained_optimizers if part.optimizer is not None)
