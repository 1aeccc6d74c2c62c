"""Reward models and judges whose servers fail, answer nonsense, or serve something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.inputs.chat_tokenizer import tokenizer
from helpers.parts_of_a_run import served_rewards_of
from helpers.servers.reward_models import Answer, make_reward_model, scores, standing_in

from megatron_gvpo.checks.preflight import check_served
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.data.prompts import load_prompts
from megatron_gvpo.groups import LOST, Group, Prompt, Rollout
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.rewards.judge import as_text, scored_chat
from megatron_gvpo.sampling.samplers import REWARDS, Outages
from megatron_gvpo.servers import model_requests
from megatron_gvpo.settings.config import Config, load_config
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_requests, "PAUSE", 0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("model"), "qwen2")


def config_of(good: Path, component: dict[str, Any]) -> Config:
    return load_config([good], [f"rewards.components={json.dumps([{'name': 'quality', **component}])}"])


def a_model(model: Path, *urls: str, patience: float = 0.2, **own: Any) -> dict[str, Any]:
    servers = {"urls": list(urls), "start_timeout": patience, "request_timeout": 60}
    return {"model": {"path": str(model), "dtype": "float32", "servers": servers, **own}}


def groups_of(*texts: str) -> list[Group]:
    prompt = Prompt("p", (5,), "1+1=", "2", record={"prompt": "1+1="})
    return [Group(prompt, [Rollout([5], [-0.5], text, "stop") for text in texts])]


def scored(config: Config, *texts: str) -> list[Rollout]:
    groups = groups_of(*texts)
    with served_rewards_of(config) as served:
        served.score(groups, lambda: None)
    return groups[0].rollouts


def test_a_judge_reads_the_calls_of_a_programs_messages() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    assert as_text(messages) == 'assistant: {"name": "add", "arguments": "{}"}\n\ntool: 5'


def test_a_reward_model_reads_the_chat_of_a_program_once() -> None:
    """Two messages of the user in a row are refused by many templates."""
    [group] = groups_of("2")
    [rollout] = group.rollouts
    question, answer = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    for rollout.messages in ([], [answer], [question, answer]):
        assert scored_chat(group.prompt, rollout) == [question, answer]


def test_a_prompt_is_scored_as_its_own_data_set_names_it(tmp_path: Path) -> None:
    """The held-out records have a field of the training prompts' name too, with another text."""
    file = tmp_path / "held_out.jsonl"
    file.write_text(json.dumps({"prompt": "Level 3", "question": "1+1=", "answer": "2"}))
    held_out = DatasetConfig(path=str(file), prompt_key="question")
    data = DataConfig(train=DatasetConfig(path="train.jsonl"), eval=held_out)
    [prompt] = load_prompts(held_out, data, tokenizer(), longest=99, end_token_ids=(1,))
    chat = scored_chat(prompt, Rollout([5], [-0.5], "2", "stop"))
    assert [message["content"] for message in chat] == ["1+1=", "2"]


def test_scores_reach_their_responses_and_equal_ones_are_asked_once(good: Path, model: Path):
    lengths: list[int] = []

    def length(ids: list[int]) -> float:
        lengths.append(len(ids))
        return len(ids) / 8

    with standing_in(scores(length)) as url:
        rollouts = scored(config_of(good, a_model(model, url, batch_size=2)), "a", "bbb", "a", "bb", "c")
    assert len(lengths) == 1 + 4, "the probe, and each different response"
    rewards = [rollout.reward for rollout in rollouts]
    assert rewards[1] == rewards[0] + 2 / 8 and rewards[3] == rewards[0] + 1 / 8
    assert rewards[2] == rewards[0] == rewards[4]
    assert all(rollout.rewards == {"quality": rollout.reward} for rollout in rollouts)


@pytest.mark.parametrize("score", [10**400, 10**39, float("nan"), None, "good"])
def test_a_score_that_is_no_number_to_train_on_ends_the_run_by_name(good: Path, model: Path, score: Any):
    with (
        standing_in(scores(lambda ids: score)) as url,
        pytest.raises(RolloutError, match=r"does not give each text one finite number of at most 3\.4e\+38"),
    ):
        scored(config_of(good, a_model(model, url)), "a")


def sglang(*scores: Any, tokens: Any = None) -> Callable[[list[list[int]]], Any]:
    """An answer of SGLang with these scores, whatever was sent."""
    return lambda texts: [
        {"embedding": [score], "meta_info": {"prompt_tokens": len(ids) if tokens is None else tokens}}
        for score, ids in zip(scores, [*texts, *texts], strict=False)
    ]


