"""The parts of benchmarks/smollm2_papers.py that need no run: rows, the order of cells, tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_gvpo.settings.config import load_config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import mismatch
import smollm2_papers as papers


@pytest.fixture
def args(tmp_path, monkeypatch):
    command = ["--out", str(tmp_path), "--work", str(tmp_path), "--steps", "2", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["smollm2_papers.py", *command])
    return papers.parse()


def line(row, seed, strict, **others):
    """A finished cell, as the program writes it."""
    settings = {"steps": 2, "problems": 16, "responses": 8, "held_out": 256}
    fixed = {"lenient": 0.5, "curve": [0.25, 0.75], "responses": 128, "of": settings}
    return {"row": row, "seed": seed, "strict": strict, **fixed, **others}


def write(args, lines):
    (args.out / "smollm2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("name", papers.ROWS)
def test_every_row_is_a_configuration(name, args):
    row = papers.ROWS[name]
    overrides = [f"{key}={json.dumps(value)}" for key, value in papers.overrides_of(row, 1, args).items()]
    config = load_config([papers.EXAMPLE / "gvpo.yaml"], overrides)
    assert (config.algorithm.recipe, config.optimizer.lr) == (row.algorithm["recipe"], row.lr)
    assert (config.rollout.n, config.train.prompts_per_step, config.train.mini_batches) == (8, 16, 2)
    assert not row.stale or callable(getattr(mismatch, f"engine_of_stale{row.stale}"))


def test_all_rows_of_a_seed_run_before_the_next_seed(args):
    cells = papers.missing(args)
    table = papers.TABLES["GVPO Table 2"]
    assert cells[:8] == [(name, seed) for seed in (0, 1) for name in table]
    assert len(cells) == len(set(cells)) == 2 * len(papers.ROWS)


def test_a_cell_of_the_same_settings_is_not_repeated(args):
    other = {"steps": 2, "problems": 4, "responses": 8, "held_out": 256}
    write(args, [line("GVPO", 0, 0.5), line("GVPO without Var", 0, 0.5, of=other)])
    cells = papers.missing(args)
    assert ("GVPO", 0) not in cells and ("GVPO without Var", 0) in cells
    args.rows = ["GRPO"]
    assert papers.missing(args) == [("GRPO", 0), ("GRPO", 1)]


def test_the_tables_have_means_errors_verdicts_and_what_did_not_run(args):
    write(
        args,
        [
            *(line("GVPO", seed, strict) for seed, strict in enumerate((0.5, 0.6))),
            *(line("GVPO without Cov", seed, strict) for seed, strict in enumerate((0.1, 0.2))),
            line("GRPO", 0, 0.4),
        ],
    )
    results = papers.read(args)
    text = papers.report(results, args)
    assert "| GVPO | 55.0 ± 5.0 | 50.0 ± 0.0 | 50.0 ± 0.0 | 2 | 128 |" in text
    assert "- GVPO above GVPO without Cov: agrees (+0.400, +5.7 standard errors)" in text
    assert "- GVPO above GRPO: one seed: nothing to say" in text
    assert "Not run, of 2 seeds each: GVPO without Var (2), GVPO without Var and Cov (2)." in text
    papers.draw(results, args.out / "curves.png")
    assert (args.out / "curves.png").is_file()


def test_the_best_learning_rate_of_a_method_is_judged_on_the_seeds_that_all_its_rates_have(args):
    write(
        args,
        [
            *(line("GRPO", seed, strict) for seed, strict in enumerate((0.4, 1.0))),
            line("GRPO, lr 1e-4", 0, 0.5),
            line("GVPO", 0, 0.5),
        ],
    )
    text = papers.report(papers.read(args), args)
    assert "- GRPO: best with 1e-04 (40.0 with 3e-05, 50.0 with 1e-04; seeds in common: 1)" in text
    assert "- GVPO: best" not in text


def test_every_method_of_the_comparison_has_three_learning_rates():
    for method in papers.METHODS:
        rows = [name for name in papers.TABLES["Learning rates"] if papers.method_of(name) == method]
        assert sorted(papers.ROWS[name].lr for name in rows) == [1e-5, 3e-5, 1e-4]
