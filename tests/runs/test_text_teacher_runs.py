"""GVPO++ from a teacher with another tokenizer, in the trainer and on a server, against transformers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers.inputs.text_teachers import make_teacher
from helpers.paths import ROOT
from helpers.servers.teacher_servers import teaching
from helpers.tiny_run import SHORT, KeepGroups, configure, fit, make_task, records
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.groups import Group
from megatron_gvpo.replay.findings import Finding
from megatron_gvpo.replay.run import replay
from megatron_gvpo.runs.one_machine import load_run
from megatron_gvpo.settings.config import Config, load_config

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher"))


def taught(task: Path, out: Path, teacher: Path, *more: str) -> Config:
    own = ("algorithm=gvpo_plus_plus", "rewards.components=[]", "train.steps=1", f"teacher.path={teacher}")
    return configure(task, out, *own, *SHORT, "optimizer.warmup_steps=0", *more)


class Reference:
    """The teacher's log-probs of texts by transformers in fp64, and the policy's own text of responses."""

    def __init__(self, task: Path, teacher: Path) -> None:
        self.policy = AutoTokenizer.from_pretrained(task / "model")
        self.tokenizer = AutoTokenizer.from_pretrained(teacher)
        self.model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)

    def sum(self, prompt: str, response: list[int]) -> tuple[float, int]:
        """(log-prob of the response's text after the prompt's, its number of tokens)."""
        ended = response[-1] == self.policy.eos_token_id
        text = self.policy.decode(response[:-1] if ended else response)
        first = self.tokenizer(prompt)["input_ids"]
        ids = self.tokenizer(prompt + text)["input_ids"]
        common = next((i for i, (a, b) in enumerate(zip(first, ids, strict=False)) if a != b), len(first))
        ids = [*ids, self.tokenizer.eos_token_id] if ended else ids
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0]
        logp = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[common - 1 :, 0]
        return logp.sum().item(), len(logp)


def check(reference: Reference, groups: list[Group], line: dict[str, float]) -> None:
    """Compare a step's metrics with the reference."""
    rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    trained = [(prompt, rollout) for prompt, rollout in rollouts if rollout.trained]
    special = reference.policy.pad_token_id
    assert {r.trained for _, r in rollouts} == {True, False}, "the seed gives both"
    assert all(special in rollout.token_ids for _, rollout in rollouts if not rollout.trained)
    assert not any(special in rollout.token_ids for _, rollout in trained)
    sums = [reference.sum(prompt.text, rollout.token_ids) for prompt, rollout in trained]
    own = sum(sum(rollout.logprobs) for _, rollout in trained)
    tokens = sum(len(rollout.token_ids) for _, rollout in trained)
    assert line["train/log_ratio"] == pytest.approx((own - sum(t for t, _ in sums)) / tokens, abs=1e-5)
    assert line["teacher/excluded"] == line["teacher/excluded_special"] == 1 - len(trained) / len(rollouts)
    assert line["teacher/length_ratio"] == pytest.approx(sum(n for _, n in sums) / tokens)
    assert line["train/grad_norm"] > 0 and math.isfinite(line["train/loss"])