def vllm(*indices: Any) -> Callable[[list[list[int]]], Any]:
    return lambda texts: {
        "data": [{"index": i, "probs": [0.5]} for i in indices],
        "usage": {"prompt_tokens": sum(map(len, texts))},
    }


LIES: dict[str, tuple[str, Callable[[list[list[int]]], Any]]] = {
    "a score too few": ("sglang", sglang(0.5)),
    "a score too many": ("sglang", sglang(0.5, 0.5, 0.5)),
    "two labels": ("sglang", lambda texts: [one | {"embedding": [0.5, 0.5]} for one in sglang(1, 1)(texts)]),
    "a text": ("sglang", sglang("0.5", "0.5")),
    "true": ("sglang", sglang(True, True)),
    "NaN": ("sglang", sglang(0.5, float("nan"))),
    "no object": ("sglang", lambda texts: ["error", "error"]),
    "tokens as a text": ("sglang", sglang(0.5, 0.5, tokens="7")),
    "200 with an error": ("sglang", lambda texts: {"error": {"message": "CUDA error", "code": 500}}),
    "null": ("sglang", lambda texts: None),
    "a number": ("sglang", lambda texts: 7.5),  # an int is a status
    "200 with an error of vLLM": ("vllm", lambda texts: {"object": "error", "message": "no", "code": 500}),
    "the same index twice": ("vllm", vllm(0, 0)),
    "an index beyond": ("vllm", vllm(0, 2)),
    "an index that is a text": ("vllm", vllm("0", "1")),
    "indices of two types": ("vllm", vllm(0, "1")),
    "no data": ("vllm", vllm()),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_no_reward_model_gives_is_never_a_reward(good: Path, model: Path, lie: str):
    """The server answers well while it is checked, and lies about the first batch of two."""
    engine, false = LIES[lie]
    of_all = {"sglang": lambda n: sglang(*[0.5] * n), "vllm": lambda n: vllm(*range(n))}[engine]

    def answer(path: str, body: Any) -> Any:
        if path != "/classify":
            return {}
        texts = body["input_ids" if engine == "sglang" else "input"]
        return (false if len(texts) > 1 else of_all(len(texts)))(texts)

    groups = groups_of("a", "bb")
    with standing_in(answer) as url:
        component = a_model(model, url)
        component["model"]["servers"]["engine"] = engine
        with served_rewards_of(config_of(good, component)) as served:
            try:
                served.score(groups, lambda: None)
            except RolloutError as error:
                assert "/classify does not give" in str(error) or "was cut" in str(error)
                return
    for rollout in groups[0].rollouts:
        assert rollout.finish_reason == LOST and "its answer has no scores" in rollout.text
        assert not rollout.rewards


def test_an_outage_is_no_reward_of_zero(good: Path, model: Path):
    up = True

    def answer(path: str, body: Any) -> Any:
        return scores(len)(path, body) if up else 503

    groups = [*groups_of("a", "b"), *groups_of("c")]
    with standing_in(answer) as url:
        config = config_of(good, a_model(model, url))
        with served_rewards_of(config) as served:
            up = False
            served.score(groups, lambda: None)
    lost = [rollout for group in groups for rollout in group.rollouts]
    assert [rollout.finish_reason for rollout in lost] == [LOST] * 3
    assert "reward quality: http://127.0.0.1" in lost[0].text and "status 503" in lost[0].text
    assert "for rewards.components.0.model.servers.start_timeout=0.2 s" in lost[0].text
    assert not any(rollout.rewards for rollout in lost)
    unaffected = groups_of("d", "e", "f")
    outages = Outages(0.6, REWARDS)
    assert outages.taken_out([*groups, *unaffected, *unaffected]) == [*unaffected, *unaffected]
    assert outages.metrics == {"reward/lost": pytest.approx(1 / 3), "reward/dropped_groups": 2.0}
    with pytest.raises(
        RolloutError, match=r"3 of 3 responses were lost to reward models .*rewards\.max_lost"
    ):
        outages.taken_out(groups)


def test_a_server_that_fails_for_a_while_costs_nothing(good: Path, model: Path):
    failures = 3

    def answer(path: str, body: Any) -> Any:
        nonlocal failures
        if body is not None and len(body["input_ids"]) > 1 and failures:
            failures -= 1
            return 500
        return scores(len)(path, body)

    with standing_in(answer) as url:
        rollouts = scored(config_of(good, a_model(model, url, patience=60)), "a", "bb")
    assert failures == 0 and rollouts[1].reward == rollouts[0].reward + 1


def test_what_is_too_long_is_refused_by_name_or_dropped_and_never_cut_off(good: Path, model: Path):
    with standing_in(scores(len)) as url:
        long = "x" * 300
        with pytest.raises(
            RolloutError, match=r"prompt p: with its response it has \d+ tokens.* takes 255: low"
        ):
            scored(config_of(good, a_model(model, url)), "a", long)
        rollouts = scored(config_of(good, a_model(model, url, too_long="drop")), "a", long)
        assert [rollout.finish_reason for rollout in rollouts] == ["stop", LOST]
    cut = scores(len, counted=lambda ids: min(len(ids), 20))
    problem = r"has read 20 tokens, and \d+ were sent: the server cuts off"
    with standing_in(cut) as url, pytest.raises(RolloutError, match=problem):
        scored(config_of(good, a_model(model, url)), "a")


def test_one_response_that_a_server_refuses_costs_no_other(good: Path, model: Path):
    def answer(path: str, body: Any) -> Any:
        refused = body is not None and any(len(ids) > 60 for ids in body["input_ids"])
        return 400 if refused else scores(len)(path, body)

    with standing_in(answer) as url:
        rollouts = scored(config_of(good, a_model(model, url)), "a", "b" * 60, "c")
    assert [rollout.finish_reason for rollout in rollouts] == ["stop", LOST, "stop"]
    assert "status 400" in rollouts[1].text


def test_servers_of_different_models_are_refused(good: Path, model: Path):
    problem = r"gives a fixed text the score 1(\.5)?, and it had .* another model"
    with standing_in(scores(lambda ids: 1.0)) as one, standing_in(scores(lambda ids: 1.5)) as other:
        config = config_of(good, a_model(model, one, other))
        with pytest.raises(RolloutError, match=problem):
            scored(config, "a")


def test_a_server_that_comes_back_with_another_model_ends_the_run(good: Path, model: Path):
    score, down = 1.0, False

    def answer(path: str, body: Any) -> Any:
        nonlocal down, score
        if down:
            down, score = False, 2.0
            return 503
        return scores(lambda ids: score)(path, body)

    with standing_in(answer) as url, served_rewards_of(config_of(good, a_model(model, url))) as served:
        down = True
        with pytest.raises(RolloutError, match="serves another model"):
            served.score(groups_of("a"), lambda: None)


# Judges.


def verdicts(*texts: str, reason: str = "stop") -> tuple[Answer, list[Any]]:
    """A judge that says these, one after the other, and the requests that it got."""
    remaining_texts, requests = list(texts), []

    def answer(path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "a-judge"}]}
        assert path == "/v1/chat/completions"
        requests.append(body)
        return {"choices": [{"message": {"content": remaining_texts.pop(0)}, "finish_reason": reason}]}

    return answer, requests


