"""Members that join a group: replayed responses, demonstrations, responses to hints."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from helpers.inputs.rows import make_group, rewards_of

from megatron_gvpo import api_model
from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.importance.weights import Truncate
from megatron_gvpo.algorithms.members.base import taught
from megatron_gvpo.algorithms.members.early_exit import Exits, before
from megatron_gvpo.algorithms.members.hinted import Hinted
from megatron_gvpo.algorithms.members.off_policy import Demonstration, Replay, TeacherMember
from megatron_gvpo.core.user_functions import load_function
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.sampling.batch_sampler import ComposedSampler, PendingBatch, _checked
from megatron_gvpo.types import BatchTotals, TrainBatch


class Engine:
    """Engine that answers by script: responses are right if the prompt's text holds `answer`."""

    def __init__(self, step: int = 1, answer: str = "strong") -> None:
        self.step, self.seed, self.answer, self.longest_prompt = step, 5, answer, 6
        self.prompts: list[str] = []
        self.token_ids: list[tuple[int, ...]] = []

    def ask(self, prompts: Sequence[Prompt], n: int) -> list[Group]:
        self.prompts += [prompt.text for prompt in prompts]
        self.token_ids += [prompt.token_ids for prompt in prompts]
        return [
            Group(p, [Rollout([5], [-0.1], "five", "stop", 3, reward=float(self.answer in p.text))] * n)
            for p in prompts
        ]

    def extended(self, prompt: Prompt, text: str, *, before: bool = False) -> Prompt:
        return replace(prompt, text=text + prompt.text if before else prompt.text + text)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_response(self, text: str) -> list[int]:
        return [*self.encode(text), 0]

    def texts(self, function, groups, n, options):
        return load_function(function)(groups, n, **options)

    def mean_logp(self, prompts, responses):
        """Mean log-probs that rise with the length of the prompt's text."""
        return [-1.0 + 0.01 * len(prompt.text) for prompt in prompts]

    def score(self, groups: list[Group]) -> None:
        for rollout in (r for group in groups for r in group.rollouts):
            rollout.reward = float(len(rollout.text))


def test_history_mixes_the_newest_earlier_responses_in():
    history = Replay(count=2).build()
    first, second = make_group([1, 2, 3]), make_group([4, 5])
    assert [rewards_of(g) for g in history([first, make_group([9], "q")], Engine())] == [[1, 2, 3], [9]]
    (mixed,) = history([second], Engine())
    assert rewards_of(mixed) == [4, 5, 2, 3]
    assert [r.source for r in mixed.rollouts] == ["policy", "policy", "replay", "replay"]
    (third,) = history([make_group([6])], Engine())
    assert rewards_of(third) == [6, 4, 5], "replayed responses are not stored again"


def test_history_survives_a_checkpoint():
    uninterrupted, interrupted, resumed = (Replay(count=3).build() for _ in range(3))
    for history in (uninterrupted, interrupted):
        history([make_group([1, 2]), make_group([3], "q")], Engine())
    snapshot = interrupted.state_dict()
    interrupted([make_group([8])], Engine())
    resumed.load_state_dict(json.loads(json.dumps(snapshot)))
    assert resumed([make_group([5])], Engine()) == uninterrupted([make_group([5])], Engine())


@pytest.mark.parametrize("rewards", [[0, 0, 0, 0], [0, 1, 0, 0]])
def test_gcpo_injects_gold_where_every_response_fails(rewards):
    (group,) = Demonstration(when="all_wrong", place="replace")([make_group(rewards)], Engine())
    assert len(group.rollouts) == 4
    assert sorted(rewards_of(group), reverse=True) == [1, 0, 0, 0]
    sources = {rollout.source for rollout in group.rollouts}
    assert sources == ({"policy", "demonstration"} if max(rewards) == 0 else {"policy"})
    advantages = sorted(
        Estimator(scale="group_std")(TrainBatch.from_groups([group]))[0].tolist(), reverse=True
    )
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_wrong_answers_in_the_right_format_have_failed():
    """The reward `format` beside `math`, with a small weight, is the usual pair."""
    block = AlgorithmConfig(recipe="gcpo").members[0]
    (group,) = block([make_group([0.1, 0.1, 0, 0.1])], Engine())
    assert "demonstration" in {rollout.source for rollout in group.rollouts}
    (group,) = Hinted(fields=("strong",))([make_group([0.1, 0.1], record={"strong": "strong"})], Engine())
    assert len(group.rollouts) == 6


def test_the_slot_of_a_demonstration():
    group = make_group([0, 0, 0], lengths=[2, 9, 3], reasons=["stop", "stop", "length"])

    def slot(**options) -> int:
        (joined,) = Demonstration(place="replace", **options)([group], Engine())
        return [r.source for r in joined.rollouts].index("demonstration")

    assert slot(slot="longest") == 1 and slot(slot="truncated") == 2
    assert slot(slot="random") == slot(slot="random"), "every rank chooses alike"


