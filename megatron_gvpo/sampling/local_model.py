"""The embedded engine's model: a transformers model in this process, sampled by a plain decoding loop.

The loop replaces `model.generate`, which samples half as many tokens a second from ragged responses: here a
prompt is encoded once for its n samples, and finished rows leave the batch. Only one step's logits exist.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from megatron_gvpo.data.image_processor import ImageProcessor
from megatron_gvpo.groups import Image, Rollout
from megatron_gvpo.huggingface.end_tokens import StopStrings
from megatron_gvpo.huggingface.image_families import name_in_file, takes_images
from megatron_gvpo.kernels import onednn
from megatron_gvpo.sampling.draws import Draws
from megatron_gvpo.servers.request import Request, check_request
from megatron_gvpo.settings.sections import SamplingConfig


@dataclass(frozen=True)
class DecodingBatch:
    """The prompts, and later the sequences, of which each is a row of the model's next forward pass."""

    cache: KeyValueCache
    width: int  # columns of the prompts
    mask: Tensor  # [rows, columns of prompts and responses], 1 from the prompt's first token on
    shift: Tensor  # [rows], the position of a sampled token minus its column

    def select(self, rows: Tensor) -> DecodingBatch:
        """The batch of these rows, which the cache must have selected already."""
        return replace(self, mask=self.mask[rows], shift=self.shift[rows])