def a_judge(url: str, **own: Any) -> dict[str, Any]:
    servers = {"urls": [url], "start_timeout": 0.2}
    return {"judge": {"model": "a-judge", "servers": {**servers, **own.pop("servers", {})}, **own}}


def test_a_verdict_becomes_a_reward_with_its_explanation(good: Path):
    answer, requests = verdicts('{"explanation": "It is right.", "score": 7}')
    with standing_in(answer) as url:
        [rollout] = scored(
            config_of(good, a_judge(url, template="{prompt} {answer} {response} {highest}")), "{answer}"
        )
    assert rollout.reward == 0.7 and rollout.explanations == {"quality": "It is right."}
    assert requests[0]["messages"] == [{"role": "user", "content": "1+1= 2 {answer} 10"}], (
        "one pass of filling in"
    )
    form = requests[0]["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"]["properties"]["score"] == {
        "type": "integer",
        "minimum": 0,
        "maximum": 10,
    }


@pytest.mark.parametrize(
    ("invalid", "problem"),
    [
        ("seven", "not JSON"),
        ("[7]", "not a JSON object"),
        ('{"explanation": "good"}', "no score between 0 and 10"),
        ('{"score": 11}', "no score between 0 and 10"),
        ('{"score": 1, "score": 9}', "not JSON (field 'score' is given twice)"),
        ('{"score": true}', "no score between 0 and 10"),
        ('{"score": NaN}', "no score between 0 and 10"),
        (f'{{"score": {10**400}}}', "no score between 0 and 10"),
        ('{"score": [7]}', "no score between 0 and 10"),
        ("  ", "it has no text"),
    ],
)
def test_an_invalid_verdict_is_asked_for_again_with_the_reason(good: Path, invalid: str, problem: str):
    answer, requests = verdicts(invalid, '{"score": 3}')
    with standing_in(answer) as url:
        [rollout] = scored(config_of(good, a_judge(url)), "2")
    assert rollout.reward == 0.3
    verdict, correction = requests[1]["messages"][1:]
    assert verdict == {"role": "assistant", "content": invalid.strip()}
    assert correction["role"] == "user" and f"This is not a valid verdict: {problem}" in correction["content"]


