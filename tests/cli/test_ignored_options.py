"""Options that another option makes idle, and abbreviations: each is an error, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gvpo.cli import main


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("replay RUN --against RUN --step 3", "--step 3: --against compares the records of all steps"),
        ("replay RUN --against RUN --without-model", "--without-model: --against compares"),
        ("rehearse run.yaml --build", "--build only compiles, and reads no run.yaml"),
        ("doctor --url http://127.0.0.1:1", "--url: for doctor --cluster only"),
    ],
)
def test_an_idle_option_is_named(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert error in line


@pytest.mark.parametrize("option", ["--o", "--over", "--res"])
def test_an_abbreviation_is_not_an_option(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--o` would replace an earlier run."""
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "run.yaml"), option])
    assert ended.value.code == 2
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        ("train run.yaml --n-proc 2", "--n-proc 2; did you mean --nproc? (megatron-gvpo train --help shows"),
        ("export run.yaml --out hf --steps=3", "--steps=3; did you mean --step? (megatron-gvpo export --"),
        ("keys --json lr", "unrecognized arguments: --json (megatron-gvpo keys --help shows all options)"),
    ],
)
def test_an_unknown_option_leads_to_the_help_of_its_command(
    words: str, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and ending in capsys.readouterr().err
