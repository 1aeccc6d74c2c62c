"""The head's backend `quack` without a GPU: its product in a transcription, and compiled for an H100.

`pytest --write-tables tests/kernels/test_quack_head.py` writes the table of head.md anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers.paths import HELPERS, ROOT
from helpers.references import quack_transcription
from helpers.references.head_reference import problem
from helpers.suite.doc_tables import Hold

from megatron_gvpo.checks import preflight
from megatron_gvpo.kernels import quack_tiles
from megatron_gvpo.kernels.linear_logprob import linear_logprob

FILE = ROOT / "docs" / "explanation" / "head.md"
MOST_SPILLED = 32  # bytes of a thread


def python(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, because Triton and QuACK read the environment at their import."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment
    )


def test_it_computes_what_the_stash_does() -> None:
    file = HELPERS / "cases" / "quack_head_cases.py"
    done = python("-m", "pytest", "-p", "no:cacheprovider", file, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:]
    assert "passed" in done.stdout or "[100%]" in done.stdout


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    variables = {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a"}
    variables["QUACK_CACHE_DIR"] = str(tmp_path_factory.mktemp("quack"))
    program = HELPERS / "programs" / "quack_compiled.py"
    done = python(program, *quack_tiles._TILES, TRITON_INTERPRET="0", **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_product_compiles_for_hopper(kernels: list[dict[str, Any]]) -> None:
    """It uses the tensor memory accelerator and Hopper's products, and rounds as the transcription does."""
    assert [made["tile"] for made in kernels] == [*quack_tiles._TILES]
    for made in kernels:
        assert made["stack"] <= MOST_SPILLED, made
        assert made["products"] and made["loads"] and made["stores"], made
        # A thread has as many numbers of a tile of 128 rows as the tile has columns.
        assert made["powers"] == made["fused"] == made["tile"], made


def test_the_table_is_current(kernels: list[dict[str, Any]], hold_current: Hold) -> None:
    lines = ["| columns of a tile | registers a thread | spilled bytes |", "|---|---|---|"]
    lines += [f"| {made['tile']} | {made['registers']} | {made['stack']} |" for made in kernels]
    hold_current(FILE, {"quack resources": lambda: "\n".join(lines)})


def test_the_epilogue_has_the_transcribed_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions, which QuACK compiles, are computed with tensors instead of numbers."""
    from megatron_gvpo.kernels import quack_product

    monkeypatch.setattr(quack_product, "pexp2", torch.exp2)
    x_rh, w_vh, labels_r, *_ = problem(9, 8, 256, 3.0)
    inverse_r = torch.linspace(0.5, 2, 9)
    out_rv = torch.empty(9, 256, dtype=torch.bfloat16)
    offset_rt, sum_rt, target_r = quack_transcription.product(
        x_rh, w_vh, labels_r, inverse_r, out_rv, tile=128
    )
    epilogue, acc_rtc = quack_product.exponentials, (x_rh @ w_vh.T).unflatten(1, (2, 128))
    largest_rt = epilogue.prepass(acc_rtc, inverse_r[:, None, None])["offset"].amax(2)
    assert torch.equal((largest_rt * quack_product.LOG2E).round(), offset_rt)
    values = epilogue.fn(acc_rtc, inverse_r[:, None, None], offset_rt[..., None])
    assert set(values) == {"D", "sum", "target"}
    torch.testing.assert_close(values["D"].flatten(1).bfloat16(), out_rv, rtol=2**-7, atol=0)
    torch.testing.assert_close(values["sum"].sum(2), sum_rt, rtol=1e-5, atol=0)
    torch.testing.assert_close(values["target"].flatten(1)[torch.arange(9), labels_r], target_r)


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.float32, r"computes in bf16, and the inputs are torch\.float32: use 'auto'"),
        (torch.bfloat16, r"needs a GPU of compute capability 9\.0 \(Hopper\): use 'auto'"),
    ],
)
def test_another_dtype_or_device_is_refused(dtype: torch.dtype, words: str) -> None:
    hidden, weight, labels, *_ = problem(3, 8, 128, dtype=dtype)
    with pytest.raises(ValueError, match=f"backend='quack' {words}"):
        linear_logprob(hidden, weight, labels, backend="quack")


def test_the_columns_that_preflight_asks_for() -> None:
    assert preflight._QUACK_COLUMNS == quack_tiles.STEP == min(quack_tiles._TILES)
    assert all(tile % quack_tiles.STEP == 0 for tile in quack_tiles._TILES)