class LocalModel:
    """The architecture in `model_path`/config.json. It samples once `load` has given it weights.

    `batch_size` sequences are sampled at once. Every sequence has a random stream of its own, derived from
    its request's seed and its index among the n samples: the other requests change a sample only through
    rounding, and the global random state not at all.
    """

    def __init__(
        self,
        model_path: str,
        tokenizer: Any,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        batch_size: int,
        end_token_ids: Sequence[int],
        trust_remote_code: bool = False,
    ) -> None:
        self.version = -1  # version of the weights
        self.device = torch.device(device)
        self.batch_size = batch_size
        self._tokenizer = tokenizer
        self._end_token_ids, self._stop_strings = end_token_ids, StopStrings(tokenizer)
        self._refusal: str | None = "it has no weights yet: push them first"
        # The first push overwrites the initial weights. Drawing them must not advance the run's random state.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.device:
            hf_config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
            images = takes_images(hf_config.to_dict())
            kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
            model = kind.from_config(hf_config, dtype=dtype, trust_remote_code=trust_remote_code)
        language = model.model.language_model if images else model
        if language.config._attn_implementation == "sdpa":  # some models do not support it
            language.set_attn_implementation(GROUPED_SDPA)
        self.model = model.eval().requires_grad_(False)
        onednn.use_in(self.model)
        self._vision = PromptVision(self.model, ImageProcessor(model_path)) if images else None

    @torch.no_grad()
    def load(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy every tensor of the model from `stream`, by Hugging Face name, and set `version`.

        Every name must come exactly once; of tied tensors one is enough. Raises ValueError for an unknown,
        repeated, missing or misshapen tensor. After this error, as after any error of the stream itself,
        `generate` refuses until a `load` succeeds.
        """
        self._refusal = f"its weights are incomplete: the push of version {version} failed; push again"
        architecture = (self.model.config.architectures or [""])[0]
        named = self.model.state_dict(keep_vars=True)
        targets = {name_in_file(name, architecture): tensor for name, tensor in named.items()}
        arrived: set[str] = set()
        filled: set[int] = set()  # targets by identity: tied names share one
        for name, tensor in stream:
            target = targets.get(name)
            if target is None:
                raise ValueError(f"weight push {version}: the engine's model has no tensor {name!r}")
            if name in arrived:
                raise ValueError(f"weight push {version}: {name} came twice")
            if tensor.shape != target.shape:
                raise ValueError(
                    f"weight push {version}: {name} has shape {tuple(tensor.shape)}, "
                    f"the engine's model needs {tuple(target.shape)}"
                )
            if id(target) in filled and not torch.equal(target, tensor.to(target)):
                raise ValueError(
                    f"weight push {version}: {name} is tied to another tensor in the engine's model "
                    "(tie_word_embeddings), but came with other values"
                )
            target.copy_(tensor)
            arrived.add(name)
            filled.add(id(target))
        missing = [name for name, target in targets.items() if id(target) not in filled]
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ValueError(f"weight push {version}: {len(missing)} tensor(s) did not come: {shown}")
        self.version, self._refusal = version, None

    def close(self) -> None:
        """Free the model; `generate` refuses from now on."""
        self._refusal = "it is closed"
        del self.model, self._vision

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Rollout]]:
        """`n` rollouts for each request, in request order.

        Raises ValueError, which names the request, for one that cannot be served; RuntimeError without
        whole weights; FloatingPointError where the model's logits are not finite.
        """
        if self._refusal:
            raise RuntimeError(f"the rollout engine cannot generate: {self._refusal}")
        for i, request in enumerate(requests):
            self._check(i, request, sampling)
        # Prompts of similar length share a batch, so that little of it is padding.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
        results: list[list[Rollout]] = [[] for _ in requests]
        for batch in batched(((i, s) for i in order for s in range(requests[i].n)), self.batch_size):
            prompts = {i: row for row, i in enumerate(dict.fromkeys(i for i, _ in batch))}
            sampled = self._sample(
                [requests[i] for i in prompts],
                [prompts[i] for i, _ in batch],
                [(requests[i].seed, s) for i, s in batch],
                [requests[i].longest(sampling) for i, _ in batch],
                sampling,
            )
            for (i, _), rollout in zip(batch, sampled, strict=True):
                results[i].append(rollout)
        return results

    def decode(self, token_ids: Sequence[int]) -> str:
        """The tokens as text, without special ones."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _check(self, i: int, request: Request, sampling: SamplingConfig) -> None:
        config = self.model.config.get_text_config()
        room = getattr(config, "max_position_embeddings", None)
        if problem := check_request(request, sampling, config.vocab_size, room):
            raise ValueError(f"rollout request {i}: {problem}")

    @torch.inference_mode()
    def _sample(
        self,
        requests: Sequence[Request],
        prompt_of: Sequence[int],
        seeds: Sequence[tuple[int, int]],
        longest: Sequence[int],
        sampling: SamplingConfig,
    ) -> list[Rollout]:
        """One rollout of at most `longest` tokens for each entry of `prompt_of` (a row of `requests`)."""
        n, steps, device = len(seeds), max(longest), self.device
        stop = torch.tensor(sampling.stops(self._end_token_ids), device=device)
        draws = Draws(sampling, seeds, steps, device)
        token_ns = torch.zeros(n, steps, dtype=torch.int64, device=device)
        logp_ns = torch.zeros(n, steps, dtype=torch.float32, device=device)
        length_n = torch.tensor(longest, device=device)
        last_n = length_n - 1
        begin, seconds_n = time.perf_counter(), torch.zeros(n, dtype=torch.float64, device=device)

        batch, logits = self._read_prompts(requests, steps)
        rows = torch.tensor(prompt_of, device=device)
        batch.cache.batch_select_indices(rows)
        batch, logits = batch.select(rows), logits[rows]
        live = torch.arange(n, device=device)  # the sequence of each row that is still in the batch
        for step in range(steps):
            token, logp_ns[live, step] = draws.next(logits, live, step)
            token_ns[live, step] = token

            stopped = torch.isin(token, stop) | (last_n[live] == step)
            if sampling.stop:
                stopped |= self._completes_stop_string(token_ns[live, : step + 1], sampling.stop)
            if stopped.any():
                length_n[live[stopped]] = step + 1
                seconds_n[live[stopped]] = time.perf_counter() - begin
                rows = batch.cache.keep(~stopped)
                batch, live, token = batch.select(rows), live[rows], token[rows]
            if not len(live):
                break
            logits = self._read_token(token, batch, step)

        return self._rollouts(token_ns, logp_ns, length_n.tolist(), seconds_n.tolist(), sampling, draws)

    def _read_prompts(self, requests: Sequence[Request], steps: int) -> tuple[DecodingBatch, Tensor]:
        """The prompts, a row each, in a cache with room for `steps` tokens, and the logits after them."""
        prompts = [request.prompt_ids for request in requests]
        # Left padding puts every prompt's last token into the last column.
        width, device = max(map(len, prompts)), self.device
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        start = torch.tensor([width - len(p) for p in prompts], device=device)
        column = torch.arange(width + steps, device=device)
        mask = (column >= start[:, None]).long()
        positions, shift = (column[:width] - start[:, None]).clamp(min=0), torch.zeros_like(start)
        vision: dict[str, Tensor] = {}
        if self._vision is not None:
            vision = self._vision.inputs([request.images for request in requests], device)
            positions, shift = self._vision.positions(ids, mask[:, :width], vision)
        cache = KeyValueCache(self.model.config.get_text_config(), width + steps)
        logits = self._forward(ids, positions, mask[:, :width], cache, **vision)
        return DecodingBatch(cache, width, mask, shift - start), logits

    def _read_token(self, token: Tensor, batch: DecodingBatch, step: int) -> Tensor:
        """The logits after each row's `token`, which was sampled in `step`."""
        end = batch.width + step + 1
        positions = (end - 1 + batch.shift)[:, None]
        if self._vision is not None:  # all three axes have the same positions
            positions = positions.expand(3, -1, -1)
        return self._forward(token[:, None], positions, batch.mask[:, :end], batch.cache)

    def _rollouts(
        self,
        token_ns: Tensor,
        logp_ns: Tensor,
        lengths: Sequence[int],
        seconds: Sequence[float],
        sampling: SamplingConfig,
        draws: Draws,
    ) -> list[Rollout]:
        """The sampled rows as rollouts, each up to its end. Raises FloatingPointError."""
        if not torch.isfinite(logp_ns).all():
            raise FloatingPointError(
                f"the model gave non-finite logits with weight version {self.version}: "
                "training diverged, or the checkpoint is damaged"
            )
        stop_ids = sampling.stops(self._end_token_ids)
        rollouts = []
        rows = zip(token_ns.tolist(), logp_ns.tolist(), lengths, seconds, strict=True)
        for all_ids, all_logps, length, duration in rows:
            end = self._stop_strings.end(all_ids[:length], sampling.stop)
            ids = all_ids[: length if end is None else end]
            reason = "length" if end is None and ids[-1] not in stop_ids else "stop"
            logps = all_logps[: len(ids)]
            rollouts.append(Rollout(ids, logps, "", reason, self.version, seconds=duration))
        texts = self._tokenizer.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
        for rollout, text, support in zip(rollouts, texts, draws.supports.result(), strict=True):
            rollout.text = text
            rollout.support = support and support.parts([(0, len(rollout.token_ids))])
        return rollouts

    def _completes_stop_string(self, tokens: Tensor, stop: Sequence[str]) -> Tensor:
        """True for rows of `tokens` [rows, sampled] that have a stop string in their end; bool [rows]."""
        recent = tokens[:, -self._stop_strings.recent(stop) :].tolist()
        return torch.tensor([self._stop_strings.has(row, stop) for row in recent], device=self.device)

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: KeyValueCache, **images: Tensor
    ) -> Tensor:
        """Logits after the last column of `ids`, [rows, vocabulary]; the cache grows by these columns."""
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **images,
        )
        return output.logits[:, -1]


