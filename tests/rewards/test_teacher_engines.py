"""Teachers on real SGLang and vLLM servers: log-probs are those of transformers, also when servers die."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers.inputs import chat_tokenizer
from helpers.inputs.text_teachers import text_for
from helpers.parts_of_a_run import served_teacher_of
from helpers.servers.real_servers import PROMPTS, SharedServer, engine_python, logprobs
from helpers.servers.reward_models import make_judge
from helpers.suite.real_parts import used
from helpers.tiny_run import make_task
from transformers import AutoTokenizer

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.rewards.teacher import ServedTeacher
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.training.text_teacher import TextTeacher
from megatron_gvpo.types import TrainBatch

RESPONSES = [[7, 11, 4], [3], [19, 18, 17, 16, 15, 14, 13, 12] * 3, [7, 11, 5]]


def teacher(good: Path, path: Path, server: dict[str, object], *more: str) -> ServedTeacher:
    section = json.dumps({"path": str(path), "server": {"start_timeout": 300, **server}})
    own = ("algorithm.loss.reference=teacher", "model.dtype=float32", f"teacher={section}")
    return served_teacher_of(load_config([good], [*own, *more]))


def batch() -> TrainBatch:
    rollouts = [Rollout(ids, [], "", "stop") for ids in RESPONSES]
    return TrainBatch.from_groups(
        [Group(Prompt(f"p{i}", tuple(prompt), ""), list(rollouts)) for i, prompt in enumerate(PROMPTS)]
    )


def expected(path: Path, rows: TrainBatch) -> torch.Tensor:
    pairs = zip(rows.prompt_ids, rows.response_ids, strict=True)
    return torch.cat([logprobs(path, list(prompt), list(response)) for prompt, response in pairs])


def test_log_probs_are_those_of_transformers(served: SharedServer, task: Path, good: Path):
    rows = batch()
    with teacher(good, task / "model", {"engine": served.engine, "urls": [served.url]}) as scorer:
        scorer.ask([rows])
        torch.testing.assert_close(scorer.score(rows), expected(task / "model", rows), rtol=0, atol=2e-4)
        assert scorer.metrics["teacher/failed_requests"] == 0
        too_long = TrainBatch.from_groups(
            [Group(Prompt("p", (5,), ""), [Rollout([7] * 300, [], "", "stop")])]
        )
        with pytest.raises(RolloutError, match=r"status 400: .*(256|context)"):
            scorer.score(too_long)


def test_a_response_of_another_tokenizer_is_scored_as_text(served: SharedServer, task: Path, good: Path):
    """Sums of the teacher's own tokens, with its end where the response ended; one response is excluded."""
    policy, own = chat_tokenizer.tokenizer(None), AutoTokenizer.from_pretrained(task / "model")
    text = TextTeacher(text_for(policy, [chat_tokenizer.END], own, end=own.eos_token))
    prompt = Prompt("p", chat_tokenizer.ids(policy, "7+5-9="), "7+5-9=", record={"prompt": "7+5-9="})
    ended, cut = "7+5=12\n12-9=3\n\\boxed{3}", "7+5="
    responses = [(*chat_tokenizer.ids(policy, ended), chat_tokenizer.END), chat_tokenizer.ids(policy, cut)]
    responses.append(chat_tokenizer.ids(policy, "seven"))  # the teacher has no letters
    [group], warnings = text.begin([Group(prompt, [Rollout(list(r), [], "", "stop") for r in responses])], 1)
    assert [rollout.trained for rollout in group.rollouts] == [True, True, False]
    assert len(warnings) == 1 and "the teacher's tokenizer does not give back" in warnings[0]
    rows = TrainBatch.from_groups([group]).trained()
    with teacher(good, task / "model", {"engine": served.engine, "urls": [served.url]}) as scorer:
        scorer.ask([text.rows(rows)])
        sums_n = rows.sequence_sum(text.spread(rows, scorer.score(text.rows(rows))))
    first = own("7+5-9=")["input_ids"]
    answers = [[*own(ended)["input_ids"], own.eos_token_id], own(cut)["input_ids"]]
    expected_n = torch.stack([logprobs(task / "model", first, ids).sum() for ids in answers])
    torch.testing.assert_close(sums_n, expected_n, rtol=0, atol=2e-3)


def test_a_server_of_another_model_than_the_configured_is_refused(
    served: SharedServer, task: Path, good: Path, tmp_path: Path
):
    """It would teach, and the run would say that `teacher.path` did."""
    at = {"engine": served.engine, "urls": [served.url]}
    shutil.copytree(task / "model", tmp_path / "copy")
    with teacher(good, tmp_path / "copy", at):
        pass
    make_task.make_model(tmp_path / "other", seed=1)
    with (
        pytest.raises(RolloutError, match=rf"teacher.path={tmp_path}/other: .* serves .*, which has other"),
        teacher(good, tmp_path / "other", at),
    ):
        pass


@pytest.mark.proof
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_that_the_run_started_answers_again_after_it_was_killed(
    engine: str, good: Path, tmp_path: Path
):
    model = make_judge(tmp_path / "model")
    rows, own = batch(), {"engine": engine, "python": engine_python(engine)}
    with teacher(good, model, own, f"output_dir={tmp_path / 'run'}") as scorer:
        torch.testing.assert_close(scorer.score(rows), expected(model, rows), rtol=0, atol=2e-4)
        assert scorer._servers is not None and scorer._servers._addresses.supervisor is not None
        [process] = scorer._servers._addresses.supervisor.processes
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        scorer.ask([])  # a new step: nothing is known any more
        torch.testing.assert_close(scorer.score(rows), expected(model, rows), rtol=0, atol=2e-4)
        assert scorer.metrics["teacher/failed_requests"] > 0
    used(f"{engine} server")
