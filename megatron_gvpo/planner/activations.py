"""Counts a GPU's bytes of activations: those that layers keep for the backward pass, and those of a pass.

Every term is a tensor that Transformer Engine 2.20 or megatron-core 0.19 saves, or still has at the fullest
moment of a pass. Rehearsals show which line of code allocates each; a test compares the sums. Names in the
formulas: n, the tokens of a context-parallel rank; u, the tokens of its part of the stream of hidden states:
n / tp with sequence parallelism, else n; b, bytes of an element, 2 in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_gvpo.planner.architecture import Architecture, DeltaNet
    from megatron_gvpo.planner.workload import Layout

STASH_BYTES = 1024 * 2**20  # default of train.head_stash_mb
TILE_BYTES = 512 * 2**20  # a tile of logits in fp32 (kernels/linear_logprob.py)
CHUNK_ROWS = 4096  # rows whose exponentials the head computes at once, in bf16 (kernels/head.py)
CUBLAS_BYTES = 32 * 2**20  # a workspace, from Hopper on
DELTA_CHUNK = 64  # tokens that a gated delta net computes at once
_B = 2  # bytes of an element in bf16
_F = 4  # bytes of an element in fp32


def tower_bytes(model: Architecture, layout: Layout, image_tokens: float) -> float:
    """Bytes that a trained vision tower keeps for the backward pass of images of so many tokens together.

    Qwen2.5-VL's blocks are those of transformers, whose norms keep fp32 copies; Qwen3-VL's are Transformer
    Engine's.
    """
    tower = model.vision
    if tower is None or not model.trains_vision:
        return 0.0
    patches = image_tokens * tower.merge
    if layout.recompute:  # only the input of each block is kept
        return _B * patches * tower.depth * tower.hidden
    if tower.split:
        of_a_patch = 8 * tower.hidden + (10 * tower.hidden + 4 * tower.ffn) / layout.tp
    else:
        of_a_patch = 30 * tower.hidden + 8 * tower.ffn
    return patches * tower.depth * of_a_patch


@dataclass(frozen=True)
class Layer:
    """Bytes of one layer: `saved` from its forward to its backward, and the most beside them in each pass."""

    saved: float
    forward: float
    backward: float


class Activations:
    """The activations of a micro-batch of `tokens` tokens, `responses` of which have a label.

    `weights_first`: whether the tokens' weights are known before the forward; None: either may be.
    `share_prompts`: the layers have the core attention for shared prompts; `tokens` has each prompt once.
    `stash_bytes`: train.head_stash_mb in bytes.
    """

    def __init__(
        self,
        model: Architecture,
        layout: Layout,
        tokens: float,
        responses: float | None = None,
        weights_first: bool | None = None,
        share_prompts: bool = False,
        stash_bytes: float = STASH_BYTES,
    ) -> None:
        self._stash_bytes = stash_bytes
        self._share_prompts = share_prompts
        self._weights_first = weights_first
        self._model, self._layout, self.tokens = model, layout, tokens
        self._n = tokens / layout.cp
        self._u = self._n / (layout.tp if layout.sequence_parallel else 1)
        self._r = (tokens if responses is None else responses) / layout.cp
        self._again = frozenset(() if layout.recompute else layout.recompute_modules)
        self._layers: dict[bool, Layer] = {}

    @property
    def stream(self) -> float:
        """The hidden states between two layers."""
        return _B * self._u * self._model.hidden

    def layer(self, mixture: bool) -> Layer:
        """One of the model's layers: with an MLP, or with a mixture of experts.

        For layers with different kinds of attention, `saved` is the mean and the rest is the maximum.
        """
        if mixture not in self._layers:
            kinds = self._kinds(mixture)
            self._layers[mixture] = Layer(
                sum(share * kind.saved for share, kind in kinds),
                max(kind.forward for _, kind in kinds),
                max(kind.backward for _, kind in kinds),
            )
        return self._layers[mixture]

    def _kinds(self, mixture: bool) -> list[tuple[float, Layer]]:
        """The layers with each kind of attention, and their share of all layers."""
        if (net := self._model.delta_net) is None:
            return [(1.0, self._layer(mixture, self._attention()))]
        share = net.layers / self._model.layers
        plain = self._layer(mixture, self._attention())
        return [(share, self._layer(mixture, self._delta_net(net))), (1 - share, plain)]

    def _layer(self, mixture: bool, attention: Layer) -> Layer:
        """A layer with attention and an MLP, or a mixture of experts; recomputed modules keep nothing."""
        inside = self._mixture() if mixture else self._mlp()
        norms = 2 * (self.stream + _F * self._u)
        sums = 2 * self.stream  # behind attention, and behind the MLP or experts
        again = 0.0
        if ("moe" if mixture else "mlp") in self._again:
            again = inside.saved
            norms -= 0.0 if mixture else self.stream  # a dense MLP's norm belongs to its first product
        saved = attention.saved + inside.saved - again + norms + sums
        # In the backward pass of attention, the MLP's tensors are freed already.
        backward = max(again + inside.backward, attention.backward - (inside.saved - again))
        return Layer(saved, again + inside.forward, backward)

    def _delta_net(self, net: DeltaNet) -> Layer:
        """A gated delta net by flash-linear-attention (0.6.0), whose keys are repeated for its values' heads.

        It keeps the joint product and the parts that are cut out of it. The backward pass computes the states
        before chunks of tokens again, in bf16.
        """
        n, heads = self._n / self._layout.tp, net.value_heads
        keys, values = net.key_heads * net.key_dim, heads * net.value_dim
        wide, repeated = _B * n * values, _B * n * heads * net.key_dim
        joint = _B * n * (2 * keys + 2 * values + 2 * heads)
        # Values and gate, the rule's result, its norm, and the gated result; queries and keys after their
        # norms.
        saved = joint + 5 * wide + 2 * repeated + _B * n * 2 * keys
        saved += _B * n * heads * DELTA_CHUNK  # products of every token with the tokens of its chunk
        saved += _F * n * (2 * heads + 2 * net.key_heads) + _B * n * 2 * heads  # decays, norms, strengths
        states = _B * n * heads * net.key_dim * net.value_dim / DELTA_CHUNK
        # The backward pass holds the states, their gradients and 5 tensors of each width, and has freed 3
        # saved ones.
        return Layer(saved, 0.0, 2 * wide + 5 * repeated + 2 * states + self.stream)

    def _attention(self) -> Layer:
        """Queries, keys, values, attention's result, and its softmax's statistics."""
        m, n, tp = self._model, self._n, self._layout.tp
        if m.latent is not None:
            return self._latent_attention()
        wide, narrow = _B * n * m.heads * m.head_dim / tp, _B * n * m.kv_heads * m.head_dim / tp
        statistics = _F * n * m.heads / tp
        saved = 2 * wide + 2 * narrow + statistics
        if m.qk_norm or m.wide_qk_norm:  # the norms' inputs, and a number for each head of each token
            saved += wide + narrow + _F * n * (m.heads + m.kv_heads) / tp
        if m.gate:  # the gate, and attention's result after it
            saved += 2 * wide
        if self._share_prompts:
            saved += wide + narrow  # values are a view of the joint product, which is then saved as a whole
        if "core_attn" in self._again:
            # Values are a view of the joint product, which is then saved as a whole; only statistics are
            # freed.
            saved += wide + narrow - statistics
        # Gradients of attention's result, of queries, keys and values, and fp32 sums for queries.
        return Layer(saved, 0.0, 4 * wide + 2 * narrow)

    def _latent_attention(self) -> Layer:
        """Keys and queries are [n, heads, nope + rope]; values are padded to that width."""
        m, n, tp = self._model, self._n, self._layout.tp
        assert m.latent is not None
        a = m.latent
        per_head = _B * n * m.heads / tp
        wide = per_head * (a.nope_dim + a.rope_dim)
        padded = a.v_dim != a.nope_dim + a.rope_dim
        up = 3 * wide + (wide + per_head * a.v_dim if padded else wide)  # q, k, v; attention's result
        statistics = _F * n * m.heads / tp
        # The down-projection of queries and its norm; the compressed keys and values and their norm.
        down = _B * self._u * (2 * a.q_rank + 2 * a.kv_rank)
        saved = up + statistics + down
        if "mla_up_proj" in self._again:
            saved -= 3 * wide
        if "core_attn" in self._again:
            saved -= statistics
        return Layer(saved, 0.0, 6 * wide)

    def _mlp(self) -> Layer:
        """The first product's output, gate and up, and the activation's."""
        part = _B * self._n * self._model.ffn / self._layout.tp
        # In the backward pass: the gradients of gate and up, after the activation's output is freed, and of
        # the stream.
        return Layer(3 * part, 0.0, 2 * part + self.stream)

    def _mixture(self) -> Layer:
        """A rank gets `experts_per_token` rows a token on average: each token goes to as many experts."""
        m, layout = self._model, self._layout
        rows = self._u * m.experts_per_token * layout.etp
        width = m.expert_ffn / layout.etp
        sent = _B * rows * m.hidden
        saved = sent + _B * rows * 3 * width  # the sorted tokens, gate and up, the activation's output
        if "moe_act" in self._again:
            saved -= _B * rows * width
        saved += _F * self._u * m.experts * 1.5  # routing probabilities
        saved += _F * self._u * (2 * m.experts + 1)  # the permutation's map
        saved += _F * rows * 3  # probabilities of rows, before and after they are sorted
        forward = 4 * sent  # permuted, exchanged, computed, and sorted back
        if m.shared_ffn:
            if "shared_experts" not in self._again:
                saved += _B * self._n * 3 * m.shared_ffn / layout.tp
                if layout.sequence_parallel and layout.tp > 1:
                    saved += _B * self._n * m.hidden  # the gathered input of the shared experts
            forward += _B * self._n * m.hidden
        return Layer(saved, forward, forward)

    def head(self) -> float:
        """The fused head's own memory; the larger one if its mode is unknown (docs/explanation/head.md)."""
        first = self._head_with_weights_first() if self._weights_first is not False else 0.0
        return first if self._weights_first else max(first, self._head_with_weights_last())

    def _head_with_weights_first(self) -> float:
        """Gradients of the states, and beside them a chunk of exponentials and a tile of logits.

        Or, in the backward, the tensor that autograd gets in place of the table's gradient.
        """
        m, tp = self._model, self._layout.tp
        chunk = min(CHUNK_ROWS, self._r)
        rows = TILE_BYTES // (_F * m.vocab / tp)
        rows -= rows % (128 if rows >= 512 else 16)
        tile = _F * min(rows, chunk) * m.vocab / tp
        exponentials = _B * chunk * m.vocab / tp
        return _B * self._r * m.hidden + max(exponentials + tile, self._table)

    def _head_with_weights_last(self) -> float:
        """The stash, and beside it a tile of logits in the forward.

        Or, in the backward, the gradients of the states, and the memory for the recomputed rows.
        """
        m, tp = self._model, self._layout.tp
        logits = _F * self._r * m.vocab / tp
        stash = min(self._stash_bytes, logits / 2)
        stashed = self._r * stash / (logits / 2)
        rest = self._r - stashed
        tile = min(TILE_BYTES, _F * rest * m.vocab / tp)
        # The recomputed rows, with dL/dz in bf16.
        recomputed = _F * rest * m.hidden + _B * stashed * m.hidden + 1.5 * tile
        backward = _B * self._r * m.hidden + max(recomputed, self._table)
        return stash + max(backward, min(TILE_BYTES, _F * stashed * m.vocab / tp))

    @property
    def _table(self) -> float:
        """A rank's part of the output layer's weight."""
        return _B * self._model.vocab * self._model.hidden / self._layout.tp

    def workspaces(self, dense: int, mixtures: int, is_last: bool) -> float:
        """Memory that stays between two updates on a stage with these layers.

        Transformer Engine gives autograd an empty tensor for each shape of weight (get_dummy_wgrad), because
        products add to Megatron's gradients. cuBLAS has a workspace for Transformer Engine, four for grouped
        products, and one for PyTorch, whose products are the head's.
        """
        shapes = self._weights(dense > 0, mixtures > 0)
        cublas = 1 + 4 * (mixtures > 0) + (is_last or mixtures > 0)
        return _B * sum(rows * columns for rows, columns in shapes) + cublas * CUBLAS_BYTES

    def _weights(self, dense: bool, mixture: bool) -> set[tuple[float, float]]:
        """The shapes [rows, columns] of a rank's weights that Transformer Engine's layers have."""
        m, tp, etp = self._model, self._layout.tp, self._layout.etp
        shapes: set[tuple[float, float]] = set()
        if (a := m.latent) is not None:
            shapes |= {(a.q_rank, m.hidden), (m.heads * (a.nope_dim + a.rope_dim) / tp, a.q_rank)}
            shapes |= {(a.kv_rank + a.rope_dim, m.hidden), (m.hidden, m.heads * a.v_dim / tp)}
            shapes.add((m.heads * (a.nope_dim + a.v_dim) / tp, a.kv_rank))
        else:
            queries, keys = (1 + m.gate) * m.heads * m.head_dim / tp, m.kv_heads * m.head_dim / tp
            shapes |= {(queries + 2 * keys, m.hidden), (m.hidden, m.heads * m.head_dim / tp)}
        if (net := m.delta_net) is not None:
            keys, values = net.key_heads * net.key_dim / tp, net.value_heads * net.value_dim / tp
            shapes |= {(2 * keys + 2 * values + 2 * net.value_heads / tp, m.hidden), (m.hidden, values)}
        widths = [m.ffn / tp] if dense else []
        widths += [m.expert_ffn / etp] if mixture else []
        widths += [m.shared_ffn / tp] if mixture and m.shared_ffn else []
        for width in widths:
            shapes |= {(2 * width, m.hidden), (m.hidden, width)}
        return shapes

    def stage(
        self, dense: int, mixtures: int, is_last: bool, in_flight: float, has_head: bool = True
    ) -> tuple[float, float]:
        """Bytes of activations and of the head on a pipeline stage, at its fullest moment.

        `dense`, `mixtures`: its layers. `in_flight`: the micro-batches whose activations it keeps. The head
        is 0 where a layer's pass is the fullest moment; a critic has none.
        """
        counts = {False: dense, True: mixtures}
        kinds = {mixture: self.layer(mixture) for mixture, count in counts.items() if count}
        passing = max(max(kind.forward, kind.backward) for kind in kinds.values())
        if self._layout.recompute:  # every layer keeps its input; one layer at a time is computed again
            saved = self.stream * (dense + mixtures)
            passing = max(
                kind.saved + max(kind.forward, kind.backward)
                for mixture in kinds
                for _, kind in self._kinds(mixture)
            )
        else:
            saved = sum(kind.saved * counts[mixture] for mixture, kind in kinds.items())
            saved += self.stream  # the first layer's input
            saved -= 0 if is_last else self.stream  # a stage sends its output, and does not keep it
        if is_last:  # the final norm's output, and its input; the states that predict the labels
            saved += self.stream * (2 if self._layout.recompute else 1)
            saved += _B * self._r * self._model.hidden
        passing += self.stream if self._layout.pp > 1 else 0.0  # a gradient that has arrived
        head = self.head() if is_last and has_head else 0.0
        if head > passing:
            return in_flight * saved, head
        return in_flight * saved + passing, 0.0
