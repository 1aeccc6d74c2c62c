"""`rehearse --rollouts`: the update is that of a run's saved rollouts, as its writer writes them."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.on_null_cuda import phase, rehearse, write_model

from megatron_gvpo.cli import main
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.observe.rollouts.table import Responses, TrainedRows, table
from megatron_gvpo.planner import architecture
from megatron_gvpo.rehearsal import saved_rows
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.turns import Turn
from megatron_gvpo.types import TrainBatch

GROUPS = 6


def groups_of_a_step(seed: int = 0) -> list[Group]:
    """Groups of 2 to 4 responses of 3 to 190 tokens, whose last response was cut off."""
    rng = random.Random(seed)
    groups = []
    for g in range(GROUPS):
        prompt = Prompt(f"p{g}", tuple(rng.choices(range(9, 99), k=rng.randint(5, 60))), "a question")
        rollouts = []
        for _ in range(rng.randint(2, 4)):
            ids = rng.choices(range(9, 99), k=rng.randint(3, 190))
            reward = float(rng.random() < 0.5)
            rollouts.append(
                Rollout(
                    ids, [-0.5] * len(ids), "an answer", "stop", 4, rewards={"math": reward}, reward=reward
                )
            )
        rollouts[-1].finish_reason = "length"
        groups.append(Group(prompt, rollouts))
    return groups


def save(run: Path, groups: list[Group], step: int = 5, trained: list[int] | None = None) -> Path:
    """Write the step's file as a run does; `trained`: the responses that have weights, if not all."""
    rows = TrainBatch.from_groups(groups)
    rows = rows.select(range(len(rows)) if trained is None else trained)
    weight_r = rows.reward_n.new_full((rows.offsets[-1],), 0.25)
    update = TrainedRows(rows.with_columns(advantage_n=rows.reward_n), None, weight_r)
    file = run / "rollouts" / f"step_{step:06d}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(Responses("train", step, groups, [update]), ["math"]), file)
    return file


def test_the_rows_are_those_of_the_run(tmp_path: Path) -> None:
    config = load_config([write_model(tmp_path)], [])
    groups = groups_of_a_step()
    save(tmp_path / "run", groups_of_a_step(1), step=4)
    file = save(tmp_path / "run", groups)
    expected = TrainBatch.from_groups(groups)
    for path in (tmp_path / "run", file.parent, file):
        saved = saved_rows.load(str(path))
        rows = saved.rows(config)
        assert saved.file.samefile(file)
        for column in ("prompt_ids", "response_ids"):
            assert [*map(list, getattr(rows, column))] == [*map(list, getattr(expected, column))]
        for column in ("group_n", "reward_n", "truncated_n", "engine_logp_r", "version_r", "trained_n"):
            assert getattr(rows, column).tolist() == getattr(expected, column).tolist(), column
        assert rows.component_n["math"].tolist() == expected.component_n["math"].tolist()


def test_the_fullest_mini_batch_is_trained_without_the_responses_that_were_not(tmp_path: Path) -> None:
    config = load_config([write_model(tmp_path)], ["train.mini_batches=2"])
    groups = groups_of_a_step()
    half = GROUPS // 2
    halves = [TrainBatch.from_groups(part) for part in (groups[:half], groups[half:])]
    fuller = max((0, 1), key=lambda i: sum(halves[i].tokens))
    first = len(halves[0]) if fuller else 0
    everything = range(sum(map(len, halves)))
    save(tmp_path / "run", groups, trained=[i for i in everything if i != first])
    rows = saved_rows.load(str(tmp_path / "run")).rows(config)
    assert [*map(list, rows.response_ids)] == halves[fuller].response_ids[1:]
    assert rows.left_out == (1, len(halves[fuller].response_ids[0]))


def test_a_conversation_keeps_its_turns(tmp_path: Path) -> None:
    turns = [Turn(0, given=(5, 6)), Turn(4, 0, given=(7, 8, 9), agent="critic", reward=0.5)]
    talk = Rollout(
        [*range(20, 30)], [-0.1] * 10, "", "stop", 4, rewards={"math": 1.0}, reward=1.0, turns=turns
    )
    save(tmp_path, [Group(Prompt("p", (1, 2, 3), "q"), [talk, talk])])
    [group] = saved_rows.load(str(tmp_path)).groups
    assert group.rollouts[0].turns == turns


