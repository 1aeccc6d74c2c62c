"""Runs micro-batches through Megatron's pipeline schedule: returns the loss function's results.

The fused head runs in GPTModel's `output_processor` hook. It gets the hidden states and this rank's shard of
the vocabulary, so full logits never exist.

The loss does not depend on the machine (design law 2). Every micro-batch's part is normalised by the
optimizer step's totals. The part is multiplied by the factor by which Megatron's schedule (cp /
micro-batches) and data-parallel average (1 / (cp x ranks)) will divide it. Under context parallelism every
rank of a group computes the whole loss from all log-probs, and sends back the gradient of its own tokens
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_gvpo.kernels.head import Backend
from megatron_gvpo.kernels.linear_logprob import LinearLogprob, linear_logprob
from megatron_gvpo.kernels.truncated_logprob import truncated_logprob
from megatron_gvpo.megatron.attention.core import OwnPackedSeqParams, frequencies
from megatron_gvpo.megatron.attention.merged import Sequences
from megatron_gvpo.megatron.attention.packed_layers import run_pre_hooks
from megatron_gvpo.megatron.attention.rotary import angles
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.megatron.memory_profile import MemoryProfile
from megatron_gvpo.megatron.model.model import Model, drop_leftovers
from megatron_gvpo.megatron.model.settings import offloaded_activations
from megatron_gvpo.megatron.parallel import device, megatron_device
from megatron_gvpo.megatron.pipeline import planned_messages
from megatron_gvpo.megatron.teacher_head import HeadDivergence
from megatron_gvpo.types import TrainBatch

# (rows of one micro-batch, the head's output) -> (its part of the step's loss, a result for the caller)
LossFunction = Callable[[TrainBatch, Any], tuple[Tensor, Any]]
# (hidden states [t, 1, h], GPTModel's output layer, tied weight or None, this rank's tokens) -> any output
Head = Callable[[Tensor, Any, Tensor | None, PackedBatch], Any]


def run(
    model: Model,
    micro_batches: Sequence[TrainBatch],
    loss_function: LossFunction,
    *,
    head: Head,
    forward_only: bool = False,
) -> list[Any]:
    """Run this rank's micro-batches through model and `head`; gradients accumulate in the DDP buffers.

    Returns the results of `loss_function`, one a micro-batch, on the last pipeline stage, and an empty list
    on the others. Raises ImageError on all ranks if a rank cannot read an image.
    """
    if model.vision is not None:
        model.vision.check(micro_batches)
    # Megatron multiplies by cp / micro-batches, and the average over ranks divides by `loss_factor`.
    scale = loss_factor() * len(micro_batches) / parallel_state.get_context_parallel_world_size()
    cp_group = parallel_state.get_context_parallel_group()

    def loss(rows: TrainBatch, output: Any) -> tuple[Tensor, Any]:
        part, result = loss_function(rows, output)
        return part * scale, result

    def packs() -> Iterator[PackedBatch]:
        for rows in micro_batches:
            pack = PackedBatch.pack(rows, model.padding, model.shares_prompts_of(rows))
            yield pack.cut(cp_group.size(), cp_group.rank())

    def forward_step(data: Iterator[PackedBatch], chunk: Any) -> tuple[Any, Callable[..., Any]]:
        batch = next(data).to(device())
        if model.replay is not None:
            model.replay.set_experts(chunk, batch.experts_t, sequence_parallel=model.config.sequence_parallel)
        return _call_chunk(model, chunk, batch, head), partial(loss, batch.rows)

    for chunk in model.chunks:
        chunk.train(not forward_only)
    if model.replay is not None:
        model.replay.begin(training=not forward_only)
    offloaded = offloaded_activations(model.chunks, forward_only)
    iterators, messages = _schedule_inputs(model, packs())
    with megatron_device(), torch.set_grad_enabled(not forward_only), offloaded:
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators,
            model=model.chunks,
            num_microbatches=len(micro_batches),
            seq_length=1,  # it is not used, because packs have their own lengths (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
            **messages,
        )
    drop_leftovers(model)
    return results


def _schedule_inputs(
    model: Model, packs: Iterator[PackedBatch]
) -> tuple[list[Iterator[PackedBatch]], dict[str, Any]]:
    """Return the packs for each chunk, and the arguments that describe the messages between stages."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return [packs], {}
    of_pass = list(packs)  # all packs are made first, because their lengths are the shapes of the messages
    lengths = [len(batch.token_t) for batch in of_pass]
    messages = planned_messages(model.config, lengths, len(model.chunks))
    return [iter(of_pass) for _ in model.chunks], messages


def loss_factor() -> float:
    """Return the factor by which `run` and Megatron's schedule multiply a micro-batch's part of the loss.

    The factor is cp x ranks, because the data-parallel average divides by it.
    """
    ranks = parallel_state.get_data_parallel_world_size() * parallel_state.get_context_parallel_world_size()
    return float(ranks)


def _call_chunk(model: Model, chunk: Any, batch: PackedBatch, head: Head) -> Any:
    """Run a micro-batch through the layers of one chunk; the last stage returns the head's output."""
    packed = _packed_params(model, batch)
    head_arguments = {"output_processor": _call_head, "output_processor_context": (head, batch)}
    if model.vision is not None:
        return model.vision.run(chunk, batch, packed, head_arguments)
    return chunk(
        input_ids=batch.token_t[None],
        position_ids=batch.position_t[None],
        attention_mask=None,
        packed_seq_params=packed,
        **head_arguments,
    )


