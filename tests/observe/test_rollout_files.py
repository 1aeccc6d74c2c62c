"""The responses of real runs as Parquet files: their values, the limit on disk, resumed runs, readers."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.distributed import launch
from helpers.suite.package_log import own_records
from helpers.tiny_run import GVPO, SHORT, StopAfter, configure, fit, records

from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.observe.rollouts.reader import read_rollouts, saved_steps
from megatron_gvpo.observe.rollouts.schema import COLUMNS, file_name, schema
from megatron_gvpo.observe.rollouts.table import Responses, table
from megatron_gvpo.observe.rollouts.writer import RolloutWriter
from megatron_gvpo.observe.samples import few_samples, one_line
from megatron_gvpo.settings.sections import RolloutFilesConfig
from megatron_gvpo.turns import Turn

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


def rows(out: Path, kind: str = "train", **chosen: object) -> list[dict]:
    return read_rollouts(out, kind, **chosen).to_pylist()


def test_a_run_saves_every_response(finished):
    assert saved_steps(finished) == [1, 2, 3, 4]
    assert saved_steps(finished, "eval") == [0, 2, 4]
    assert sorted(path.name for path in (finished / "rollouts").iterdir()) == sorted(
        [file_name("train", s) for s in (1, 2, 3, 4)] + [file_name("eval", s) for s in (0, 2, 4)]
    )
    lines = {line["step"]: line for line in records(finished)}
    for step in (1, 2, 3, 4):
        saved_rows = rows(finished, steps=[step])
        assert [(r["group"], r["member"]) for r in saved_rows] == [(g, m) for g in range(4) for m in range(4)]
        assert {r["step"] for r in saved_rows} == {step} and {r["kind"] for r in saved_rows} == {"train"}
        assert np.mean([r["reward"] for r in saved_rows]) == pytest.approx(lines[step]["reward/mean"])
        assert (
            {r["version_first"] for r in saved_rows} == {r["version_last"] for r in saved_rows} == {step - 1}
        )
        for r in saved_rows:
            assert r["response_tokens"] == len(r["response_ids"]) > 0
            assert r["response"] or r["response_tokens"] == 1, "an end token alone has no text"
            assert r["prompt_tokens"] == len(r["prompt_ids"]) > 0 and r["prompt"] and r["prompt_id"]
            variety = len(set(r["response_ids"])) / len(r["response_ids"])
            assert r["reward"] == r["rewards"]["variety"] == pytest.approx(variety)
            assert r["reward_errors"] == {"variety": None}
            assert r["finish_reason"] == "stop" or r["response_tokens"] == 10
            assert r["seconds"] > 0 and r["server"] is None and r["source"] == "policy"
    for r in rows(finished, "eval"):
        assert r["trainer_logprobs"] is r["weight"] is r["weights"] is r["advantage"] is None
        assert r["version_first"] == r["step"] and len(r["rollout_logprobs"]) == r["response_tokens"]


def test_the_trainers_numbers_belong_to_their_tokens(finished):
    """Engine and trainer compute the same log-probs, so a shifted or swapped row would show."""
    lines = {line["step"]: line for line in records(finished)}
    for step in (1, 2, 3, 4):
        saved_rows = rows(finished, steps=[step])
        gaps = [np.subtract(r["trainer_logprobs"], r["rollout_logprobs"]) for r in saved_rows]
        assert max(np.abs(gap).max() for gap in gaps) < 1e-4, "by the policy at the step's start"
        compared = np.concatenate(gaps).astype(np.float64)
        assert np.abs(compared).mean() == pytest.approx(lines[step]["mismatch/abs_mean"], rel=1e-3)


def test_weights_are_the_gradient_of_gvpos_loss(finished):
    """The first mini-batch of GVPO at the step's start: w is the centred reward by a factor."""
    first = [r for r in rows(finished, steps=[1]) if r["group"] < 2]
    centred = {}
    for g in (0, 1):
        rewards = np.array([r["reward"] for r in first if r["group"] == g])
        centred |= {(g, m): value for m, value in enumerate(rewards - rewards.mean())}
    assert all(r["weights"] is None for r in first), "one weight for all tokens of a response"
    ratios = [r["weight"] / centred[r["group"], r["member"]] for r in first]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-4) and ratios[0] < 0
    assert any(r["weight"] != 0 for r in rows(finished, steps=[1]) if r["group"] >= 2)