def test_token_ids_that_a_secret_hid_have_their_number(tmp_path: Path) -> None:
    file = save(tmp_path, groups_of_a_step())
    read = pq.read_table(file)
    for name in ("prompt_ids", "response_ids"):
        nothing = pa.nulls(len(read), read.schema.field(name).type)
        read = read.set_column(read.column_names.index(name), name, nothing)
    pq.write_table(read, file)
    rows = TrainBatch.from_groups(saved_rows.load(str(file)).groups)
    assert rows.tokens == TrainBatch.from_groups(groups_of_a_step()).tokens


@pytest.mark.parametrize("shared", [False, True], ids=["repeated prompts", "shared prompts"])
def test_a_rank_computes_as_many_operations_as_the_saved_tokens_take(tmp_path: Path, shared: bool) -> None:
    """The planner's operations of so many tokens, which are counted by hand, are those that cuBLAS got."""
    file = write_model(tmp_path)
    groups = groups_of_a_step()
    save(tmp_path / "run", groups)
    rollouts = str(tmp_path / "run")
    words = [f"train.share_prompts={str(shared).lower()}", "train.max_tokens_per_micro_batch=1100"]
    result = rehearse(str(file), *words, "--world", "1", "--rollouts", rollouts)
    [rank] = result["ranks"]
    responses = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    copies = [1 if shared else len(group.rollouts) for group in groups]
    prompts = sum(n * len(group.prompt.token_ids) for n, group in zip(copies, groups, strict=True))
    # No label follows a response's last token.
    tokens = prompts + sum(responses) - len(responses)
    assert rank["rollouts"]["responses"] == len(responses) and rank["rollouts"]["groups"] == GROUPS
    assert rank["rollouts"]["tokens"] == tokens and rank["rollouts"]["micro_batches"] >= 2
    assert rank["rollouts"]["fullest"] <= 1100 and rank["pack"] == {}
    model = architecture.load(str(tmp_path / "model" / "config.json"))
    expected = model.layer_flops(tokens, 0) + model.head_flops(sum(responses))
    assert phase(result, "scoring")["counts"]["matrix_flops"] == pytest.approx(expected, rel=0.005)
    assert not phase(result, "second update")["results"]["skipped"]


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["rehearse", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_wrong_rollouts_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_model(tmp_path))
    file = save(tmp_path / "run", groups_of_a_step())

    def refused(path: Path, *more: str) -> str:
        return _refused(capsys, config, "--rollouts", str(path), *more)

    assert f"--rollouts {tmp_path / 'none'}: no such file or directory" in refused(tmp_path / "none")
    assert "no rollouts/step_000001.parquet or later step there" in refused(tmp_path / "model")
    assert "not a file of rollouts that can be read" in refused(tmp_path / "config.yaml")
    assert "--micro-batches 3: give one of them" in refused(file, "--micro-batches", "3")
    read = pq.read_table(file)
    other = tmp_path / "other.parquet"
    pq.write_table(read.drop_columns(["reward"]), other)
    assert "it has no column 'reward'" in refused(other)
    pq.write_table(read.slice(0, 0), other)
    assert "other.parquet has no responses" in refused(other)
    images = pa.array([["a.png"]] * len(read), read.schema.field("images").type)
    pq.write_table(read.set_column(read.column_names.index("images"), "images", images), other)
    assert "have images, which the file only names" in refused(other)


def test_a_step_without_trained_responses_is_refused(tmp_path: Path) -> None:
    config = load_config([write_model(tmp_path)], ["train.mini_batches=2"])
    groups = groups_of_a_step()
    half = GROUPS // 2
    halves = [TrainBatch.from_groups(part) for part in (groups[:half], groups[half:])]
    fuller = max((0, 1), key=lambda i: sum(halves[i].tokens))
    other = range(len(halves[0]), sum(map(len, halves))) if fuller == 0 else range(len(halves[0]))
    save(tmp_path / "run", groups, trained=[*other])
    with pytest.raises(saved_rows.ConfigError, match="no response of its fullest mini-batch was trained"):
        saved_rows.load(str(tmp_path / "run")).rows(config)
