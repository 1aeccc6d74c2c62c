"""A pipe in the place of a run's file, and a configuration without end, cost a line and no hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_gvpo.cli import main
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.existing_run import check_earlier_run
from megatron_gvpo.runs.lock import is_locked
from megatron_gvpo.runs.record import check_unchanged, write_record
from megatron_gvpo.settings.config import Config, load_config

NAMES = ("config.yaml", "run.json", "metrics.jsonl", "summary.json", "run.lock")
SECONDS = 60  # until a read of a pipe counts as a hang


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    def hang(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tmp_path: Path, good: Path) -> Config:
    """The configuration of a run in `out` with a checkpoint and its records."""
    out = tmp_path / "out"
    (out / "checkpoints" / "step_00000001").mkdir(parents=True)
    (out / "checkpoints" / "step_00000001" / "state.json").write_text('{"step": 1}')
    config = load_config([good], [f"output_dir={out}"])
    write_record(config, 0, 1)
    (out / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "reward/mean": 0.5}\n')
    (out / "summary.json").write_text('{"steps": 1}')
    (out / "run.lock").touch()
    return config


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_is_named_and_nobody_waits_for_it(
    run: Config, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(run.output_dir)
    assert main(["report", str(out)]) == 0
    (out / name).unlink()
    os.mkfifo(out / name)
    is_read = name in ("config.yaml", "run.json", "metrics.jsonl")
    assert main(["report", str(out)]) == (2 if is_read else 0)
    if is_read:
        assert f"{name}: a pipe, a device or a socket is in the place" in capsys.readouterr().err
    assert main(["runs", str(out.parent)]) == 0
    assert not is_locked(out)
    if is_read:
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            check_earlier_run(run, "resume")
            check_unchanged(run, ())
    else:
        check_earlier_run(run, "resume")
        assert check_unchanged(run, ()) == []


BOMB = "\n".join(
    ["a0: &a0 [{x: 1}, {x: 2}]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))]
)


@pytest.mark.parametrize("text", [BOMB, "a: &a {b: *a}"])
def test_a_configuration_without_end_is_refused(
    run: Config, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(run.output_dir, "config.yaml").write_text(text)
    assert main(["report", run.output_dir]) == 2
    assert "config.yaml: this is not the configuration of a run: its aliases" in capsys.readouterr().err