@pytest.fixture(scope="module")
def layouts(task, tmp_path_factory) -> Path:
    """The first step of the run `finished`, on two ranks in three layouts."""
    out = tmp_path_factory.mktemp("layouts")
    launch("helpers.workers.rollouts_worker:first_step", [2], str(task), str(out), timeout=300)
    return out


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_every_layout_saves_all_rows(finished, layouts, layout):
    divided, on_one_rank = rows(layouts / layout, steps=[1]), rows(finished, steps=[1])
    assert len(divided) == 16
    for row, other in zip(divided, on_one_rank, strict=True):
        for name in ("trainer_logprobs", "rollout_logprobs", "weight", "reward"):
            assert row.pop(name) == pytest.approx(other.pop(name), rel=1e-3, abs=1e-5), name
        row.pop("seconds"), other.pop("seconds")
        assert row == other


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(task, tmp_path):
    out = tmp_path / "run"
    fit(configure(task, out, *GVPO, *SHORT, "checkpoint.every=2"), [StopAfter(2)])
    before = {path.name: path.stat().st_mtime_ns for path in (out / "rollouts").iterdir()}
    assert sorted(before) == [file_name("train", 1), file_name("train", 2)]
    for name in (file_name("train", 3), file_name("eval", 3), file_name("train", 9)):
        (out / "rollouts" / name).write_bytes(b"of a step that the checkpoint does not have")
    (out / "rollouts" / "step_000003.parquet.tmp").write_bytes(b"cut off")
    (out / "rollouts" / "notes.parquet").write_bytes(b"the user's own")
    fit(configure(task, out, *GVPO, *SHORT, "checkpoint.every=2"), resume=True)
    after = {path.name: path.stat().st_mtime_ns for path in (out / "rollouts").iterdir()}
    assert sorted(after) == ["notes.parquet", *(file_name("train", step) for step in (1, 2, 3, 4))]
    assert {name: after[name] for name in before} == before
    assert [r["step"] for r in rows(out)] == [step for step in (1, 2, 3, 4) for _ in range(16)]


def test_a_file_that_a_kill_took_is_named(task, tmp_path, caplog):
    """The thread that writes files may be behind a checkpoint: the run went on without a word."""
    out = tmp_path / "run"
    fit(configure(task, out, *GVPO, *SHORT, "checkpoint.every=2"), [StopAfter(2)])
    (out / "rollouts" / file_name("train", 2)).rename(out / "rollouts" / f"{file_name('train', 2)}.tmp")
    fit(configure(task, out, *GVPO, *SHORT, "checkpoint.every=2"), resume=True)
    [record] = [r for r in own_records(caplog) if "has no file of" in r.getMessage()]
    assert "rollouts has no file of step 2: the run ended before" in record.getMessage()
    assert saved_steps(out) == [1, 3, 4]


def test_fewer_steps_fewer_groups_or_none(task, tmp_path):
    few = ("logging.rollouts={every: 2, groups: 3}", "train.steps=2")
    fit(configure(task, tmp_path / "few", *GVPO, *SHORT, *few))
    saved_rows = rows(tmp_path / "few")
    assert {r["step"] for r in saved_rows} == {2}
    assert [r["group"] for r in saved_rows] == [g for g in (0, 1, 2) for _ in range(4)]
    assert all(np.allclose(r["trainer_logprobs"], r["rollout_logprobs"], atol=1e-4) for r in saved_rows)
    fit(configure(task, tmp_path / "none", *GVPO, *SHORT, "logging.rollouts.every=0", "train.steps=1"))
    assert not (tmp_path / "none" / "rollouts").exists()


def responses(step: int, kind: str = "train", text: str = "text", **fields: object) -> Responses:
    prompt = Prompt("p", (1, 2), text)
    rollout = Rollout([3, 4], [-1.0, -2.0], text, "stop", 0, rewards={"a": 1.0}, reward=1.0)
    return Responses(kind, step, [Group(prompt, [replace(rollout, **fields)])])


def writer(out: Path, max_gb: float = 1.0, components: tuple[str, ...] = ("a",)) -> RolloutWriter:
    return RolloutWriter(out, RolloutFilesConfig(max_gb=max_gb), components, None)