def test_a_response_without_a_valid_verdict_leaves_its_group(good: Path):
    answer, requests = verdicts(*["seven"] * 2)
    with standing_in(answer) as url:
        [rollout] = scored(config_of(good, a_judge(url, tries=2)), "2")
    assert rollout.finish_reason == LOST and len(requests) == 2 and not rollout.rewards
    assert "rewards.components.0.judge: no valid verdict in 2 tries: not JSON" in rollout.text
    answer, _ = verdicts('{"score": 3', reason="length")
    with standing_in(answer) as url:
        [rollout] = scored(config_of(good, a_judge(url, tries=1)), "2")
    assert rollout.finish_reason == LOST and "it was longer than max_tokens" in rollout.text


@pytest.mark.parametrize(("engine", "key"), [("sglang", "regex"), ("vllm", "structured_outputs")])
def test_a_regular_expression_goes_to_the_server_and_reads_the_score(good: Path, engine: str, key: str):
    answer, requests = verdicts("Score: 4")
    with standing_in(answer) as url:
        own = {"regex": r"Score: (\d+)", "scale": [0, 5], "servers": {"engine": engine}}
        [rollout] = scored(config_of(good, a_judge(url, **own)), "2")
    assert rollout.reward == pytest.approx(0.8) and rollout.explanations == {"quality": "Score: 4"}
    assert key in requests[0] and "response_format" not in requests[0]


def test_a_server_without_the_judge_is_refused(good: Path):
    with standing_in(verdicts()[0]) as url:
        component = a_judge(url)
        component["judge"]["model"] = "another"
        with pytest.raises(RolloutError, match=r"judge\.model=another: http.* has a-judge"):
            scored(config_of(good, component), "2")


@pytest.mark.parametrize(
    ("component", "problem"),
    [
        (
            {"function": "x:y", "model": {"path": "m"}},
            r"components\.0: give one of function, model and judge",
        ),
        ({"model": {"path": "m"}, "options": {"a": 1}}, r"options are for a function"),
        ({"model": {}}, r"components\.0\.model\.path: missing"),
        ({"judge": {}}, r"give either path, for servers that the trainer starts, or servers\.urls"),
        ({"judge": {"servers": {"urls": ["http://a:1"]}}}, r"model is missing"),
        ({"judge": {"path": "m", "template": "Grade it."}}, r"\{response\} is missing"),
        ({"judge": {"path": "m", "scale": [3, 3]}}, r"want the lowest score and a higher one"),
        ({"judge": {"path": "m", "regex": "["}}, r"not a regular expression"),
        ({"judge": {"path": "m", "regex": "Score"}}, r"it has no group"),
        ({"judge": {"path": "m", "json_schema": {"type": "object"}}}, r"it has no property 'score'"),
        ({"judge": {"path": "m", "servers": {"engine": "openai"}}}, r"engine=openai needs servers\.urls"),
    ],
)
def test_settings_that_cannot_work_are_refused(good: Path, component: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        config_of(good, component)


def test_methods_that_need_every_reward_are_refused(good: Path):
    with pytest.raises(
        ConfigError, match=r"quality asks a model on servers.* teacher needs a reward for every"
    ):
        member = {"name": "teacher", "function": "megatron_gvpo.api_model:repeat_best"}
        component = [{"name": "quality", "model": {"path": "m"}}]
        load_config(
            [good],
            [f"rewards.components={json.dumps(component)}", f"algorithm.members={json.dumps([member])}"],
        )


def test_a_checkpoint_that_is_no_reward_model_is_refused(good: Path, tmp_path: Path, model: Path):
    def check(**changed: Any) -> None:
        values = json.loads((model / "config.json").read_text()) | changed
        (tmp_path / "config.json").write_text(json.dumps(values))
        served = config_of(good, a_model(tmp_path)).rewards.components[0].served
        assert served is not None
        check_served(served, "rewards.components.0.model", ModelCard.read(tmp_path))

    check()
    with pytest.raises(ConfigError, match=r"its architecture is Qwen2ForCausalLM, and a reward model is a"):
        check(architectures=["Qwen2ForCausalLM"])
    with pytest.raises(ConfigError, match=r"it has 3 labels, and a reward model has one"):
        check(id2label={"0": "a", "1": "b", "2": "c"})
