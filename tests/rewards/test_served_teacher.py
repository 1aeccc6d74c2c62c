"""A teacher on servers: its log-probs reach their tokens, no token is asked twice, and no fault is silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inputs.rows import make_group
from helpers.parts_of_a_run import served_teacher_of
from helpers.servers.real_servers import logprobs
from helpers.servers.reward_models import QUIET, make_judge, standing_in
from helpers.servers.teacher_servers import generated, teaching

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.rewards.teacher import PROBE, ServedTeacher
from megatron_gvpo.servers import model_requests
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.turns import Turn
from megatron_gvpo.types import TrainBatch

PROBED = 1  # requests before the first response


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_requests, "PAUSE", 0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judge(tmp_path_factory.mktemp("teacher"))


def teacher_of(good: Path, *urls: str, patience: float = 0.2, **own: Any) -> ServedTeacher:
    server = {"urls": list(urls), "start_timeout": patience, "request_timeout": 60, **own}
    section = json.dumps({"path": "teacher", "server": server})
    return served_teacher_of(load_config([good], ["algorithm.loss.reference=teacher", f"teacher={section}"]))


def rows_of(*responses: list[int]) -> TrainBatch:
    prompt = Prompt("p", (5, 6, 7), "1+1=")
    return TrainBatch.from_groups([Group(prompt, [Rollout(ids, [], "", "stop") for ids in responses])])


def test_log_probs_are_those_of_the_model_and_equal_responses_are_asked_once(good: Path, model: Path):
    responses = [[9, 8, 7], [4], [9, 8, 7], []]
    expected_r = torch.cat([logprobs(model, [5, 6, 7], ids) for ids in responses[:3]])
    with teaching(model) as (url, teacher), teacher_of(good, url) as served:
        rows = rows_of(*responses)
        served.ask([rows])
        found_r = served.score(rows)
        assert found_r.dtype == torch.float32 and torch.allclose(found_r, expected_r, atol=1e-6)
        assert len(teacher.requests) == PROBED + 2
        torch.testing.assert_close(served.score(rows.select([2, 1])), found_r[[4, 5, 6, 3]])
        served.ask([rows.select([1]), rows_of([9])])  # of the next step, which has a response again
        torch.testing.assert_close(served.score(rows.select([1])), found_r[3:4])
        served.score(rows_of([9]))
        assert len(teacher.requests) == PROBED + 3
        assert served.metrics["teacher/requests"] == 3 and served.metrics["teacher/tokens"] == 4
    body = teacher.requests[PROBED]
    assert body["input_ids"][:-1] in ([5, 6, 7, 9, 8, 7], [5, 6, 7, 4]), "token ids, as they were sampled"
    assert body["logprob_start_len"] == 2, "no log-probs of the prompt"


def test_every_turn_is_scored_in_its_own_context(good: Path, model: Path):
    """The second turn continues the first; the third forgot all but the prompt's first two tokens."""
    turns = [Turn(0), Turn(2, after=0, given=(11, 12)), Turn(3, after=-1, keep=2, given=(13,))]
    group = make_group([0.0], "p")
    group.rollouts[0].token_ids, group.rollouts[0].turns = [20, 21, 22, 23, 24], turns
    group.rollouts[0].logprobs = []
    group = Group(Prompt("p", (5, 6, 7), "x"), group.rollouts)
    rows = TrainBatch.from_groups([group])
    first = [5, 6, 7]
    expected_r = torch.cat(
        [
            logprobs(model, first, [20, 21]),
            logprobs(model, [*first, 20, 21, 11, 12], [22]),
            logprobs(model, [5, 6, 13], [23, 24]),
        ]
    )
    with teaching(model) as (url, teacher), teacher_of(good, url) as served:
        torch.testing.assert_close(served.score(rows), expected_r, atol=1e-6, rtol=0)
        assert len(teacher.requests) == PROBED + 2


def test_a_failing_server_is_asked_again_and_another_one_meanwhile(good: Path, model: Path):
    rows = rows_of([9, 8], [4])
    with (
        teaching(model) as (url, teacher),
        teaching(model) as (other, _),
        teacher_of(good, url, other) as served,
    ):
        teacher.status = 503
        expected_r = torch.cat([logprobs(model, [5, 6, 7], ids) for ids in ([9, 8], [4])])
        torch.testing.assert_close(served.score(rows), expected_r, atol=1e-6, rtol=0)
        assert served.metrics["teacher/failed_requests"] > 0


def test_an_outage_ends_the_run_and_names_what_it_waited_for(good: Path, model: Path):
    waited = 0

    def on_wait() -> None:
        nonlocal waited
        waited += 1

    with teaching(model) as (url, teacher), teacher_of(good, url, patience=0.1) as served:
        teacher.status = 503
        with pytest.raises(RolloutError, match=r"status 503.*for teacher\.server\.start_timeout=0\.1 s"):
            served.score(rows_of([9, 8]), on_wait)
        teacher.status = 400
        with pytest.raises(RolloutError, match=r"generate: status 400"):
            served.score(rows_of([4]))


def test_servers_of_different_models_are_refused(good: Path, model: Path, tmp_path: Path):
    def uniform(path: str, body: Any) -> Any:
        return {} if path in QUIET else generated(body, [-5.0] * (len(body["input_ids"]) - 2))

    with (
        teaching(model) as (url, _),
        standing_in(uniform) as other,
        pytest.raises(RolloutError, match=r"teacher\.server: .* gives fixed tokens log-probs up to"),
        teacher_of(good, url, other),
    ):
        pass


@pytest.mark.parametrize("fault", ["other tokens", "too few", "infinite", "nothing"])
def test_answers_that_are_no_log_probs_are_refused(good: Path, model: Path, fault: str):
    def answer(path: str, body: Any) -> Any:
        if path in QUIET:
            return {}
        right = generated(body, [-1.0] * (len(body["input_ids"]) - 2 - body["logprob_start_len"]))
        if body["input_ids"][:-1] == PROBE:
            return right
        entries = right["meta_info"]["input_token_logprobs"]
        match fault:
            case "other tokens":
                entries[1][1] += 1
            case "too few":
                del entries[1]
            case "infinite":
                entries[1][0] = float("-inf")
            case _:
                return {}
        return right

    with (
        standing_in(answer) as url,
        teacher_of(good, url, patience=0.1) as served,
        pytest.raises(RolloutError, match=r"its answer lacks fields|start_timeout"),
    ):
        served.score(rows_of([9, 8]))