def test_the_oldest_files_go_above_the_limit(tmp_path, caplog):
    size = len(_bytes(tmp_path, responses(1)))
    files = writer(tmp_path, max_gb=3.5 * size / 1e9)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 7):
            files.write(responses(step))
        files.write(responses(6, "eval"))
        files.close()
    assert saved_steps(tmp_path) == [5, 6] and saved_steps(tmp_path, "eval") == [6]
    [warning] = [record.getMessage() for record in own_records(caplog)]
    assert "logging.rollouts.max_gb" in warning and "first step_000001.parquet" in warning
    files = writer(tmp_path / "small", max_gb=1e-9)
    files.write(responses(1))
    files.write(responses(2))
    files.close()
    assert saved_steps(tmp_path / "small") == [2], "the newest stays, however large"


KILLED = """
import sys
from itertools import count
from pathlib import Path
from megatron_gvpo.settings.sections import RolloutFilesConfig
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.observe.rollouts.table import Responses
from megatron_gvpo.observe.rollouts.writer import RolloutWriter

rollouts = [Rollout(list(range(2000)), [-0.5] * 2000, str(i) * 9000, "stop") for i in range(64)]
groups = [Group(Prompt("p", (1,), "?"), rollouts)]
writer = RolloutWriter(Path(sys.argv[1]), RolloutFilesConfig(), [], None)
for step in count(1):
    writer.write(Responses("train", step, groups))
"""


def test_a_writer_that_is_killed_leaves_whole_files_and_goes_on_without_doubles(tmp_path):
    directory, after = tmp_path / "rollouts", 3
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)]) as process:
        deadline = time.monotonic() + 120
        while not (len(saved_steps(tmp_path)) > after and list(directory.glob("*.tmp"))):
            assert process.poll() is None and time.monotonic() < deadline
        process.kill()
    steps_on_disk = saved_steps(tmp_path)
    assert steps_on_disk == list(range(1, steps_on_disk[-1] + 1))
    assert {path.name for path in directory.glob("*.tmp")} <= {
        file_name("train", steps_on_disk[-1] + 1) + ".tmp"
    }
    assert [r["step"] for r in rows(tmp_path, columns=["step"])] == [
        step for step in steps_on_disk for _ in range(64)
    ]
    files = RolloutWriter(tmp_path, RolloutFilesConfig(), ["a"], after)
    assert saved_steps(tmp_path) == list(range(1, after + 1)) and not list(directory.glob("*.tmp"))
    files.write(responses(after + 1))
    files.close()
    assert saved_steps(tmp_path) == list(range(1, after + 2))


def _bytes(directory: Path, of: Responses) -> bytes:
    pq.write_table(table(of, ["a"]), directory / "one", compression="zstd")
    return (directory / "one").read_bytes()


def test_an_error_of_the_thread_is_raised_where_it_is_seen(tmp_path):
    (tmp_path / "rollouts").write_text("a file in the way")
    files = writer(tmp_path)
    files.write(responses(1))
    with pytest.raises(FileExistsError):
        files.close()


def test_a_file_that_is_not_written_in_time_is_told_of(tmp_path, monkeypatch):
    """Fails on the old code: the run ended as if its last file were there."""
    ready = threading.Event()
    monkeypatch.setattr("megatron_gvpo.observe.rollouts.writer.SECONDS", 0.2)
    monkeypatch.setattr(RolloutWriter, "_write", lambda *_: ready.wait(30))
    hangs = writer(tmp_path)
    hangs.write(responses(1))
    with pytest.raises(OSError, match=r"a file of rollouts took over 0\.2 s"):
        hangs.close()
    ready.set()


def test_unusual_responses(tmp_path):
    files = writer(tmp_path, components=())
    odd = responses(
        1, text="half \ud83d", weight_version=-1, source="demonstration", logprobs=[], token_ids=[]
    )
    files.write(odd)
    files.write(responses(2, spans=[(4, 0, 1), (5, 1, 2)], reward=math.nan))
    files.close()
    first, second = rows(tmp_path)
    assert first["prompt"] == "half ?" and first["response_ids"] == []
    assert first["rollout_logprobs"] is first["version_first"] is first["rewards"] is None
    assert (second["version_first"], second["version_last"]) == (4, 5) and math.isnan(second["reward"])


TALK = {
    "token_ids": [3, 4, 5],
    "turns": [Turn(0, -1, None, (), reward=0.25), Turn(2, 0, None, (8, 9), "solver")],
    "messages": [
        {"role": "assistant", "content": "call \ud83d"},
        {"role": "tool", "name": "add", "content": "42"},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "42"},
    ],
}


def as_numbers(ids, skip_special_tokens):
    return " ".join(map(str, ids))


