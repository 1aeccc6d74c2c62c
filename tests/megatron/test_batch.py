"""Plans and packs: every row once, within budgets, balanced; packs equal those built token by token."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.megatron.microbatch import MicroBatchPlan, plan
from megatron_gvpo.settings.parallel import Padding
from megatron_gvpo.types import TrainBatch

HIDDEN = 64


def make_rows(lengths: list[tuple[int, int]], groups: list[int] | None = None) -> TrainBatch:
    """Rows with (prompt tokens, response tokens); all token ids differ."""
    counter = iter(range(1, 1_000_000))
    groups = list(range(len(lengths))) if groups is None else groups
    return TrainBatch(
        prompt_ids=[[next(counter) for _ in range(p)] for p, _ in lengths],
        response_ids=[[next(counter) for _ in range(r)] for _, r in lengths],
        group_n=torch.tensor(groups, dtype=torch.int64),
        reward_n=torch.zeros(len(lengths)),
        truncated_n=torch.zeros(len(lengths), dtype=torch.bool),
    )


def sizes(rows: TrainBatch) -> list[int]:
    return [len(p) + len(r) for p, r in zip(rows.prompt_ids, rows.response_ids, strict=True)]


def packs(of: MicroBatchPlan) -> list[list[int]]:
    return [pack for rank in of.micro_batches for pack in rank]


ragged_rows = st.builds(
    lambda flat: make_rows([row[:2] for row in flat], [row[2] for row in flat]),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 60), st.integers(0, 6)), min_size=1, max_size=30),
)


@settings(max_examples=150, deadline=None)
@given(ragged_rows, st.integers(1, 5), st.integers(1, 200), st.booleans())
def test_plan_keeps_its_promises(rows: TrainBatch, dp_size: int, max_tokens: int, keep_groups: bool) -> None:
    tokens, before = sizes(rows), copy.deepcopy(rows)
    batch_plan = plan(rows, dp_size, max_tokens, HIDDEN, keep_groups)

    assert sorted(i for pack in packs(batch_plan) for i in pack) == list(range(len(rows))), "every row, once"
    assert len(batch_plan.micro_batches) == dp_size
    assert len({len(rank) for rank in batch_plan.micro_batches}) == 1, "equally many on every rank"
    for pack in packs(batch_plan):
        assert pack == sorted(pack), "in the order of the step"
        assert len(pack) <= 1 or sum(tokens[i] for i in pack) <= max_tokens, "the budget"

    where = {i: number for number, pack in enumerate(packs(batch_plan)) for i in pack}
    split_groups = False
    for group in set(rows.group_n.tolist()):
        members = [i for i, g in enumerate(rows.group_n.tolist()) if g == group]
        split = len({where[i] for i in members}) > 1
        split_groups |= split
        if keep_groups and sum(tokens[i] for i in members) <= max_tokens:
            assert not split, "a group that fits stays whole"
    assert batch_plan.split_groups or not split_groups, "a split group is reported"

    assert batch_plan == plan(rows, dp_size, max_tokens, HIDDEN, keep_groups), "equal on every rank"
    assert rows.prompt_ids == before.prompt_ids and torch.equal(rows.group_n, before.group_n)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dp_size", [2, 4, 8])
def test_ranks_are_balanced_better_than_by_a_naive_split(seed: int, dp_size: int) -> None:
    """The measure is the slowest rank's cost: ranks wait for each other only at the end of a step."""
    generator = torch.Generator().manual_seed(seed)
    responses = (torch.randn(96, generator=generator) * 0.9 + 4).exp().int().clamp(1, 600)
    rows = make_rows([(10, r) for r in responses.tolist()])
    cost = [t * (1 + t / (6 * HIDDEN)) for t in sizes(rows)]
    ideal = max(sum(cost) / dp_size, max(cost))

    ranks = plan(rows, dp_size, 1024, HIDDEN).micro_batches
    planned = max(sum(cost[i] for pack in rank for i in pack) for rank in ranks)
    naive = max(sum(cost[rank::dp_size]) for rank in range(dp_size))
    assert planned < naive
    assert planned < 1.2 * ideal


