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
    other_rates = 2 * len(papers.METHODS)
    assert len(cells) == len(set(cells)) == 2 * len(papers.ROWS) - other_rates


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
    assert "Not run, in cells: GVPO without Var (2), GVPO without Var and Cov (2)." in text
    papers.draw(results, args.out / "curves.png")
    assert (args.out / "curves.png").is_file()


def test_a_methods_best_rate_gets_all_seeds_and_the_others_one(args):
    rates = {"GRPO": 0.4, "GRPO, lr 1e-5": 0.3, "GRPO, lr 1e-4": 0.5}
    write(args, [line(row, 0, strict) for row, strict in rates.items()])
    cells = papers.missing(args)
    assert [row for row, seed in cells if row.startswith("GRPO, lr") and seed] == ["GRPO, lr 1e-4"]
    assert ("GRPO", 1) in cells  # all methods have the common rate with all seeds
    assert ("RLOO, lr 1e-5", 0) in cells and ("RLOO, lr 1e-5", 1) not in cells


def test_methods_are_compared_at_their_best_rates(args):
    rates = {"": 0.4, ", lr 1e-5": 0.3, ", lr 1e-4": 0.5}
    write(
        args,
        [
            *(line(f"GRPO{rate}", 0, strict) for rate, strict in rates.items()),
            line("GRPO, lr 1e-4", 1, 0.7),
            *(line(f"GVPO{rate}", 0, 1 - strict) for rate, strict in rates.items()),
            line("RLOO", 0, 0.9),
        ],
    )
    text = papers.report(papers.read(args), args)
    assert "- GRPO: best with 1e-04 (30.0 with 1e-05, 40.0 with 3e-05, 50.0 with 1e-04; seed 0)" in text
    assert "- RLOO: best" not in text
    compared = text.split(f"## {papers.BEST_RATES}")[1]
    assert "| GRPO, lr 1e-4 | 60.0 ± 10.0 |" in compared and "| GVPO, lr 1e-5 | 70.0 |" in compared
    assert "- GVPO above GRPO: one seed: nothing to say" in compared and "RLOO" not in compared


def test_every_method_of_the_comparison_has_three_learning_rates():
    for rates in papers.RATES_OF.values():
        assert sorted(papers.ROWS[name].lr for name in rates) == [1e-5, 3e-5, 1e-4]
