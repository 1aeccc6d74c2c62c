"""Truncated samples say what they were sampled from, from the engine to the head's labels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from helpers.inputs.rows import make_group

from megatron_gvpo.algorithms.members.off_policy import Replay
from megatron_gvpo.conversations.converse import append_turn
from megatron_gvpo.groups import Group, Prompt, Rollout, group_fields, group_of
from megatron_gvpo.kernels.supports import Supports
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.observe.rollout_metrics import rollout_statistics
from megatron_gvpo.observe.step_records import StepRecord, path_of, read, save
from megatron_gvpo.sampling.draws import SupportRecord, outside_support
from megatron_gvpo.servers.request import pack, unpack
from megatron_gvpo.servers.server import Completion
from megatron_gvpo.settings.parallel import Padding
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.supports import Support
from megatron_gvpo.types import TrainBatch

MEMBERS = [[4, 5], [2], [], [1, 3, 6, 7]]
TOKENS = [5, 2, 9, 3]


def truncated(prompt: tuple[int, ...] = (1, 2, 3)) -> Rollout:
    return Rollout(list(TOKENS), [-0.5] * 4, "", "stop", support=Support.of(MEMBERS))


def members_of(supports: Supports | Support) -> list[list[int]]:
    if isinstance(supports, Support):
        counts, ids = supports.arrays
        supports = Supports(torch.from_numpy(ids), torch.from_numpy(counts))
    return [part.tolist() for part in supports.ids_k.split(supports.count_r.tolist())]


def test_supports_are_cut_and_joined_by_token():
    support = Support.of(MEMBERS)
    assert members_of(support) == MEMBERS
    assert len(support.counts) == 16 and len(support.ids) == 28, "4 bytes a token and 4 a member"
    assert members_of(support.parts([(1, 2), (3, 4)])) == [MEMBERS[1], MEMBERS[3]]
    assert support.parts([(0, 1)]).then(support.parts([(1, 4)])) == support
    assert members_of(Support.whole_vocabulary(2)) == [[], []]


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        (MEMBERS[:3], "supports of 3 tokens for 4 tokens"),
        ([*MEMBERS[:3], [1, 7]], "token 3, number 3, is not in the support"),
        ([[4], *MEMBERS[1:]], "token 5, number 0, is not in the support"),
        ([[4], [5, 2], *MEMBERS[2:]], "token 5, number 0, is not in the support"),
    ],
)
def test_a_token_outside_its_support_is_refused(members: list[list[int]], problem: str):
    rollout = replace(truncated(), support=Support.of(members))
    with pytest.raises(ValueError, match=f"response 0 of the batch: {problem}"):
        TrainBatch.from_groups([Group(Prompt("p", (1,), ""), [rollout])])
    with pytest.raises(ValueError, match=problem):
        Completion(list(TOKENS), [-0.5] * 4, "stop", support=Support.of(members))


@pytest.mark.parametrize("members", [[["a"]], [[1.5]], [[-1]], [[2**31]], [[[1]]], [None]])
def test_members_that_are_not_token_ids_are_refused(members: list):
    with pytest.raises((TypeError, ValueError)):
        Support.of(members)


def test_counts_that_do_not_fit_the_members_are_refused():
    support = Support(np.array([2, 3], "<i4").tobytes(), np.array([1, 2, 3, 4], "<i4").tobytes())
    assert support.problem([1, 3]) == "supports with 4 members in all, and counts that add up to 5"
    support = Support(np.array([-1, 5], "<i4").tobytes(), support.ids)
    assert "add up to 4" in support.problem([1, 3])


def test_supports_travel_in_checkpoints_and_between_ranks():
    group = replace(make_group([1.0, 0.0]), rollouts=[truncated(), replace(truncated(), support=None)])
    assert group_of(json.loads(json.dumps(group_fields(group)))) == group
    rows = msgpack.unpackb(msgpack.packb(pack([group.rollouts])))
    assert unpack(rows) == [group.rollouts]


def test_replayed_responses_keep_their_supports():
    history = Replay(count=1).build()
    group = Group(Prompt("p", (1,), ""), [truncated()])
    history([group], None)
    again = Replay(count=1).build()
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    [joined] = again([Group(group.prompt, [truncated()])], None)
    assert [r.source for r in joined.rollouts] == ["policy", "replay"]
    assert joined.rollouts[1].support == group.rollouts[0].support


def test_turns_of_a_conversation_join_their_supports():
    talk = Rollout([], [], "", "stop")
    append_turn(talk, Rollout([8], [-1.0], "", "stop"), (), -1, None)
    assert talk.support is None
    append_turn(talk, truncated(), (), 0, None)
    append_turn(talk, Rollout([8], [-1.0], "", "stop"), (), 1, None)
    assert members_of(talk.support) == [[], *MEMBERS, []]


def test_a_stopped_response_keeps_the_supports_of_its_tokens():
    completion = Completion(list(TOKENS), [-0.5] * 4, "abort", support=Support.of(MEMBERS))
    assert members_of(completion.up_to_stop([2]).support) == MEMBERS[:2]
    assert members_of(completion.up_to_stop([0]).support) == MEMBERS
    assert members_of(completion.before(9).support) == MEMBERS[:2]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_packs_carry_supports_beside_their_labels(share_prompts: bool):
    others = Rollout([7, 8], [], "", "stop", source="demonstration")
    rows = TrainBatch.from_groups([Group(Prompt("p", (1, 2, 3), ""), [truncated(), others, truncated()])])
    batch = PackedBatch.pack(rows, Padding(1, 1) if share_prompts else Padding(4, 16), share_prompts)
    assert batch.label_r.tolist() == [*TOKENS, 7, 8, *TOKENS]
    assert members_of(batch.supports) == [*MEMBERS, [], [], *MEMBERS]
    assert PackedBatch.pack(rows.select([1])).supports is None
    for part in [] if share_prompts else [batch.cut(2, part) for part in range(2)]:
        pairs = zip(part.index_r.tolist(), members_of(part.supports), strict=True)
        assert all(members == members_of(batch.supports)[index] for index, members in pairs)
        assert 0 < len(part.index_r) < 10


def test_a_steps_record_has_the_supports_of_its_rows(tmp_path: Path):
    others = Rollout([7, 8], [], "", "stop", source="demonstration")
    group = Group(Prompt("p", (1, 2, 3), ""), [truncated(), others, truncated()])
    rows = TrainBatch.from_groups([group])
    path_of(tmp_path, 4).parent.mkdir(parents=True)
    save(StepRecord(4, 1, False, {}, [rows]), path_of(tmp_path, 4))
    [again] = read(tmp_path, 4).mini_batches
    assert again.support == rows.support


def test_the_record_puts_steps_of_sequences_in_order():
    record = SupportRecord(3)
    record.add(torch.tensor([2, 0, 1]), torch.tensor([[1, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.bool))
    record.add(torch.tensor([1, 2]), torch.tensor([[1, 1, 1], [0, 1, 0]], dtype=torch.bool))
    assert [members_of(support) for support in record.result()] == [
        [[2]],
        [[0], [0, 1, 2]],
        [[0, 1], [1]],
    ]
    assert SupportRecord(2).result() == [None, None]


def test_equally_likely_tokens_are_cut_to_k():
    p = torch.full((1, 8), 0.125)
    assert (~outside_support(p, SamplingConfig(top_k=3))).sum() == 3
    assert (~outside_support(p, SamplingConfig(min_p=0.99))).sum() == 8


def test_metrics_count_members():
    group = Group(Prompt("p", (1,), ""), [truncated(), replace(truncated(), support=None)])
    statistics = rollout_statistics([group], 0)
    assert statistics["response/support_size"] == pytest.approx(7 / 3)
    assert statistics["response/support_of_one"] == pytest.approx(1 / 3)
    assert "response/support_size" not in rollout_statistics([make_group([0.0])], 0)