def test_few_micro_batches_are_nearly_full() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = make_rows([(5, r) for r in torch.randint(1, 100, (200,), generator=generator).tolist()])
    needed = -(-sum(sizes(rows)) // (2 * 1000))
    assert len(plan(rows, 2, 1000, HIDDEN).micro_batches[0]) <= needed + 1


def test_sequences_beyond_the_budget_get_a_micro_batch_each_and_no_empty_ones() -> None:
    rows = make_rows([(5, r) for r in (40, 30, 90, 20)])
    assert [len(pack) for pack in packs(plan(rows, 1, 10, HIDDEN))] == [1] * 4
    assert [len(rank) for rank in plan(rows, 2, 10, HIDDEN).micro_batches] == [2, 2]


def test_plan_of_no_rows_has_one_empty_micro_batch_on_every_rank() -> None:
    assert plan(make_rows([]), 3, 100, HIDDEN) == MicroBatchPlan([[[]], [[]], [[]]], split_groups=False)


@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_an_interleaved_pipeline_gets_a_multiple_of_micro_batches(multiple: int) -> None:
    rows = make_rows([(5, r) for r in range(1, 40)])
    counts = {len(rank) for rank in plan(rows, 2, 100, HIDDEN, multiple=multiple).micro_batches}
    assert len(counts) == 1 and counts.pop() % multiple == 0
    assert plan(make_rows([(2, 3)]), 1, 100, HIDDEN, multiple=multiple).micro_batches == [
        [[0], *[[]] * (multiple - 1)]
    ]


ragged_lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), max_size=8)


@settings(max_examples=100, deadline=None)
@given(ragged_lengths, st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]))
def test_a_pack_predicts_every_response_token_from_the_token_before(
    lengths: list[tuple[int, int]], of_sequence: int, shards: int
) -> None:
    rows = make_rows(lengths)
    padding = Padding(of_sequence, of_sequence * shards)
    pack = PackedBatch.pack(rows, padding)

    assert sorted(pack.order) == list(range(len(rows)))
    begin = 0
    for i, length in zip(pack.order, pack.lengths, strict=False):
        prompt, response, offset = rows.prompt_ids[i], rows.response_ids[i], rows.offsets[i]
        sequence = [*prompt, *response][:-1]
        assert 0 <= length - len(sequence) < of_sequence, "no more than it takes"
        assert pack.token_t[begin : begin + len(sequence)].tolist() == sequence
        predicted = range(begin + len(prompt) - 1, begin + len(sequence))
        own = slice(offset, offset + len(response))
        assert pack.response_r[own].tolist() == list(predicted)
        assert pack.label_r[own].tolist() == response
        begin += length
    assert pack.position_t.tolist() == [i for length in pack.lengths for i in range(length)]
    assert pack.index_r.tolist() == list(range(rows.offsets[-1])), "every response token, once"
    assert len(pack.token_t) % padding.pack == 0 and len(pack.token_t) > 0
    assert len(pack.token_t) - begin < padding.pack or (begin == 0 and len(pack.token_t) == padding.pack)
    assert all(length % of_sequence == 0 for length in pack.lengths)


@settings(max_examples=100, deadline=None)
@given(ragged_lengths, st.sampled_from([2, 4]))
def test_cuts_share_a_pack_and_their_columns_stay_aligned(lengths: list[tuple[int, int]], parts: int) -> None:
    rows = make_rows(lengths)
    pack = PackedBatch.pack(rows, Padding(2 * parts, 2 * parts))
    cuts = [pack.cut(parts, part) for part in range(parts)]

    assert sorted(i for cut in cuts for i in cut.index_r.tolist()) == list(range(rows.offsets[-1]))
    assert sorted(t for cut in cuts for t in cut.token_t.tolist()) == sorted(pack.token_t.tolist())
    causal = [int((cut.position_t + 1).sum()) for cut in cuts]
    assert len(set(causal)) == 1, "the same share of causal attention"
    for cut in cuts:
        assert torch.equal(cut.token_t[cut.response_r], pack.token_t[pack.response_r[cut.index_r]])
        assert torch.equal(cut.position_t[cut.response_r], pack.position_t[pack.response_r[cut.index_r]])
        assert torch.equal(cut.label_r, pack.label_r[cut.index_r])