# Attention of one new token without copying the cache, as in transformers 5.23, but not in 5.19.
#
# With grouped-query attention, 5.19 repeats keys and values to the number of query heads at every step;
# on a CPU that copy costs more than the attention. A single query token needs no copy: its heads are
# independent rows, so those that share a key/value head can stand in place of the sequence.

GROUPED_SDPA = "grouped_sdpa"  # the name for `attn_implementation`


def grouped_sdpa(
    module: torch.nn.Module,
    query: Tensor,  # [batch, query heads, tokens, dim]
    key: Tensor,  # [batch, key heads, cached tokens, dim]
    value: Tensor,
    attention_mask: Tensor | None,  # [batch, 1, tokens, cached tokens]
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Output [batch, tokens, query heads, dim]; transformers' own for anything but one plain query token."""
    batch, heads, tokens, dim = query.shape
    if tokens > 1 or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )[0]
        return output, None
    rows = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    output = _attend(rows, key, value, attention_mask, scaling)
    return output.reshape(batch, 1, heads, -1), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Compute scaled_dot_product_attention; in fp32 on a CPU by two products over all rows and heads at once.

    PyTorch's CPU kernel multiplies for each row and head on its own, and takes twice the time. The products
    also read the memory that is free for further columns: without it the heads would have gaps between them,
    and the products would copy all keys first.
    """
    columns = key.shape[2]
    plain = mask is None or mask.dtype == torch.bool
    if not (query.is_cpu and query.dtype == torch.float32 and plain):
        output: Tensor = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling
        )
        return output
    batch, heads, rows, dim = query.shape
    scores = torch.bmm(query.flatten(0, 1) * (scaling or dim**-0.5), _with_room(key).flatten(0, 1).mT)
    scores = scores.view(batch, heads, rows, -1)
    scores[..., columns:] = -torch.inf
    if mask is not None:
        scores[..., :columns].masked_fill_(~mask, -torch.inf)
    shares = scores.softmax(-1).flatten(0, 1)
    return torch.bmm(shares, _with_room(value).flatten(0, 1)).view(batch, heads, rows, -1)


def _with_room(view: Tensor) -> Tensor:
    """`view` [rows, heads, columns, dim] extended to all columns of its memory, also unused ones."""
    rows, heads, columns, dim = view.shape
    room = view.stride(1) // dim
    contiguous = (heads * room * dim, room * dim, dim, 1)
    if room <= columns or view.storage_offset() or view.stride() != contiguous:
        return view
    return view.as_strided((rows, heads, room, dim), contiguous)


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)


# The embedded engine's keys and values: a new column is written in place, and so is a row that moves.
#
# The cache of transformers copies all keys and values of a layer for every token, and again whenever a row
# leaves the batch: on a CPU, most of a small model's sampling time.

_LEAST_GROWTH = 16  # columns


class KeyValueCache(DynamicCache):
    """A cache for a batch whose rows leave one after the other.

    Layers with full attention write in place. Other layers, such as those with a sliding window, are those
    of transformers.
    """

    def __init__(self, config: Any, most_columns: int) -> None:
        super().__init__(config=config)
        self.layers: list[Any] = [
            _InPlace(most_columns) if type(x) is DynamicLayer else x for x in self.layers
        ]

    def keep(self, stays: Tensor) -> Tensor:
        """Drop the rows where `stays`, bool [rows], is False; the last rows fill the gaps.

        Returns the former indices of the rows that stay, int64, in their new order.
        """
        remaining = int(stays.sum())
        free = (~stays[:remaining]).nonzero().squeeze(1)
        moved = remaining + stays[remaining:].nonzero().squeeze(1)
        rows = torch.arange(remaining, device=stays.device).index_copy_(0, free, moved)
        for layer in self.layers:
            if isinstance(layer, _InPlace):
                layer.move(moved, free, remaining)
            else:
                layer.batch_select_indices(rows)
        return rows


class _InPlace(DynamicLayer):
    """A layer with full attention. Its keys and values are views of memory for further columns."""

    def __init__(self, most_columns: int) -> None:
        super().__init__()
        self._memories = _Memory(most_columns), _Memory(most_columns)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        of_keys, of_values = self._memories
        self.keys, self.values = of_keys.append(key_states), of_values.append(value_states)
        self.is_initialized = True
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Copy the rows at `indices`, which may repeat a row."""
        if self.is_initialized:
            self.keys, self.values = (memory.select(indices) for memory in self._memories)

    def move(self, moved: Tensor, free: Tensor, remaining: int) -> None:
        """Copy the rows `moved` to the rows `free`, and keep the first `remaining` rows."""
        if self.is_initialized:
            self.keys, self.values = (memory.move(moved, free, remaining) for memory in self._memories)