def test_a_demonstration_that_is_too_long_or_missing_stays_out():
    group = make_group([0, 0])
    assert Demonstration(max_tokens=1)([group], Engine()) == [group]
    bare = Group(replace(group.prompt, demonstration=None), group.rollouts)
    assert Demonstration()([bare], Engine()) == [bare]
    assert len(Demonstration().sized(2)([group], Engine())[0].rollouts) == 3


def test_a_demonstration_has_no_log_prob_of_an_engine():
    (group,) = Demonstration()([make_group([0, 1])], Engine())
    rows = TrainBatch.from_groups([group])
    assert rows.demonstration_n.tolist() == [False, False, True]
    assert rows.engine_logp_r.isnan().tolist() == [False] * 4 + [True] * 2
    assert rows.sampled_by(0).tolist() == [True] * 4 + [False] * 2
    weight_r, _ = Truncate()(rows.with_columns(old_logp_r=torch.full((6,), -0.5)), BatchTotals.of(rows))
    assert weight_r.tolist() == [1.0] * 6


HINTS = {"weak": "weak", "strong": "strong"}


def test_hints_are_tried_from_the_weakest_and_only_where_all_fail():
    sampling = Engine()
    failed, solved = make_group([0, 0], record=HINTS), make_group([0, 1], record=HINTS)
    block = Hinted(fields=("weak", "strong"), n=2)
    groups = block([failed, solved], sampling)
    assert sampling.prompts == ["p\n\nHint: weak", "p\n\nHint: strong"]
    assert [rewards_of(group) for group in groups] == [[0, 0, 1, 1], [0, 1]]
    assert groups[0].prompt.text == "p", "the loss sees the prompt without the hint"
    assert [r.weight_version for r in groups[0].rollouts] == [0, 0, -1, -1]


def test_the_lowest_hint_that_succeeds_stays():
    sampling = Engine(answer="weak")
    groups = Hinted(fields=("weak", "strong"), n=1)([make_group([0], record=HINTS)], sampling)
    assert sampling.prompts == ["p\n\nHint: weak"] and rewards_of(groups[0]) == [0, 1]


def test_a_response_to_a_hint_that_counts_as_given_has_no_log_probs_of_the_hints_context():
    for source, has_logprobs in (("policy", True), ("demonstration", False)):
        [response] = taught([Rollout([5], [-0.5], "", "stop", 3)], source)
        assert bool(response.logprobs) == has_logprobs and response.source == source


def test_scaf_grpo_replaces_one_wrong_response_by_a_right_one():
    group = make_group([0, 0, 0], record=HINTS)
    block = Hinted(fields=("strong",), n=4, place="replace", keep="right")
    assert rewards_of(block([group], Engine())[0]) == [1, 1, 1], "as many as are right"
    block = Hinted(fields=("strong",), n=1, place="replace", keep="right", after_step=50)
    assert rewards_of(block([group], Engine(step=50))[0]) == [0, 0, 0], "not while it warms up"
    assert rewards_of(block([group], Engine(step=51))[0]) == [0, 0, 1]


def test_igrpo_trains_the_refinements_of_the_best_draft():
    group = make_group([0.2, 0.9, 0.9], texts=["bad", "good", "same"])
    block = Hinted(best_draft=True, when="always", n=2, prompt="hinted", keep_group=False)
    (refined,) = block([group], sampling := Engine(answer="good"))
    assert sampling.prompts == ["p\n\nHint: good"]
    assert refined.prompt.text == "p\n\nHint: good" and rewards_of(refined) == [1, 1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "and not both"),
        ({"fields": ["a"], "best_draft": True}, "and not both"),
        ({"fields": ["a"], "template": "none"}, "no {hint}"),
        ({"fields": ["a"], "prompt": "hinted", "place": "replace"}, "a group of its own"),
    ],
)
def test_hints_that_mean_nothing(options, problem):
    with pytest.raises(ValueError, match=problem):
        Hinted(**options)


def test_a_serial_group_leaves_its_thought_early():
    """With a prompt of 2 tokens, an inducer of 1 and room for 6, no exit lies behind the thought's third
    token.
    """
    group = make_group([0.5], lengths=[9])
    thought = group.rollouts[0]
    (serial,) = Exits(count=5, inducer="!")([group], sampling := Engine())
    assert sampling.token_ids == [(1, 2, *[7] * length, ord("!")) for length in (1, 2, 3)]
    assert [r.token_ids for r in serial.rollouts[:-1]] == [
        [*[7] * length, ord("!"), 5] for length in (1, 2, 3)
    ]
    assert serial.rollouts[-1] == thought
    assert all(r.weight_version == -1 and not r.logprobs for r in serial.rollouts[:-1])
    assert Exits(count=2, inducer="too long")([group], Engine()) == [group]


def test_a_serial_group_leaves_the_thinking_and_not_the_answer():
    group = make_group([1.0])
    group.rollouts[0].token_ids = [7, 7, ord("|"), 8, 8, 8]
    sampling = Engine()
    sampling.longest_prompt = 100
    (serial,) = Exits(count=5, inducer="!", end="|")([group], sampling)
    assert [r.token_ids for r in serial.rollouts] == [[7, ord("!"), 5], group.rollouts[0].token_ids]
    assert before([1, 2, 3, 2, 3], [2, 3]) == [1] and before([1, 2], [2, 3]) == [1, 2]
    assert before([1, 2], []) == [1, 2], "the tokenizer has no tokens for it"