def _call_head(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: Any, **_: Any
) -> Any:
    head, batch = context
    return head(hidden_states, output_layer, output_weight, batch)


@dataclass(frozen=True)
class LogprobHead:
    """hidden_states [t, 1, h] (t / tp under sequence parallelism) -> log-probs of the response tokens."""

    temperature: float
    vocab_size: int
    entropy: bool = False
    stash_bytes: int = 0
    memory_profile: MemoryProfile | None = None  # measures the head's memory
    divergence: HeadDivergence | None = None  # a term of the loss
    backend: Backend = "auto"

    def __call__(
        self, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, batch: PackedBatch
    ) -> LinearLogprob:
        hidden_rh = response_states(hidden_states, output_layer, batch)
        # A tied weight on the same stage belongs to the embedding, whose own call has waited for it.
        run_pre_hooks(output_layer)
        weight_vh = output_layer.weight if output_weight is None else output_weight
        if self.memory_profile is not None:
            self.memory_profile.enter_head()
        if self.divergence is None:
            local = self._logprob(hidden_rh, weight_vh, batch)
        else:
            local = self._with_divergence(self.divergence, hidden_rh, weight_vh, batch)
        if self.memory_profile is not None:
            self.memory_profile.leave_head()
            for out in (local.logp_r, local.surrogate, local.divergence):
                if out is not None and out.requires_grad:
                    out.register_hook(self.memory_profile.enter_head)
                    hidden_rh.register_hook(self.memory_profile.leave_head)

        def gather(local_r: Tensor | None) -> Tensor | None:
            return None if local_r is None else gather_context_parallel(local_r, batch)

        return local._replace(
            logp_r=gather_context_parallel(local.logp_r, batch),
            entropy_r=gather(local.entropy_r),
            divergence_r=gather(local.divergence_r),
        )

    def _logprob(self, hidden_rh: Tensor, weight_vh: Tensor, batch: PackedBatch) -> LinearLogprob:
        weight_r = batch.rows.weight_r
        # With weights, the head gives entropies no gradient.
        weight_r = None if weight_r is None or self.entropy else weight_r[batch.index_r]
        logprob = linear_logprob
        if batch.supports is not None:
            logprob = partial(truncated_logprob, supports=batch.supports)
        return logprob(
            hidden_rh,
            weight_vh,
            batch.label_r,
            temperature=self.temperature,
            weight_r=weight_r,
            entropy=self.entropy,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            vocab_size=self.vocab_size,
            stash_bytes=self.stash_bytes,
            backend=self.backend,
            upstream=loss_factor(),
        )

    def _with_divergence(
        self, options: HeadDivergence, hidden_rh: Tensor, weight_vh: Tensor, batch: PackedBatch
    ) -> LinearLogprob:
        result = options.of(
            hidden_rh, weight_vh, batch, self.temperature, self.vocab_size, upstream=loss_factor()
        )
        if options.alone and not self.entropy:
            local = LinearLogprob(result.logp_r, None, result.surrogate.new_zeros(()), "weights_first")
        else:
            local = self._logprob(hidden_rh, weight_vh, batch)
        return local._replace(divergence_r=result.divergence_r, divergence=result.surrogate)


def response_states(hidden_states: Tensor, output_layer: Any, batch: PackedBatch) -> Tensor:
    """Hidden states [t, 1, h] (t / tp under sequence parallelism) -> those that predict labels, [r, h].

    Their gradient is summed over the tensor-parallel ranks.
    """
    if output_layer.sequence_parallel:
        full_th = gather_from_sequence_parallel_region(hidden_states)  # backward: reduce-scatter
        return full_th.squeeze(1).index_select(0, batch.response_r)
    hidden_rh = hidden_states.squeeze(1).index_select(0, batch.response_r)
    return copy_to_tensor_model_parallel_region(hidden_rh)  # backward: all-reduce


def gather_context_parallel(local_r: Tensor, batch: PackedBatch) -> Tensor:
    """Gather the context-parallel ranks' values, and return those of all tokens of the pack, in row order.

    The other ranks' values are constants for autograd, because those ranks differentiate them.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return local_r
    padded_r = local_r.new_zeros(batch.rows.offsets[-1]).index_add(0, batch.index_r, local_r)
    others_r = padded_r.detach().clone()
    dist.all_reduce(others_r, group=parallel_state.get_context_parallel_group())
    return padded_r + (others_r - padded_r.detach())


def _packed_params(model: Model, batch: PackedBatch) -> PackedSeqParams:
    sequences = Sequences.of(batch.lengths, batch.followers, batch.token_t.device)
    ends, longest = sequences.all.ends, sequences.all.longest
    common: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    if model.config.context_parallel_size > 1:  # these lengths include the padding
        common |= {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends}
    if model.latent_rotary is not None:
        rotation = frequencies(model.latent_rotary, batch.positions, batch.position_t)
        return OwnPackedSeqParams(**common, sequences=sequences, latent_rotation=rotation)
    if not model.own_attention:
        return PackedSeqParams(**common)
    if not model.rotary:
        return OwnPackedSeqParams(**common, sequences=sequences)
    freqs_t, scale = frequencies(model.rotary[0], batch.positions, batch.position_t)
    angles_t = None
    if model.local:
        angles_t = angles(freqs_t, model.config.rotary_interleaved, scale)
    return OwnPackedSeqParams(
        **common, sequences=sequences, freqs_t=freqs_t, rotary_scale=scale, angles_t=angles_t
    )