class _Memory:
    """A tensor [rows, heads, columns, dim] that grows by columns, with room for further ones behind it."""

    def __init__(self, most_columns: int) -> None:
        self._most, self._columns, self._rows = most_columns, 0, 0
        self._data: Tensor | None = None  # [rows or more, heads, columns or more, dim]

    def append(self, new: Tensor) -> Tensor:
        """Write the columns `new` behind the stored ones; returns all."""
        rows, heads, columns, dim = new.shape
        begin, end = self._columns, self._columns + columns
        if self._data is None or end > self._data.shape[2]:
            room = min(end + max(_LEAST_GROWTH, end // 8), max(end, self._most))
            data = new.new_zeros(rows, heads, room, dim)  # zeros, because attention reads unused columns, too
            if self._data is not None:
                data[:, :, :begin] = self._data[:rows, :, :begin]
            self._data, self._rows = data, rows
        self._data[:rows, :, begin:end] = new
        self._columns = end
        return self._used()

    def select(self, rows: Tensor) -> Tensor:
        """Copy the rows at `rows` without spare columns, which the next column allocates."""
        self._data, self._rows = self._used()[rows], len(rows)
        return self._data

    def move(self, moved: Tensor, free: Tensor, remaining: int) -> Tensor:
        memory = self._used()
        memory[free] = memory[moved]
        self._rows = remaining
        return self._used()

    def _used(self) -> Tensor:
        assert self._data is not None
        return self._data[: self._rows, :, : self._columns]


# The inputs that a transformers model takes for a batch with images: pixels, and positions in three axes.


class PromptVision:
    """The images of prompts, for one model."""

    def __init__(self, model: Any, processor: ImageProcessor) -> None:
        self._model, self._processor = model.model, processor
        self._placeholder: int = model.config.image_token_id

    def inputs(self, images: Sequence[Sequence[Image]], device: torch.device) -> dict[str, Tensor]:
        """The arguments of the model's forward pass for prompts with these images. Raises ImageError."""
        flat = [image for of_prompt in images for image in of_prompt]
        if not flat:
            return {}
        pixels = torch.cat([self._processor.pixels(image) for image in flat])
        grid = torch.tensor([image.grid for image in flat], device=device)
        return {"pixel_values": pixels.to(device), "image_grid_thw": grid}

    def positions(self, ids: Tensor, mask: Tensor, vision: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Positions of padded prompts [rows, columns] in three axes, [3, rows, columns], and shifts.

        The second value, [rows], is the next token's position minus its index: an image has more tokens than
        positions.
        """
        kinds = ((ids == self._placeholder) & mask.bool()).int()
        grid = vision.get("image_grid_thw")
        positions, further = self._model.get_rope_index(ids, kinds, grid, attention_mask=mask)
        return positions, further.squeeze(1)