def append(groups, n, suffix="?"):
    """Teacher that continues the best response."""
    return [[group.rollouts[0].text + suffix] * n for group in groups]


def test_a_teacher_joins_scored_like_the_others():
    block = TeacherMember(function="test_members:append", options={"suffix": "!!"}, n=2)
    (group,) = block([make_group([0, 0], texts=["a", "b"])], Engine())
    assert rewards_of(group) == [0, 0, 3, 3]
    demonstration = group.rollouts[2]
    assert demonstration.token_ids == [ord("a"), ord("!"), ord("!"), 0]
    assert demonstration.source == "demonstration"
    only_failed = TeacherMember(function="test_members:append", when="all_wrong")
    assert [len(g.rollouts) for g in only_failed([make_group([0]), make_group([1])], Engine())] == [2, 1]
    some = TeacherMember(function="test_members:append", share=0.5)([make_group([0])] * 100, Engine())
    assert 30 < sum(len(g.rollouts) == 2 for g in some) < 70


def sometimes(groups, n):
    """Teacher whose first text was cut off."""
    return [[None, *["b"] * (n - 1)] for _ in groups]


def test_a_text_that_a_teacher_does_not_have_joins_nothing():
    """It was the text `None`, with an end token behind it."""
    texts = _checked(sometimes([1], 2), 1, 2)
    assert texts == [[None, "b"]]
    (group,) = TeacherMember(function="test_members:sometimes", n=2)([make_group([0], texts=["a"])], Engine())
    assert [rollout.text for rollout in group.rollouts] == ["a", "b"]


@pytest.mark.parametrize(
    "adds",
    [
        {"name": "foresight"},
        {"name": "skills"},
        {"name": "learned_hint"},
        {"name": "hinted", "best_draft": True, "prompt": "hinted"},
    ],
)
def test_a_member_that_adds_groups_comes_last(adds):
    """Replay held responses to the changed prompts, and trained them as responses to the data's."""
    replay, own = {"name": "replay"}, {"name": "hinted", "fields": ["hint"]}
    with pytest.raises(ValueError, match=rf"members: {adds['name']} adds groups of prompts .*: put it last"):
        AlgorithmConfig.model_validate({"members": [adds, replay]})
    for members in ([replay, adds], [own, replay]):
        assert len(AlgorithmConfig.model_validate({"members": members}).members) == 2


def test_a_chat_model_is_asked_over_http():
    """The server answers by the name of the model; the second request meets no server."""
    requests, answers = [], {"judge": "B, not A", "mute": "?"}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, body["model"], body["messages"][0]["content"]))
            choices = [{"message": {"content": answers.get(body["model"], f"{i}")}} for i in range(body["n"])]
            answer = json.dumps({"choices": choices}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    group = make_group([0, 1], texts=["bad", "good"], record={"prompt": "1+1"})
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        texts = api_model.chat([group], 2, url=url, model="m", template="{prompt}: {best}, not {worst}")
        a, b = group.rollouts
        wins = [api_model.prefers(group.prompt, a, b, url=url, model=who) for who in ("judge", "mute")]
        server.shutdown()
    assert texts == [["0", "1"]]
    assert requests[0] == ("/v1/chat/completions", "m", "1+1: good, not bad")
    assert wins == [0.0, 0.5] and "A:\nbad\n\nB:\ngood" in requests[2][2]
    with pytest.raises(api_model.ApiModelError, match=r"/v1: prompt p: "):
        api_model.chat([group], 1, url=url, model="m", timeout=1)


def test_shapers_see_the_text_of_a_demonstration():
    """The data gives its tokens; a judge would take a solution without text for an empty response."""

    class Sampler:
        def finish(self, groups):
            return groups

    class Writer:
        def decode(self, token_ids):
            return " ".join(map(str, token_ids))

    sampler = ComposedSampler(Sampler(), Writer(), [Demonstration()], (0,))
    (group,) = sampler.complete(PendingBatch([make_group([0, 1])], None, 0), 1)
    assert [r.text for r in group.rollouts[:2]] == [r.text for r in make_group([0, 1]).rollouts]
    assert group.rollouts[2].text == " ".join(map(str, group.prompt.demonstration))


@pytest.mark.parametrize("estimator", [{"name": "shrunk"}, {"baseline": "prior", "age": "none"}])
def test_groups_without_an_expected_reward_are_refused_where_it_is_read(estimator):
    settings = {"recipe": "gpg", "prior": "tracker", "estimator": estimator}
    AlgorithmConfig(**settings, members=[{"name": "replay"}])
    with pytest.raises(ValueError, match="foresight adds groups of prompts that have no expected reward"):
        AlgorithmConfig(**settings, members=[{"name": "foresight"}])