def test_the_turns_of_a_conversation(tmp_path):
    files = writer(tmp_path)
    files.write(responses(1, **TALK).with_texts(as_numbers))
    files.write(responses(2).with_texts(as_numbers))
    files.close()
    talk, single = rows(tmp_path)
    assert single["turns"] is single["messages"] is None
    first, second = talk["turns"]
    assert first == {
        **{"agent": None, "text": "call ?", "tokens": 2, "reward": 0.25, "after": -1},
        **{"given": None, "given_ids": [], "tools": ["add"]},
    }
    assert second == {
        **{"agent": "solver", "text": "42", "tokens": 1, "reward": None, "after": 0},
        **{"given": "42\nso?", "given_ids": [8, 9], "tools": []},
    }
    assert [m["role"] for m in talk["messages"]] == ["assistant", "tool", "user", "assistant"]
    assert talk["messages"][1] == {"role": "tool", "name": "add", "content": "42", "tool_calls": None}


def test_messages_of_programs_that_are_no_plain_texts(tmp_path):
    calls = [{"function": {"name": "add", "arguments": "{}"}}]
    odd = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    odd += [{"role": "assistant", "content": None, "tool_calls": calls, "name": None}]
    files = writer(tmp_path)
    files.write(responses(1, **{**TALK, "messages": odd}))
    files.close()
    user, assistant = rows(tmp_path)[0]["messages"]
    assert "hi" in user["content"] and assistant["content"] == "" and "add" in assistant["tool_calls"]
    assert '"name": "add"' in few_samples(responses(1, **{**TALK, "messages": odd}))[0].response


CALLS = [{"function": {"name": "add", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("changed", "given_text"),
    [
        ({"messages": TALK["messages"][:2]}, None),
        ({"turns": [Turn(0), Turn(2, -1, None, (8,), "critic")]}, None),
        (
            {
                "messages": [
                    {"role": "assistant", "content": None, "tool_calls": CALLS},
                    {"role": "tool", "content": "42"},
                    {"role": "assistant", "content": "so 42"},
                ]
            },
            "42",
        ),
    ],
    ids=["fewer messages", "several agents", "calls of tools alone"],
)
def test_turns_that_the_messages_do_not_spell_are_decoded(tmp_path, changed, given_text):
    files = writer(tmp_path)
    files.write(responses(1, **{**TALK, **changed}).with_texts(as_numbers))
    files.close()
    [talk] = rows(tmp_path)
    assert [(turn["text"], turn["given"], turn["tokens"]) for turn in talk["turns"]] == [
        ("3 4", None, 2),
        ("5", given_text, 1),
    ]


def test_a_conversation_is_shown_in_one_line():
    sample = few_samples(responses(1, **TALK))[0]
    assert sample.response == "call ? | tool: 42 | user: so? | 42"
    assert one_line(sample, 120).endswith("| tool: 42 | user: so? | 42")


def test_files_of_other_versions_are_read_together(tmp_path):
    files = writer(tmp_path)
    files.write(responses(1))
    files.close()
    newer = table(responses(2), ["a", "b"]).drop_columns("seconds")
    judged = pa.array([[{"judge": "strict", "grade": 1}]])
    pq.write_table(newer.append_column("judged", judged), tmp_path / "rollouts" / file_name("train", 2))
    first, second = rows(tmp_path)
    assert first["judged"] is None and second["judged"] == [{"judge": "strict", "grade": 1}]
    assert first["rewards"] == {"a": 1.0, "b": None} and second["seconds"] is None
    assert read_rollouts(tmp_path, steps=[2], columns=["reward", "seconds"]).column_names == ["reward"]
    (tmp_path / "rollouts" / file_name("train", 3)).write_bytes(b"PAR1 damaged")
    with pytest.raises(ValueError, match=r"step_000003.parquet: not a file of rollouts"):
        rows(tmp_path)
    foreign = tmp_path / "rollouts" / file_name("train", 3)
    pq.write_table(pa.table({"prompt": ["1+1="], "answer": ["2"]}), foreign)
    with pytest.raises(ValueError, match=r"step_000003.parquet: not a file of rollouts: it has no column"):
        rows(tmp_path)
    pq.write_table(newer.set_column(newer.column_names.index("reward"), "reward", pa.array(["1"])), foreign)
    with pytest.raises(ValueError, match=r"its files are not of one run"):
        rows(tmp_path)
    assert read_rollouts(tmp_path / "nothing").num_rows == 0


def test_the_schema_is_that_of_the_columns():
    assert schema(["a"]).names == [column.name for column in COLUMNS]
    assert table(responses(1), ["a"]).schema == schema(["a"])