def test_the_text_is_scored_in_the_trainer_and_on_a_server(
    task: Path, teacher: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    reference, recorder = Reference(task, teacher), KeepGroups()
    fit(taught(task, tmp_path / "trainer", teacher), [recorder])
    [_, line] = records(tmp_path / "trainer")
    check(reference, recorder.groups, line)
    findings: list[Finding] = []
    assert replay(load_run(tmp_path / "trainer"), 1, True, findings.append) is None
    [text] = {f.text for f in findings if f.component == "references" and f.outcome == "not checked"}
    assert text == "the teacher read texts, not tokens"
    assert "the teacher scores the text of responses" in caplog.text
    assert "have a special token, the policy's or the teacher's, inside their text" in caplog.text
    with teaching(teacher) as (url, served):
        server = f"teacher.server={{urls: ['{url}'], start_timeout: 0.3}}"
        fit(taught(task, tmp_path / "server", teacher, server))
        [_, other] = records(tmp_path / "server")
        texts = {(g.prompt.text, r.text) for g in recorder.groups for r in g.rollouts if r.trained}
        assert len(served.requests) == 1 + len(texts), "a text is sent once"
    for name in ("train/log_ratio", "train/loss", "train/grad_norm", "teacher/excluded", "teacher/joint"):
        assert other[name] == pytest.approx(line[name], rel=1e-4), name


def test_a_batch_that_the_teacher_cannot_read_ends_the_run(task: Path, tmp_path: Path):
    """A teacher whose context is shorter than every prompt can score nothing."""
    teacher = make_teacher(tmp_path / "teacher", max_position_embeddings=4)
    with pytest.raises(RolloutError, match=r"no response of the batch is trained.*max_empty_batches"):
        fit(taught(task, tmp_path / "out", teacher, "train.max_empty_batches=1"))


@pytest.mark.parametrize(
    ("method", "reader"),
    [
        ("opd", r"algorithm\.estimator=distillation"),
        ("opd_full", r"algorithm\.loss\.divergence=reverse"),
        ("gvpo_teacher_logprobs", r"algorithm\.loss=gvpo"),
        ("{recipe: grpo, loss: {kl_coef: 0.1, reference: teacher}}", r"algorithm\.loss=ppo"),
        ("{recipe: gvpo_plus_plus, loss: {divergence: {coef: 0.1}}}", r"algorithm\.loss\.divergence=reverse"),
    ],
)
def test_every_other_method_refuses_it_and_names_the_recipe(
    task: Path, teacher: Path, tmp_path: Path, method: str, reader: str
):
    config = taught(
        task, tmp_path / "out", teacher, f"algorithm={method}", "rewards.components=[{name: math}]"
    )
    with pytest.raises(ConfigError, match=rf"model\.path, .*: {reader} reads .* recipe gvpo_plus_plus takes"):
        preflight(config, "train", 1)


ENVIRONMENT = """
class Asks:
    def reset(self, prompt, seed): pass
    def step(self, response): return "1+1="
"""


def test_turns_are_scored_after_what_came_before(task: Path, teacher: Path, tmp_path: Path):
    """Without a chat template, texts follow each other."""
    (tmp_path / "asks.py").write_text(ENVIRONMENT)
    talks = f"rollout.conversation={{environment: '{tmp_path}/asks.py:Asks', turns: 2, turn_tokens: 8}}"
    reference, recorder = Reference(task, teacher), KeepGroups()
    fit(taught(task, tmp_path / "out", teacher, talks, "rollout.max_tokens=40", "rollout.n=8"), [recorder])
    [_, line] = records(tmp_path / "out")
    trained = [(g.prompt, r) for g in recorder.groups for r in g.rollouts if r.trained]
    assert any(len(rollout.turns) == 2 for _, rollout in trained)
    total = sum(sum(rollout.logprobs) for _, rollout in trained)
    for prompt, rollout in trained:
        begins = [turn.begin for turn in rollout.turns]
        before = prompt.text
        for begin, end in zip(begins, [*begins[1:], None], strict=True):
            own = rollout.token_ids[begin:end]
            total -= reference.sum(before, own)[0]
            before += reference.policy.decode(own, skip_special_tokens=True) + "1+1="
    tokens = sum(len(rollout.token_ids) for _, rollout in trained)
    assert line["train/log_ratio"] == pytest.approx(total / tokens, abs=1e-5)


def test_smollm2_may_teach_any_model():
    files = [ROOT / "examples" / "smollm2" / name for name in ("gvpo.yaml", "teach.yaml")]
    config = load_config(files, ["model.path=student"])
    assert config.algorithm.loss.name == "gvpo_plus_plus" and config.algorithm.reference_logprobs == "trainer"
    assert config.teacher is not None and config.teacher.path == "runs/smollm2/hf"


def test_a_teacher_with_the_policys_tokenizer_reads_its_tokens(task: Path, tmp_path: Path):
    make_task.make_model(tmp_path / "teacher", seed=1)
    fit(taught(task, tmp_path / "out", tmp_path / "teacher"))
    [_, line] = records(tmp_path / "out")
    assert not any(name.startswith("teacher/") for name in line)
